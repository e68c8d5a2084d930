"""The VisionConfig of a model's files: what config.json and preprocessor_config.json say of images, or an mmproj file's
metadata, family by family."""

import math

from zse.errors import FormatError, UnsupportedError
from zse.models.config import Fields
from zse.models.config_parts import MAX_WIDTH
from zse.models.vision.config import MAX_PATCHES, MAX_SIDE, TiledVision, VisionConfig

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
        return (TiledVision if "tilings" in values else VisionConfig)(**values)
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
