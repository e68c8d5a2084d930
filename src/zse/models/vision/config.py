"""How an image becomes tokens of a model: what it is resized to, how its pixels are normalized, and which tokens stand
for it in a prompt. One frozen record: the engine makes it of the model's files, the server gets it with `Ready`.

Sizes and rounding are those of transformers' image processors (5.23)."""

import math

import msgspec

from zse.errors import FormatError, RequestError, UnsupportedError
from zse.models.config import Fields
from zse.models.config_parts import MAX_WIDTH, choice, number

MAX_SIDE = 1 << 14  # pixels
MAX_RATIO = 200  # of the sides of an image that keeps its proportions, as Qwen's processor has it
# Patches of an image at most, those of Mistral 3's largest (1540 pixels) among them: what a tower works in grows with them
# (about 40 KB a patch), and the work with their square. Larger images are made smaller.
MAX_PATCHES = 112**2
MAX_CUT = 2  # images of a request that are cut into tiles (DeepSeek-VL2)


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes in pixels.

    family: of the tower (models/vision/towers.py). patch: side of a patch; merge: patches a side that become one token.
    resize: "square" (to size × size), "edge" (the longer side at most `size`), "area" (between min_pixels and
    max_pixels in all), "budget" (max_pixels in all, or as near as they come), which but for the first keep the
    proportions and give multiples of patch * merge; "tiles" (padded to `size` times the rows and columns of one of
    `tilings`, and cut; padded to one square, the overview, it stands before
    that where it has several tiles). resample: "bilinear" or
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
    tilings: tuple[tuple[int, int], ...] = ()

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
        if self.resize == "tiles":
            sides = [side for tiling in self.tilings for side in tiling]
            if not sides or min(sides) < 1 or self.max_patches > MAX_PATCHES:
                raise ValueError(f"candidate_resolutions: {self.tilings} tiles of {self.size} pixels")
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
        if height < 1 or width < 1:
            raise RequestError(f"an image of {width} x {height} pixels", code="invalid_value", param="messages")
        if self.resize == "square":
            return self.size, self.size
        if self.resize == "tiles":
            return self._best_tiling(height, width)
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

    def _best_tiling(self, height: int, width: int) -> tuple[int, int]:
        """target(): where most of the image's pixels stay, of equals where least is padding; the first of equals."""

        def rank(tiling: tuple[int, int]) -> tuple[int, int]:
            rows, columns = (side * self.size for side in tiling)
            scale = min(columns / width, rows / height)
            kept = min(int(width * scale) * int(height * scale), height * width)
            return kept, kept - rows * columns

        rows, columns = max(self.tilings, key=rank)
        return rows * self.size, columns * self.size

    def beside(self, count: int) -> "VisionConfig":
        """How an image of a request that has `count` of them becomes tokens: of three and more none is cut."""
        is_cut = self.resize == "tiles" and count <= MAX_CUT
        return self if is_cut or self.resize != "tiles" else msgspec.structs.replace(self, tilings=((1, 1),))

    def overview(self, height: int, width: int) -> int:
        """Side of the square that stands before the pixels of a resized image, 0: none does, as it is its only tile, too."""
        return self.size if self.resize == "tiles" and (height, width) != (self.size, self.size) else 0

    def num_pixels(self, height: int, width: int) -> int:
        """Of a resized image, with its overview."""
        return height * width + self.overview(height, width) ** 2

    @property
    def fill(self) -> tuple[int, ...] | None:
        """The colour around an image that keeps its proportions (red, green, blue); None: it is stretched."""
        return tuple(max(0, min(255, int(255 * each))) for each in self.mean) if self.resize == "tiles" else None

    @property
    def tile_side(self) -> int:
        """Parts a side of a tile."""
        return -(-(self.size // self.patch) // self.merge)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of the parts of a resized image: one embedding each."""
        return height // self.unit, width // self.unit

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        if self.resize == "tiles":
            return (1 + max(1, *(rows * columns for rows, columns in self.tilings))) * (self.size // self.patch) ** 2
        if self.resize == "budget":
            return self.max_pixels // self.patch**2
        if self.resize == "area":
            return max(self.max_pixels // self.patch**2, MAX_RATIO * self.merge**2)
        return (-(-self.size // self.unit) * self.merge) ** 2

    def fits(self, height: int, width: int) -> bool:
        """Whether target() could give this size."""
        if self.resize == "square":
            return (height, width) == (self.size, self.size)
        if self.resize == "tiles":
            is_whole = height % self.size == width % self.size == 0
            return is_whole and (height // self.size, width // self.size) in (*self.tilings, (1, 1))
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
        if self.resize == "tiles":  # rows end in a learned one, and one stands behind the overview
            side = self.tile_side
            rows, columns = (side * (pixels // self.size) for pixels in (height, width))
            return side * (side + 1) + 1 + rows * (columns + 1)
        rows, columns = self.grid(height, width)
        return rows * (columns + bool(self.row_end))

    def parts(self, height: int, width: int) -> list[int]:
        """For each of num_tokens() the number of its embedding, -1 for the end of a row."""
        if self.resize == "tiles":
            return list(range(self.num_tokens(height, width)))
        rows, columns = self.grid(height, width)
        ends = [-1] if self.row_end else []
        return [part for row in range(rows) for part in (*range(row * columns, (row + 1) * columns), *ends)]

    def expansion(self, height: int, width: int) -> str:
        """The text that stands in a prompt for a resized image, in place of `marker`. Its first `placeholder` is where
        ImageInput.start points."""
        rows, columns = self.grid(height, width)
        row = self.placeholder * columns + self.row_end
        text = self.placeholder * self.num_tokens(height, width) if self.resize == "tiles" else row * rows
        if self.image_end:
            text = text.removesuffix(self.row_end) + self.image_end
        return self.before + text + self.after

    def encode(self) -> bytes:
        """For a frame."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "VisionConfig":
        """The inverse of encode()."""
        return msgspec.msgpack.decode(data, type=cls)


HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
GEMMA3 = dict(
    family="gemma3",
    resize="square",
    resample="bilinear",
    marker="<start_of_image>",
    placeholder="<image_soft_token>",
    before="\n\n<start_of_image>",
    after="<end_of_image>\n\n",
    whole=True,
)
QWEN = dict(resize="area", marker="<|image_pad|>", placeholder="<|image_pad|>")
PIXTRAL = dict(
    family="pixtral", resize="edge", marker="[IMG]", placeholder="[IMG]", row_end="[IMG_BREAK]", image_end="[IMG_END]"
)


GEMMA4 = dict(
    family="gemma4",
    resize="budget",
    marker="<|image|>",
    placeholder="<|image|>",
    before="<|image>",
    after="<image|>",
    windowed=True,
)
GEMMA4_TOKENS = (70, 140, 280, 560, 1120)  # of an image


def vision_from_hf(path: object, config: dict, processor: dict | None) -> VisionConfig | None:
    """The VisionConfig of a config.json and preprocessor_config.json (or None); None where the model sees nothing, or
    by a tower that is not known. FormatError for values that cannot be."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if name not in HF_FAMILIES or not isinstance(config.get("vision_config"), dict):
        return None
    fields, read = Fields(path, config), Fields(f"{path}: preprocessor_config.json", processor or {})
    vision = fields.section("vision_config")
    assert vision is not None
    return _build(path, **HF_FAMILIES[name](fields, vision, read))


def vision_from_gguf(path: object, metadata: dict) -> VisionConfig | None:
    """The VisionConfig of the metadata of a GGUF of the architecture clip (`mmproj-*.gguf`); None as above."""
    fields = Fields(path, metadata, "clip.vision")
    kind = fields.get("clip.projector_type") or fields.get(".projector_type")
    if kind not in GGUF_FAMILIES:
        return None
    values = GGUF_FAMILIES[kind](fields)
    mean, std = (tuple(_floats(fields, f".image_{name}")) for name in ("mean", "std"))
    values |= dict(mean=mean or values["mean"], std=std or values["std"])
    return _build(path, **values | (_around_zero(values) if kind == "gemma4v" else {}))


def _floats(fields: Fields, key: str) -> list[float]:
    value = fields.get(key)
    values = list(value) if value is not None and hasattr(value, "__len__") and not isinstance(value, str) else []
    return list(Fields(fields.path, {key: [float(each) for each in values]}).numbers(key)) if values else []


def _build(path: object, **values) -> VisionConfig:
    try:
        return VisionConfig(**values)
    except (TypeError, ValueError) as error:
        field, _, reason = str(error).partition(": ")
        raise FormatError(path, 0, field, reason or "is refused") from None


def _normalization(read: Fields, mean=HALF, std=HALF) -> dict:
    factor = read.number("rescale_factor", 1 / 255)
    for name, wanted in (("do_resize", True), ("do_rescale", True), ("do_normalize", True)):
        if read.get(name, wanted) is not wanted:
            raise UnsupportedError(f"{read.path}: {name}", read.get(name), [wanted])
    if abs(factor - 1 / 255) > 1e-6:
        raise UnsupportedError(f"{read.path}: rescale_factor", factor, ["1 / 255"])
    return dict(mean=read.numbers("image_mean") or mean, std=read.numbers("image_std") or std)


def _gemma3_hf(fields: Fields, vision: Fields, read: Fields) -> dict:
    if read.get("do_pan_and_scan"):
        raise UnsupportedError(f"{read.path}: do_pan_and_scan", True, [False])
    size, patch = vision.integer("image_size", 224, high=MAX_SIDE), vision.integer("patch_size", 16, high=1024)
    tokens = fields.integer("mm_tokens_per_image", 256)
    merge = size // patch // max(1, math.isqrt(tokens))
    if merge < 1 or (size // patch // merge) ** 2 != tokens or size // patch % merge:
        raise fields.fail("mm_tokens_per_image", f"{tokens} tokens of {size // patch} patches a side")
    found = fields.get("image_token_index", fields.get("image_token_id", 262144))
    return dict(GEMMA3, patch=patch, merge=merge, size=size, placeholder_id=found, **_normalization(read))


def _area(read: Fields, unit: int, least: int, most: int, patch: int) -> dict:
    size = read.section("size")
    low = read.get("min_pixels", size and size.get("shortest_edge")) or least
    high = read.get("max_pixels", size and size.get("longest_edge")) or most
    high = min(int(high), MAX_PATCHES * patch**2)
    return dict(min_pixels=min(int(low), high), max_pixels=max(high, unit**2))


def _qwen_hf(family: str, least: int, most: int, patch: int, mean, std, image_token: int = 151655):
    def of(fields: Fields, vision: Fields, read: Fields) -> dict:
        side, merge = vision.integer("patch_size", patch, high=1024), vision.integer("spatial_merge_size", 2, high=64)
        return dict(
            QWEN,
            family=family,
            patch=side,
            merge=merge,
            placeholder_id=fields.integer("image_token_id", image_token, low=0),
            **_area(read, side * merge, least, most, side),
            **_normalization(read, mean, std),
        )

    return of


def _pixtral_hf(fields: Fields, vision: Fields, read: Fields) -> dict:
    patch, merge = vision.integer("patch_size", 16, high=1024), fields.integer("spatial_merge_size", 2, high=64)
    size = read.section("size")
    edge = size.integer("longest_edge", 0, low=0, high=MAX_SIDE) if size else 0
    edge = min(edge or vision.integer("image_size", 1540, high=MAX_SIDE), math.isqrt(MAX_PATCHES) * patch)
    found = fields.integer("image_token_index", 10, low=0, high=MAX_WIDTH)
    normalization = _normalization(read, CLIP_MEAN, CLIP_STD)
    return dict(PIXTRAL, patch=patch, merge=merge, size=edge, placeholder_id=found, **normalization)


def _gemma4_hf(fields: Fields, vision: Fields, read: Fields) -> dict:
    patch, merge = vision.integer("patch_size", 16, high=1024), vision.integer("pooling_kernel_size", 3, high=64)
    tokens = read.integer("max_soft_tokens", 280)
    if tokens not in GEMMA4_TOKENS:
        raise UnsupportedError(f"{read.path}: max_soft_tokens", tokens, GEMMA4_TOKENS)
    for name, wanted in (("patch_size", patch), ("pooling_kernel_size", merge)):
        if read.integer(name, wanted) != wanted:
            raise read.fail(name, f"{read.get(name)}, config.json says {wanted}")
    normalizes = read.boolean("do_normalize", False)
    found = _normalization(read.changed(do_normalize=True), (0.0,) * 3, (1.0,) * 3)
    text = fields.section("text_config") or fields
    return dict(
        GEMMA4,
        patch=patch,
        merge=merge,
        max_pixels=tokens * (patch * merge) ** 2,
        placeholder_id=fields.integer("image_token_id", 258880, low=0),
        embed_id=text.integer("pad_token_id", 0, low=0),
        whole=text.get("use_bidirectional_attention") == "vision",
        **_around_zero(found if normalizes else dict(mean=(0.0,) * 3, std=(1.0,) * 3)),
    )


def _gemma4_unified_hf(fields: Fields, vision: Fields, read: Fields) -> dict:
    """A patch is a token's whole square."""
    found = _gemma4_hf(fields, vision, read)
    text = fields.section("text_config") or fields
    found["whole"] = text.get("use_bidirectional_attention", "vision") == "vision"
    plain = dict(mean=read.numbers("image_mean") or (0.0,) * 3, std=read.numbers("image_std") or (1.0,) * 3)
    plain = plain if read.get("do_normalize") else dict(mean=(0.0,) * 3, std=(1.0,) * 3)
    return found | dict(family="gemma4_unified", patch=found["patch"] * found["merge"], merge=1) | plain


def _around_zero(values: dict) -> dict:
    """mean and std of 2 * y - 1, y normalized by those of `values`."""
    halves = [each / 2 for each in values["std"]]
    return dict(mean=tuple(map(sum, zip(values["mean"], halves, strict=True))), std=tuple(halves))


def _deepseek_vl2_hf(fields: Fields, vision: Fields, read: Fields) -> dict:
    """What the files leave out is as in the authors' code (deepseek-ai/DeepSeek-VL2 at ef9f91e2)."""
    if read.get("normalize", True) is not True:
        raise UnsupportedError(f"{read.path}: normalize", read.get("normalize"), [True])
    for key, wanted in (("tile_tag", "2D"), ("global_view_pos", "head")):
        if fields.get(key, wanted) != wanted:
            raise UnsupportedError(f"{fields.path}: {key}", fields.get(key), [wanted])
    projector = fields.section("projector_config") or Fields(fields.path, {})
    found = fields.get("candidate_resolutions", read.get("candidate_resolutions", [[384, 384]]))
    sizes = [tuple(each) for each in found if isinstance(each, list)] if isinstance(found, list) else []
    if not sizes or not all(len(each) == 2 and all(type(side) is int for side in each) for each in sizes):
        raise fields.fail("candidate_resolutions", "is not a list of widths and heights")
    size = sizes[0][0]
    if not 1 <= size <= MAX_SIDE or any(side % size or not size <= side <= MAX_SIDE for each in sizes for side in each):
        raise fields.fail("candidate_resolutions", f"not all are multiples of {size}")
    patch, side = vision.integer("patch_size", 16, high=1024), vision.integer("image_size", 384, high=MAX_SIDE)
    if size // patch != side // patch:
        raise fields.fail("candidate_resolutions", f"tiles of {size} pixels, the tower has positions for {side}")
    return dict(
        family="deepseek_vl2",
        resize="tiles",
        marker="<image>",
        placeholder="<image>",
        patch=patch,
        merge=projector.integer("downsample_ratio", 2, high=64),
        size=size,
        tilings=tuple((height // size, width // size) for width, height in sizes),
        **_normalization(read),
    )


QWEN2_PIXELS, QWEN3_PIXELS = (56 * 56, 28 * 28 * 1280), (256 * 256, 4096 * 4096)
_QWEN3_VL = _qwen_hf("qwen3_vl", *QWEN3_PIXELS, 16, HALF, HALF)
_QWEN3_5 = _qwen_hf("qwen3_5", *QWEN3_PIXELS, 16, HALF, HALF, 248056)
HF_FAMILIES = {
    "Gemma3ForConditionalGeneration": _gemma3_hf,
    "Qwen2VLForConditionalGeneration": _qwen_hf("qwen2_vl", *QWEN2_PIXELS, 14, CLIP_MEAN, CLIP_STD),
    "Qwen2_5_VLForConditionalGeneration": _qwen_hf("qwen2_5_vl", *QWEN2_PIXELS, 14, CLIP_MEAN, CLIP_STD),
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "Mistral3ForConditionalGeneration": _pixtral_hf,
    "DeepseekVLV2ForCausalLM": _deepseek_vl2_hf,
    "Gemma4ForConditionalGeneration": _gemma4_hf,
    "Gemma4UnifiedForConditionalGeneration": _gemma4_unified_hf,
}


def _gguf_sizes(fields: Fields, merge: int) -> dict:
    return dict(
        patch=fields.integer(".patch_size", high=1024), merge=fields.integer(".spatial_merge_size", merge, high=64)
    )


def _gemma3_gguf(fields: Fields) -> dict:
    size = fields.integer(".image_size", high=MAX_SIDE)
    merge = fields.integer(".projector.scale_factor", 4, high=64)
    patch = fields.integer(".patch_size", high=1024)
    return dict(GEMMA3, patch=patch, merge=merge, size=size, mean=HALF, std=HALF)


def _qwen_gguf(family: str, least: int, most: int, mean, std):
    def of(fields: Fields) -> dict:
        sizes = _gguf_sizes(fields, 2)
        read = {"min_pixels": fields.get(".image_min_pixels"), "max_pixels": fields.get(".image_max_pixels")}
        area = _area(Fields(fields.path, read), sizes["patch"] * sizes["merge"], least, most, sizes["patch"])
        return dict(QWEN, family=family, mean=mean, std=std, **sizes, **area)

    return of


def _pixtral_gguf(fields: Fields) -> dict:
    sizes = _gguf_sizes(fields, 1)
    size = min(fields.integer(".image_size", high=MAX_SIDE), math.isqrt(MAX_PATCHES) * sizes["patch"])
    return dict(PIXTRAL, size=size, mean=CLIP_MEAN, std=CLIP_STD, **sizes)


def _gemma4_gguf(fields: Fields) -> dict:
    """The file does not say how many tokens an image has: the processor's default. Images see each other where the text
    model has no embeddings of layers their own (load.py)."""
    patch, merge = fields.integer(".patch_size", high=1024), fields.integer(".projector.scale_factor", 3, high=64)
    plain = dict(mean=(0.0,) * 3, std=(1.0,) * 3)
    return dict(
        GEMMA4, patch=patch, merge=merge, max_pixels=280 * (patch * merge) ** 2, embed_id=0, whole=True, **plain
    )


def _gemma4_unified_gguf(fields: Fields) -> dict:
    """A patch is a token's whole square; the metadata have the size of what others merge."""
    found = _gemma4_gguf(fields)
    return found | dict(family="gemma4_unified", patch=found["patch"] * found["merge"], merge=1)


GGUF_FAMILIES = {
    "gemma3": _gemma3_gguf,
    "qwen2vl_merger": _qwen_gguf("qwen2_vl", *QWEN2_PIXELS, CLIP_MEAN, CLIP_STD),
    "qwen2.5vl_merger": _qwen_gguf("qwen2_5_vl", *QWEN2_PIXELS, CLIP_MEAN, CLIP_STD),
    "qwen3vl_merger": _qwen_gguf("qwen3_vl", *QWEN3_PIXELS, HALF, HALF),
    "pixtral": _pixtral_gguf,
    "gemma4v": _gemma4_gguf,
    "gemma4uv": _gemma4_unified_gguf,
}
