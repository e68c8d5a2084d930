"""How images become tokens: sizes and counts as transformers' image processors and processors have them."""

import ast
import importlib.util
import math
from pathlib import Path

import pytest

from zse.errors import FormatError, RequestError, UnsupportedError
from zse.models.vision.config import MAX_PATCHES, VisionConfig
from zse.models.vision.read import vision_from_gguf, vision_from_hf

GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "vision_config": {"image_size": 896, "patch_size": 14},
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
}
QWEN2_5 = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"patch_size": 14}}
QWEN3 = {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {"patch_size": 16}}
QWEN2 = {"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {"patch_size": 14}}
QWEN3_MOE = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "vision_config": {"patch_size": 16}}
QWEN3_5 = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "vision_config": {"patch_size": 16}}
MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "vision_config": {"patch_size": 14, "image_size": 1540},
    "spatial_merge_size": 2,
}
GEMMA4 = {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {"patch_size": 16}}
DEEPSEEK = {  # the published sizes
    "architectures": ["DeepseekVLV2ForCausalLM"],
    "vision_config": {"patch_size": 14, "width": 1152, "layers": 27},
    "candidate_resolutions": [
        [384 * columns, 384 * rows]
        for columns, rows in [(1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (3, 1), (1, 4), (4, 1), (1, 5), (5, 1)]
        + [(1, 6), (2, 3), (3, 2), (6, 1), (1, 7), (7, 1), (1, 8), (2, 4), (4, 2), (8, 1), (1, 9), (3, 3), (9, 1)]
    ],
}
SIZES = [(1, 1), (37, 512), (480, 640), (28, 28), (1000, 17), (3000, 2000), (1540, 1541), (13, 2500)]


def functions_of(path: str, *names: str, **values) -> list:
    """Functions of a file of transformers, without what the file imports (torchvision)."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "models" / path).read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in tree.body:
        assert isinstance(node, ast.FunctionDef)
        node.args.defaults, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    place: dict = {"math": math, **values}
    exec(compile(tree, path, "exec"), place)
    return [place[name] for name in names]


def vision(config: dict, processor: dict | None = None) -> VisionConfig:
    found = vision_from_hf("config.json", config, processor)
    assert found is not None
    assert VisionConfig.decode(found.encode()) == found
    return found


def test_gemma3_images_are_squares_of_256_tokens():
    found = vision(GEMMA3, {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]})
    assert (found.patch, found.merge, found.size, found.placeholder_id, found.whole) == (14, 4, 896, 262144, True)
    assert found.target(300, 5000) == (896, 896) and found.fits(896, 896) and not found.fits(896, 448)
    assert found.num_tokens(896, 896) == 256 and found.max_patches == 4096
    text = found.expansion(896, 896)
    assert text == "\n\n<start_of_image>" + 256 * "<image_soft_token>" + "<end_of_image>\n\n"


@pytest.mark.parametrize(
    "config", [QWEN2, QWEN2_5, QWEN3, QWEN3_MOE, QWEN3_5], ids=lambda config: config["architectures"][0]
)
def test_qwen_sizes_are_those_of_its_processor(config):
    (smart_resize,) = functions_of("qwen2_vl/image_processing_qwen2_vl.py", "smart_resize")
    found = vision(config)
    assert found.max_pixels <= MAX_PATCHES * found.patch**2
    for height, width in SIZES:
        wanted = smart_resize(height, width, found.unit, found.min_pixels, found.max_pixels)
        assert found.target(height, width) == wanted, (height, width)
        assert found.fits(*wanted) and wanted[0] * wanted[1] <= found.max_patches * found.patch**2
        assert found.num_tokens(*wanted) == wanted[0] * wanted[1] // found.unit**2
    assert vision(config, {"size": {"shortest_edge": 9000, "longest_edge": 90000}}).max_pixels == 90000
    assert vision(config, {"min_pixels": 9000, "max_pixels": 80000}).min_pixels == 9000
    with pytest.raises(RequestError, match="over 200 times"):
        found.target(2010, 10)


def test_pixtral_sizes_and_rows_are_those_of_its_processor():
    _, resized = functions_of(
        "pixtral/image_processing_pixtral.py",
        "_num_image_tokens",
        "get_resize_output_image_size",
        get_image_size=lambda size, _: size,
    )
    found = vision(MISTRAL3, {"size": {"longest_edge": 1540}, "patch_size": 14})
    unit = found.unit
    for height, width in SIZES:
        wanted = resized((height, width), (found.size, found.size), (unit, unit), None)
        assert found.target(height, width) == wanted and found.fits(*wanted), (height, width)
    assert found.expansion(56, 84) == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    assert found.num_tokens(56, 84) == 8 and found.parts(56, 84) == [0, 1, 2, -1, 3, 4, 5, -1]


def test_gemma4_sizes_are_those_of_its_processor():
    (wanted_size,) = functions_of("gemma4/image_processing_pil_gemma4.py", "get_aspect_ratio_preserving_size")
    for tokens in (70, 280, 1120):
        found = vision(GEMMA4, {"max_soft_tokens": tokens})
        assert (found.patch, found.merge, found.mean, found.std) == (16, 3, (0.5,) * 3, (0.5,) * 3)
        assert found.max_patches == 9 * tokens <= MAX_PATCHES
        for height, width in (*SIZES, (4000, 30)):
            wanted = wanted_size(height, width, 16, 9 * tokens, 3)
            assert found.target(height, width) == wanted and found.fits(*wanted), (height, width)
            assert found.num_tokens(*wanted) <= tokens
        assert not found.fits(48 * (tokens + 1), 48) and not found.fits(48, 50)
    assert found.expansion(48, 96) == "<|image><|image|><|image|><image|>" and not found.whole
    sees = GEMMA4 | {"text_config": {"use_bidirectional_attention": "vision", "pad_token_id": 3}}
    assert vision(sees).whole and vision(sees).embed_id == 3
    normalized = vision(GEMMA4, {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3})
    assert normalized.mean == (0.625,) * 3 and normalized.std == (0.125,) * 3
    unified = vision(GEMMA4 | {"architectures": ["Gemma4UnifiedForConditionalGeneration"]}, {"max_soft_tokens": 280})
    assert (unified.patch, unified.merge, unified.mean, unified.std) == (48, 1, (0.0,) * 3, (1.0,) * 3)
    assert unified.whole and unified.max_patches == 280 and unified.target(480, 640) == (672, 912)
    for processor, reason in (({"max_soft_tokens": 100}, "max_soft_tokens"), ({"patch_size": 14}, "patch_size")):
        with pytest.raises((FormatError, UnsupportedError), match=reason):
            vision(GEMMA4, processor)


def test_deepseek_images_are_cut_where_most_of_them_is_left():
    """By the rule of its paper's section 2.1, said again for one size after another; 14 × 14 parts of a tile."""
    found = vision(DEEPSEEK)
    assert found.max_patches == 10 * 27**2 and found.overview(768, 384) == 384 and found.tile_side == 14

    def wanted(height: int, width: int) -> tuple[int, int]:
        best: tuple = (-1, 0, None)
        for columns, rows in DEEPSEEK["candidate_resolutions"]:
            scale = min(columns / width, rows / height)
            kept = min(int(scale * height) * int(scale * width), height * width)
            if (kept, kept - columns * rows) > best[:2]:
                best = kept, kept - columns * rows, (rows, columns)
        return best[2]

    for height, width in (*SIZES, (384, 384), (385, 384), (768, 768), (500, 4000), (1200, 1200)):
        rows, columns = found.target(height, width)
        assert (rows, columns) == wanted(height, width) and found.fits(rows, columns), (height, width)
        count = 14 * 15 + 1 + rows // 384 * 14 * (columns // 384 * 14 + 1)
        assert found.num_tokens(rows, columns) == count and found.parts(rows, columns) == list(range(count))
        assert found.expansion(rows, columns) == count * "<image>"
        seen_twice = (rows, columns) != (384, 384)  # else the whole is its only tile
        assert found.num_pixels(rows, columns) == rows * columns + seen_twice * 384**2
        assert found.overview(rows, columns) == seen_twice * 384
    assert found.beside(2) is found and found.beside(3).target(500, 4000) == (384, 384)
    assert found.beside(3).target(3000, 100) == (384, 384) and found.fits(384, 384)
    assert not found.fits(384, 500) and not found.fits(384 * 4, 384 * 4)
    for changes, reason in (
        ({"candidate_resolutions": [[384, 500]]}, "multiples of 384"),
        ({"candidate_resolutions": [[384, 0]]}, "multiples of 384"),
        ({"candidate_resolutions": "384"}, "list of widths"),
        ({"candidate_resolutions": [[384, 384 * 40]]}, "candidate_resolutions"),
        ({"tile_tag": "1D"}, "tile_tag"),
        ({"global_view_pos": "tail"}, "global_view_pos"),
        (
            {"vision_config": {"patch_size": 14, "image_size": 448}},
            "tiles of 384 pixels, the tower has positions for 448",
        ),
    ):
        with pytest.raises((FormatError, UnsupportedError), match=reason):
            vision(DEEPSEEK | changes)
    with pytest.raises(UnsupportedError, match="normalize"):
        vision(DEEPSEEK, {"normalize": False})
    assert vision(QWEN3).beside(9) == vision(QWEN3)


def test_a_gguf_says_the_same():
    metadata = {"clip.projector_type": "gemma3", "clip.vision.image_size": 896, "clip.vision.patch_size": 14}
    mean = {"clip.vision.image_mean": [0.5, 0.5, 0.5], "clip.vision.image_std": [0.5, 0.5, 0.5]}
    found, wanted = vision_from_gguf("mmproj.gguf", metadata | mean), vision(GEMMA3)
    assert found is not None and (found.size, found.merge, found.mean) == (wanted.size, wanted.merge, wanted.mean)
    assert vision_from_gguf("mmproj.gguf", metadata | {"clip.projector_type": "internvl"}) is None


def test_what_cannot_be_is_refused():
    assert vision_from_hf("x", {"architectures": ["LlamaForCausalLM"]}, None) is None
    with pytest.raises(UnsupportedError, match="do_pan_and_scan"):
        vision(GEMMA3, {"do_pan_and_scan": True})
    with pytest.raises(FormatError, match="mm_tokens_per_image"):
        vision(GEMMA3 | {"mm_tokens_per_image": 255})
    with pytest.raises(FormatError, match="image_std"):
        vision(GEMMA3, {"image_std": [0.5, 0.0, 0.5]})
    with pytest.raises(FormatError, match="patch_size"):
        vision(QWEN3 | {"vision_config": {"patch_size": 0}})
