"""What the commands write on a terminal: progress bars, tables, sizes."""

import os
import sys
import time

from zse.lazy import unicodedata

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def size(nbytes: float) -> str:
    """Bytes for people: 98 kB, 93.8 MB (powers of 1000, as disks and download pages count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def table(rows: "Sequence[Sequence[str]]") -> str:
    """Left-aligned columns, two spaces apart; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def notice(line: str) -> None:
    """One line about what is going on; stdout stays for results."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class ProgressBar:
    """Callable as progress(label, done, total), in bytes. On a terminal a bar that redraws itself; elsewhere a line
    every 5 s."""

    def __init__(self, subject: str):
        self._subject = subject
        self._tty = sys.stderr.isatty()
        self._label, self._start, self._last_draw, self._drawn = "", 0.0, 0.0, False
        self._is_complete = False

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if label != self._label:
            self._end_line()
            self._label, self._start, self._first, self._last_draw = label, now, done, 0.0 if self._tty else now
            self._is_complete = False
        if self._tty:
            if now - self._last_draw >= 0.05 or done >= total:
                self._last_draw = now
                self._draw(done, total, now)
        elif (done >= total > 0 and not self._is_complete) or now - self._last_draw >= 5:
            self._last_draw, self._is_complete = now, done >= total
            notice(f"{self._subject}: {label} {self._amount(done, total)}")

    def _amount(self, done: int, total: int) -> str:
        return f"{100 * done / total if total else 100:3.0f} %  {size(done)} of {size(total)}"

    def _draw(self, done: int, total: int, now: float) -> None:
        filled = 24 * done // total if total else 24
        seconds = now - self._start
        rate = (done - self._first) / seconds if seconds > 0.5 else 0
        speed = f"  {size(rate)}/s" if rate else ""
        left = f"  {(total - done) / rate:.0f} s left" if rate and done < total else ""
        bar = "█" * filled + "░" * (24 - filled)
        sys.stderr.write(f"\r\x1b[K{self._subject}: {self._label} {bar} {self._amount(done, total)}{speed}{left}")
        sys.stderr.flush()
        self._drawn = True

    def _end_line(self) -> None:
        if self._drawn:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._drawn = False

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._end_line()


_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def printable(text: str) -> str:
    """Text of unknown origin on one line, control characters and bytes of names that are no UTF-8 shown and not obeyed."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text.translate(_VISIBLE).replace("\n", "\\n").replace("\t", "\\t")


def reply_writer(stream, wraps: bool = False):
    """A function that writes a model's text and flushes. On a terminal control characters are shown, not obeyed: a
    model (or who wrote its prompt) must not be able to move the cursor, set the title or fill the clipboard. wraps:
    lines are broken between words there."""
    is_terminal = stream.isatty()
    shown = _VISIBLE if is_terminal else {}
    columns = os.get_terminal_size(stream.fileno()).columns if wraps and is_terminal else 0  # 0: it does not say
    # The last column stays free: a character there leaves the cursor before or behind it, as the terminal likes.
    wrap = WordWrap(columns - 1) if columns else None

    def write(text: str) -> None:
        text = text.translate(shown)
        stream.write(text if wrap is None else wrap.feed(text))
        stream.flush()

    return write


class WordWrap:
    """Breaks the lines of a text that comes piece by piece between words, at `width` columns. Of a word that reaches
    the edge what stands there is taken back and written on the next line; code between lines of ``` is left alone."""

    def __init__(self, width: int):
        self._width = max(width, 1)
        self._column, self._line, self._word, self._in_code = 0, "", "", False

    def feed(self, text: str) -> str:
        """What to write for the next piece."""
        return "".join(map(self._put, text))

    def _put(self, char: str) -> str:
        if char == "\n":
            self._in_code ^= self._line.lstrip().startswith("```")
            return self._new_line()
        self._line += char
        if self._in_code or self._line.lstrip().startswith("```"):
            return char
        columns = 8 - self._column % 8 if char == "\t" else _columns(char)
        before = ""
        if self._column + columns > self._width:
            taken_back = sum(map(_columns, self._word))
            # Between words, or a word as long as the line.
            if char in " \t" or not taken_back or taken_back == self._column:
                before = self._new_line(self._line)
            else:
                word = self._word
                before = f"\x1b[{taken_back}D\x1b[K" + self._new_line(self._line) + word
                self._column, self._word = taken_back, word
                # A wide character behind a word that is nearly as long as the line.
                if taken_back + columns > self._width:
                    before += self._new_line(self._line)
            if char in " \t":
                return before
        self._column += columns
        # Chinese and Japanese have no spaces: a line may end behind each character.
        self._word = "" if char in " \t" or columns == 2 else self._word + char
        return before + char

    def _new_line(self, line: str = "") -> str:
        self._column, self._word, self._line = 0, "", line
        return "\n"


def _columns(char: str) -> int:
    """How many columns a character takes on a terminal."""
    if char < "\x7f":
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
