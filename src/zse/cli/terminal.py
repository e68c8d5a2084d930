"""What the commands write on a terminal: progress bars, tables, sizes."""

import sys
import time

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
    """Callable as progress(label, done, total), in bytes. On a terminal a bar that redraws itself; elsewhere a line every 5 s."""

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
    """Text of unknown origin on one line, control characters shown and not obeyed."""
    return text.translate(_VISIBLE).replace("\n", "\\n").replace("\t", "\\t")


def reply_writer(stream):
    """A function that writes a model's text and flushes. On a terminal control characters are shown, not obeyed:
    a model (or who wrote its prompt) must not be able to move the cursor, set the title or fill the clipboard."""
    shown = _VISIBLE if stream.isatty() else {}

    def write(text: str) -> None:
        stream.write(text.translate(shown))
        stream.flush()

    return write
