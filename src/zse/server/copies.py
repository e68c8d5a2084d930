"""Converted copies of models (zse.formats.converted) while a server runs: a load takes the copy that there is, and a model
that is loaded again and again gets one.

A GGUF file is repacked on a CPU in each load; its copy has the same weights and is only read."""

import functools
import logging
import sys
from collections.abc import Sequence

from zse.errors import ZSEError
from zse.formats import converted
from zse.lazy import subprocess

log = logging.getLogger("zse.server")


MOST_BYTES = 8 << 30  # of all copies in the store, where nobody asked for them


class ConvertedCopies:
    """Copies for one kind of device. quantize: while loading, as the engines are told. is_asked: by whoever starts the
    server; else only GGUF files on a CPU get one, whose load makes what it could read, up to MOST_BYTES. What touches the
    disk is called in a thread."""

    def __init__(self, quantize: str | None, device: str, *, is_asked: bool):
        self._quantize, self._device, self._is_asked = quantize, device, is_asked
        self._tried: set[str] = set()

    @functools.cached_property
    def _family(self) -> str:
        return converted.family_of(self._device)  # asked late: a start does without zse.formats.converted

    def _takes(self, path: str) -> bool:
        return self._is_asked or self._family == "cpu" and path.endswith(".gguf")

    def arguments(self, words: Sequence[str]) -> list[str]:
        """Words of an engine's command line, the copy in the place of the model where there is one."""
        values = dict(zip(words[::2], words[1::2], strict=True))
        path = values.get("--model", "")
        if not self._takes(path) or "--adapter-slots" in values:
            return list(words)
        try:
            kept = converted.find(path, self._quantize, self._family)
        except ZSEError:
            kept = None  # the load says what is wrong with the file
        if kept is None:
            return list(words)
        values["--model"] = kept
        values.pop("--quantize", None)
        return [word for pair in values.items() for word in pair]

    def begin(self, paths: Sequence[str]) -> None:
        """Make those that are missing, in a process of the lowest priority; it goes on when this one ends, and ends by
        itself. Each path is tried once."""
        left = [path for path in paths if path not in self._tried and self._takes(path) and self._is_missing(path)]
        self._tried.update(left)
        if not left:
            return
        most = "-" if self._is_asked else str(MOST_BYTES)
        command = [sys.executable, "-m", "zse.cli.keep_converted", self._family, self._quantize or "-", most, *left]
        silent = subprocess.DEVNULL
        try:
            process = subprocess.Popen(command, stdin=silent, stdout=silent, start_new_session=True)
        except OSError as error:
            log.warning("no converted copy is made: %s", error)
            return
        log.info(
            "process %d keeps converted copies in the store (`zse ls`, `zse rm`): %s", process.pid, ", ".join(left)
        )

    def _is_missing(self, path: str) -> bool:
        try:
            return converted.find(path, self._quantize, self._family) is None
        except ZSEError:
            return False
