"""How an image becomes tokens of a model: what it is resized to, how its pixels are normalized, and which tokens stand
for it in a prompt. One frozen record: the engine makes it of the model's files, the server gets it with `Ready`.

Sizes and rounding are those of transformers' image processors (5.23)."""

import math

import msgspec

from zse.errors import RequestError
from zse.models.config_parts import choice, number

MAX_SIDE = 1 << 14  # pixels
MAX_RATIO = 200  # of the sides of an image that keeps its proportions, as Qwen's processor has it
# Patches of an image at most, those of Mistral 3's largest (1540 pixels) among them: what a tower works in grows with them
# (about 40 KB a patch), and the work with their square. Larger images are made smaller.
MAX_PATCHES = 112**2
MAX_CUT = 2  # images of a request that are cut into tiles (DeepSeek-VL2)


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="image"):
    """Sizes in pixels.

    family: of the tower (models/vision/registry.py). patch: side of a patch; merge: patches a side that become one token.
    resize: "square" (to size × size), "edge" (the longer side at most `size`), "area" (between min_pixels and
    max_pixels in all), "budget" (max_pixels in all, or as near as they come); all but the first keep the proportions and
    give multiples of patch * merge. "tiles": see TiledVision. resample: "bilinear" or
    "bicubic". mean, std: of x / 255, by channel (red, green, blue).

    marker: the text that a chat template writes for an image; expansion() stands in its place. placeholder: the text of
    the one token that stands for each part of the image, placeholder_id its id where config.json says it. before,
    after: around them; row_end: behind each row of parts, image_end in place of the last; "": nothing. whole: the
    parts of an image see each other in both directions in the text model; windowed: in its layers with a window alone.
    embed_id: the token whose embeddings of layers their own (Gemma 4's) the parts of an image take."""

    family: str
    patch: int
    merge: int
    resize: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    marker: str
    placeholder: str
    size: int = 0
    min_pixels: int = 0
    max_pixels: int = 0
    resample: str = "bicubic"
    placeholder_id: int | None = None
    before: str = ""
    after: str = ""
    row_end: str = ""
    image_end: str = ""
    whole: bool = False
    windowed: bool = False
    embed_id: int | None = None

    def __post_init__(self):
        number("patch_size", self.patch, 1, 1024)
        number("merge_size", self.merge, 1, 64)
        choice("resize", self.resize, ("square", "edge", "area", "budget", "tiles"))
        choice("resample", self.resample, ("bilinear", "bicubic"))
        if self.resize == "budget":
            number("max_pixels", self.max_pixels, self.unit**2, MAX_SIDE**2)
        elif self.resize == "area":
            number("min_pixels", self.min_pixels, 1, MAX_SIDE**2)
            number("max_pixels", self.max_pixels, self.min_pixels, MAX_SIDE**2)
        else:
            number("image size", self.size, self.unit, MAX_SIDE)
        if self.resize == "square" and self.size % self.unit:
            raise ValueError(f"image size: {self.size} is not a multiple of {self.unit}")
        for name in ("mean", "std"):
            for value in getattr(self, name):
                number(f"image_{name}", value, 1e-6 if name == "std" else -1e6, 1e6)

    @property
    def unit(self) -> int:
        """Pixels a side of what one token stands for."""
        return self.patch * self.merge

    def target(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) that an image of that size is resized to. RequestError where its sides differ too much."""
        check_sides(height, width)
        if self.resize == "square":
            return self.size, self.size
        if max(height, width) > MAX_RATIO * min(height, width):
            message = f"an image of {width} x {height} pixels: one side is over {MAX_RATIO} times the other"
            raise RequestError(message, code="invalid_value", param="messages")
        unit = self.unit
        if self.resize == "edge":
            ratio = max(height, width) / self.size
            if ratio > 1:
                height, width = math.floor(height / ratio), math.floor(width / ratio)
            return tuple(max(1, -(-side // unit)) * unit for side in (height, width))  # type: ignore[return-value]
        if self.resize == "budget":
            return self._within_budget(height, width)
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / factor / unit)) for side in (height, width))
        elif rows * columns * unit**2 < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * factor / unit) for side in (height, width))
        return max(rows, 1) * unit, max(columns, 1) * unit

    def _within_budget(self, height: int, width: int) -> tuple[int, int]:
        """target(): as many units as fit, one at least a side."""
        unit, factor = self.unit, math.sqrt(self.max_pixels / (height * width))
        rows, columns = (math.floor(side * factor / unit) for side in (height, width))
        most = self.max_pixels // unit**2
        if rows < 1:
            rows, columns = 1, min(width // height, most)
        elif columns < 1:
            rows, columns = min(height // width, most), 1
        return rows * unit, columns * unit

    def beside(self, count: int) -> "VisionConfig":
        """How an image of a request that has `count` of them becomes tokens."""
        return self

    def overview(self, height: int, width: int) -> int:
        """Side of the square that stands before the pixels of a resized image, 0: none does."""
        return 0

    def num_pixels(self, height: int, width: int) -> int:
        """Of a resized image, with its overview."""
        return height * width + self.overview(height, width) ** 2

    @property
    def fill(self) -> tuple[int, ...] | None:
        """The colour around an image that keeps its proportions (red, green, blue); None: it is stretched."""
        return None

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of the parts of a resized image: one embedding each."""
        return height // self.unit, width // self.unit

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        if self.resize == "budget":
            return self.max_pixels // self.patch**2
        if self.resize == "area":
            return max(self.max_pixels // self.patch**2, MAX_RATIO * self.merge**2)
        return (-(-self.size // self.unit) * self.merge) ** 2

    def fits(self, height: int, width: int) -> bool:
        """Whether target() could give this size."""
        if self.resize == "square":
            return (height, width) == (self.size, self.size)
        unit = self.unit
        if height < 1 or width < 1 or height % unit or width % unit:
            return False
        if self.resize == "edge":
            return max(height, width) < self.size + unit
        # A side is one unit at least, however thin the image is.
        is_thin = self.resize == "area" and min(height, width) == unit and max(height, width) <= MAX_RATIO * unit
        return height * width <= self.max_pixels or is_thin

    def num_tokens(self, height: int, width: int) -> int:
        """Tokens of a resized image from its first placeholder to its last part or end of a row."""
        rows, columns = self.grid(height, width)
        return rows * (columns + bool(self.row_end))

    def parts(self, height: int, width: int) -> list[int]:
        """For each of num_tokens() the number of its embedding, -1 for the end of a row."""
        rows, columns = self.grid(height, width)
        ends = [-1] if self.row_end else []
        return [part for row in range(rows) for part in (*range(row * columns, (row + 1) * columns), *ends)]

    def expansion(self, height: int, width: int) -> str:
        """The text that stands in a prompt for a resized image, in place of `marker`. Its first `placeholder` is where
        ImageInput.start points."""
        text = "".join(self.placeholder if part >= 0 else self.row_end for part in self.parts(height, width))
        if self.image_end:
            text = text.removesuffix(self.row_end) + self.image_end
        return self.before + text + self.after

    def encode(self) -> bytes:
        """For a frame."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "VisionConfig":
        """The inverse of encode()."""
        return _RECORD.decode(data)


class TiledVision(VisionConfig, frozen=True, kw_only=True, tag="tiles"):
    """An image is padded to `size` times the rows and columns of one of `tilings`, in proportion, and cut into tiles; padded to one of
    them, the overview, it stands before those where there are several (DeepSeek-VL2)."""

    resize: str = "tiles"
    tilings: tuple[tuple[int, int], ...]

    def __post_init__(self):
        super().__post_init__()
        if min((side for tiling in self.tilings for side in tiling), default=0) < 1 or self.max_patches > MAX_PATCHES:
            raise ValueError(f"candidate_resolutions: {self.tilings} tiles of {self.size} pixels")

    def target(self, height: int, width: int) -> tuple[int, int]:
        """Where most of the image's pixels stay, of equals where least is padding; the first of equals."""
        check_sides(height, width)

        def rank(tiling: tuple[int, int]) -> tuple[int, int]:
            rows, columns = (side * self.size for side in tiling)
            scale = min(columns / width, rows / height)
            kept = min(int(width * scale) * int(height * scale), height * width)
            return kept, kept - rows * columns

        rows, columns = max(self.tilings, key=rank)
        return rows * self.size, columns * self.size

    def beside(self, count: int) -> VisionConfig:
        """Of three images and more in a request none is cut."""
        return self if count <= MAX_CUT else msgspec.structs.replace(self, tilings=((1, 1),))

    def overview(self, height: int, width: int) -> int:
        return self.size if (height, width) != (self.size, self.size) else 0  # else the only tile is it, too

    @property
    def fill(self) -> tuple[int, ...]:
        return tuple(max(0, min(255, int(255 * each))) for each in self.mean)

    @property
    def tile_side(self) -> int:
        """Parts a side of a tile."""
        return -(-(self.size // self.patch) // self.merge)

    @property
    def max_patches(self) -> int:
        return (1 + max(rows * columns for rows, columns in self.tilings)) * (self.size // self.patch) ** 2

    def fits(self, height: int, width: int) -> bool:
        is_whole = height % self.size == width % self.size == 0
        return is_whole and (height // self.size, width // self.size) in (*self.tilings, (1, 1))

    def num_tokens(self, height: int, width: int) -> int:
        """Rows end in a learned one, and one stands behind the overview."""
        side = self.tile_side
        rows, columns = (side * (pixels // self.size) for pixels in (height, width))
        return side * (side + 1) + 1 + rows * (columns + 1)

    def parts(self, height: int, width: int) -> list[int]:
        return list(range(self.num_tokens(height, width)))


def check_sides(height: int, width: int) -> None:
    """RequestError for an image without pixels."""
    if height < 1 or width < 1:
        raise RequestError(f"an image of {width} x {height} pixels", code="invalid_value", param="messages")


_RECORD = msgspec.msgpack.Decoder(VisionConfig | TiledVision)
