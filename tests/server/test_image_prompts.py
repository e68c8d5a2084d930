"""Prompts with images over real tokenizers and templates: what a ServedModel of each family makes of a conversation."""

import sys
from pathlib import Path

import pytest

from zse.engine.messages import image_key
from zse.images.messages import DecodedImage
from zse.models.vision.config import VisionConfig
from zse.models.vision.read import vision_from_gguf, vision_from_hf
from zse.server import images
from zse.server.errors import APIError
from zse.server.models import ServedModel
from zse.tokenizer.bpe import from_gguf
from zse.tokenizer.chat_template import ChatTemplate

sys.path.append(str(Path(__file__).parents[1] / "tokenizer"))
from test_template_images import CONTROLS, GEMMA, PIXTRAL, QWEN  # noqa: E402
from vocabularies import bpe_fields  # noqa: E402

HF = {
    "gemma3": (
        GEMMA,
        {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"image_size": 896, "patch_size": 14}},
    ),
    "qwen2_5": (QWEN, {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"patch_size": 14}}),
    "mistral3": (
        PIXTRAL,
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "vision_config": {"patch_size": 14},
            "spatial_merge_size": 2,
        },
    ),
}


def served(template: str, controls=(*CONTROLS, "[IMG_END]"), **more) -> ServedModel:
    tokenizer = from_gguf(
        bpe_fields(["Ċ Ċ", "ĊĊ Ċ"], controls, bos_token_id=256 + 2 + 14, eos_token_id=256 + 2 + 15, **more)
    )
    return ServedModel(tokenizer, ChatTemplate(template, tokenizer), object, "m", {})


def seen(vision: VisionConfig, *sizes: tuple[int, int]) -> list[DecodedImage]:
    found = [vision.target(*size) for size in sizes]
    return [DecodedImage(height, width, bytes(3 * height * width)) for height, width in found]


def conversation(count: int) -> list[dict]:
    image = {"type": "image", "url": "data:,", "path": "messages[0].content[0]"}
    words = [
        {"type": "text", "text": f"Words <start_of_image> [IMG] <|image_pad|> {number}"} for number in range(count)
    ]
    return [{"role": "user", "content": [part for pair in zip([image] * count, words) for part in pair]}]


@pytest.mark.parametrize("family", HF)
def test_images_have_their_tokens_where_they_stand(family):
    template, config = HF[family]
    vision, model = vision_from_hf("config.json", config, None), served(template)
    assert vision is not None
    shown = seen(vision, (100, 300), (56, 56))
    pictures = images._pictures(vision, shown, model)
    ids, inputs = pictures.encode_chat(model, conversation(2), None, None)
    text = "".join(model.decode([id]) for id in ids)
    at = 0
    for image, one in zip(inputs, shown, strict=True):
        # What the engine gets is what the model's processor writes.
        wanted = vision.expansion(one.height, one.width)
        at = text.index(wanted, at) + len(wanted)
        assert (image.height, image.width, image.count) == (*one[:2], vision.num_tokens(*one[:2]))
        parts = ["".join(model.decode([id])) for id in ids[image.start : image.start + image.count]]
        assert [part == vision.placeholder for part in parts] == [part >= 0 for part in vision.parts(*one[:2])]
        assert image.key == image_key(one.height, one.width, one.pixels)
    assert "Words <start_of_image> [IMG] <|image_pad|> 1" in text[at:]  # as words
    assert ids.count(pictures.placeholder) == sum(part >= 0 for one in shown for part in vision.parts(*one[:2]))


def test_a_gguf_without_the_placeholder_has_another_token_there():
    controls = [text for text in CONTROLS if text != "<image_soft_token>"] + ["<pad>"]
    metadata = {"clip.projector_type": "gemma3", "clip.vision.image_size": 896, "clip.vision.patch_size": 14}
    vision = vision_from_gguf("mmproj.gguf", metadata)
    assert vision is not None and vision.placeholder_id is None
    model = served(GEMMA, controls, padding_token_id=256 + 2 + len(controls) - 1)
    assert model.spare_control == "<pad>"
    ids, (image,) = images._pictures(vision, seen(vision, (9, 9)), model).encode_chat(
        model, conversation(1), None, None
    )
    assert image.count == 256 and {model.decode([id]) for id in ids[image.start : image.start + 256]} == {"<pad>"}
    assert model.decode([ids[image.start - 1]]) == "<start_of_image>"
    bare = served(GEMMA, controls[:-1])
    with pytest.raises(APIError, match="no control token <image_soft_token>"):
        images._pictures(vision, seen(vision, (9, 9)), bare)
