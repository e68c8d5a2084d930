"""What a step with images gets beside its other inputs: which tokens take a row of image embeddings, and the rows."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from zse.kernels.images import place_rows, rope_sections
from zse.lazy import numpy as np
from zse.scheduler import images
from zse.scheduler.batch import Entry
from zse.tensor import Tensor


class StepImages(NamedTuple):
    """As a recording's launches see it. rows i32 [tokens]: which row of `data` f32 [most, hidden] a token takes, -1: none.
    more: likewise, for the first layers, whose streams get them added. sees i32 [tokens]: the last position that a token
    sees; None: its own; windowed: in layers with a window alone. turned_by i32 [3, most]: positions in three parts, sections i32 [pairs of a head]: which of them a
    pair turns by; None: all turn by the step's positions."""

    rows: Tensor
    data: Tensor
    more: tuple[Tensor, ...] = ()
    sees: Tensor | None = None
    turned_by: Tensor | None = None
    sections: Tensor | None = None
    windowed: bool = False

    def place(self, run: Any, layer: int = -1) -> None:
        """Record into a zse.plan.record.Run: rows of `data` over the stream; or behind a layer its rows of `more` added to
        it."""
        data = self.data if layer < 0 else self.more[layer]
        place_rows(run.recorder, data, run.of(self.rows), run.of(run.stream), add=layer >= 0)

    def turn(self, run: Any, inv_freq: Tensor, table: Tensor, mscale: float) -> bool:
        """Record the table of rotations; False where tokens turn by the step's positions."""
        if self.turned_by is None or self.sections is None:
            return False
        rope_sections(run.recorder, self.turned_by, self.sections, inv_freq, table, mscale)
        return True


class ImageInputs:
    """The inputs of one set of step buffers. hidden: columns of an embedding; layers: how many rows of `more` there are
    beside it; sees: whether tokens of an image see each other; sections: see StepImages, () for none. embed_id: the token that
    is embedded in place of an image's, None: they are themselves."""

    def __init__(
        self,
        device: Any,
        *,
        max_tokens: int,
        hidden: int,
        layers: int,
        sees: bool,
        sections: tuple[int, ...] = (),
        windowed: bool = False,
        embed_id: int | None = None,
    ):
        self._most, self._hidden, self._layers, self._sees = max_tokens, hidden, 1 + layers, sees
        self._windowed, self._embed_id, self._rows = windowed, embed_id, 0  # rows: that the last step took
        self._sections, self._turned_at = sections, 8 * max_tokens
        self._data_at = self._turned_at + 12 * max_tokens + 4 * len(sections)
        self._data_at += -self._data_at % 64
        self.staging = device.staging(self._data_at + 4 * self._layers * max_tokens * hidden, label="step")

    def tensors(self, size: int) -> StepImages:
        """Of recordings for up to `size` tokens."""
        buffer = self.staging.buffer
        data, *more = (
            Tensor(buffer, (self._most, self._hidden), "f32", self._data_at + 4 * number * self._most * self._hidden)
            for number in range(self._layers)
        )
        sees = Tensor(buffer, (size,), "i32", 4 * self._most) if self._sees else None
        turned_by = sections = None
        if self._sections:
            at = self._turned_at + 12 * self._most
            turned_by = Tensor(buffer, (3, self._most), "i32", self._turned_at)
            sections = Tensor(buffer, (len(self._sections),), "i32", at)
            self.staging.host[at : at + 4 * len(self._sections)] = array("i", self._sections).tobytes()
        return StepImages(
            Tensor(buffer, (size,), "i32", 0), data, tuple(more), sees, turned_by, sections, self._windowed
        )

    def record(self, recorder: Any, size: int) -> StepImages:
        """tensors(), and their upload: of data the rows that so many tokens may take."""
        recorder.upload(self.staging, 0, self._data_at)
        for number in range(self._layers):
            at = self._data_at + 4 * number * self._most * self._hidden
            recorder.upload(self.staging, at, 4 * size * self._hidden)
        return self.tensors(size)

    def sent(self) -> list[tuple[int, bytes]]:
        """What fill() wrote, as (byte, data) of the staging: for ranks that have no images."""
        host, parts = self.staging.host, [(0, self._data_at)]
        for number in range(self._layers):
            at = self._data_at + 4 * number * self._most * self._hidden
            parts.append((at, at + 4 * self._rows * self._hidden))
        return [(at, bytes(host[at:end])) for at, end in parts]

    def fill(self, entries: Sequence[Entry], token_ids: memoryview) -> None:
        """Write what the entries' tokens take. token_ids: those of the step."""
        at = count = 0
        rows, sees = array("i"), array("i")
        turned = array("i"), array("i"), array("i")
        host, most, width = self.staging.host, self._most, 4 * self._hidden
        for entry in entries:
            end = entry.start + entry.count
            mine, seen = array("i", [-1]) * entry.count, array("i", range(entry.start, end))
            for image in entry.request.options.images:
                first, last = max(image.start, entry.start), min(image.end, end)
                if first >= last:
                    continue
                if image.whole:
                    seen[first - entry.start : last - entry.start] = array("i", [image.end - 1]) * (last - first)
                parts = image.content.parts[first - image.start : last - image.start]
                taken = [part for part in parts if part >= 0]
                for place, part in enumerate(parts, first - entry.start):
                    if part >= 0:
                        mine[place] = count + part - taken[0]
                        if self._embed_id is not None:
                            token_ids[at + place] = self._embed_id
                if taken:
                    values = image.content.values[:, taken[0] : taken[-1] + 1]
                    for number in range(self._layers):
                        to = self._data_at + (number * most + count) * width
                        host[to : to + len(taken) * width] = np.ascontiguousarray(values[number]).data.cast("B")
                    count += len(taken)
            rows += mine
            sees += seen
            if self._sections:
                lines = images.turned_by(entry.request.options.images, entry.start, end)
                for whole, line in zip(turned, lines, strict=True):
                    whole.extend(line)
            at += entry.count
        self._rows = count
        host[: 4 * at] = rows.tobytes()
        if self._sees:
            host[4 * most : 4 * most + 4 * at] = sees.tobytes()
        for number, line in enumerate(turned if self._sections else ()):
            first = self._turned_at + 4 * most * number
            host[first : first + 4 * at] = line.tobytes()


class ImageSets:
    """The ImageInputs of each set of step buffers, made when the first step has images."""

    def __init__(self, device: Any, tower: Any, config: Any, number: int):
        """tower: a TowerPlan; config: the engine's."""
        self._device, self._tower, self._most, self._number = device, tower, config.max_tokens_per_step, number
        self._made: list[ImageInputs] = []

    def all(self) -> list[ImageInputs]:
        """One for each."""
        if not self._made:
            tower, plan = self._tower.forward.tower, self._tower
            sizes: dict[str, Any] = dict(max_tokens=self._most, hidden=tower.out, layers=len(tower.deepstack))
            sizes |= dict(sees=plan.vision.whole, sections=plan.sections)
            sizes |= dict(windowed=plan.vision.windowed, embed_id=plan.vision.embed_id)
            self._made = [ImageInputs(self._device, **sizes) for _ in range(self._number)]
        return self._made

    def needed(self, entries: Sequence[Entry]) -> bool:
        """Whether a token of the entries is an image's, or turns by another position than its own."""
        if self._tower.sections:
            return any(
                entry.request.options.images and entry.request.options.images[0].start < entry.start + entry.count
                for entry in entries
            )
        return any(
            image.start < entry.start + entry.count and entry.start < image.end
            for entry in entries
            for image in entry.request.options.images
        )

    def sent(self, key: tuple[str, int, int]) -> list[tuple[int, bytes]]:
        """ImageInputs.sent() of what a recording is to be replayed with; nothing of one without images."""
        kind, _, number = key
        return self[number].sent() if "images" in kind.split() else []

    def __getitem__(self, number: int) -> ImageInputs:
        return self.all()[number]
