"""`zse serve` of tiny random models that see, over HTTP: from a PNG to what the answer's probabilities say."""

import io
import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from image_files import file_of, uri
from PIL import Image

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / folder) for folder in ("models", "formats", "tokenizer")]
import tiny_vision  # noqa: E402
from test_template_images import GEMMA, PIXTRAL, QWEN  # noqa: E402

# As Gemma 4's writes a message with parts.
GEMMA4 = """
{%- for m in messages -%}{{ '<start_of_turn>' + m['role'] + '\\n' }}
{%- if m['content'] is string -%}{{ m['content'] | trim }}{%- else -%}{%- for item in m['content'] -%}
{%- if item['type'] == 'text' -%}{{- item['text'] | trim -}}{%- elif item['type'] == 'image' -%}{{- '<|image|>' -}}{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
# family: its chat template, tokens that the model's configuration numbers, and how many stand around an image.
FAMILIES = {
    "gemma3": (GEMMA, {148: "<start_of_image>", 149: "<end_of_image>", 150: "<image_soft_token>"}, 4),
    "qwen3_vl": (QWEN, {148: "<|vision_start|>", 149: "<|vision_end|>", 150: "<|image_pad|>"}, 2),
    "qwen3_5_moe": (QWEN, {148: "<|vision_start|>", 149: "<|vision_end|>", 150: "<|image_pad|>"}, 2),
    "qwen2_5_vl": (QWEN, {148: "<|vision_start|>", 149: "<|vision_end|>", 150: "<|image_pad|>"}, 2),
    "gemma4_unified": (GEMMA4, {148: "<|image>", 149: "<image|>", 150: "<|image|>"}, 2),
    "gemma4": (GEMMA4, {148: "<|image>", 149: "<image|>", 150: "<|image|>"}, 2),
    # The template that folders without one get; an image is followed by a line's end, the last one's is one token with the message's.
    "deepseek_vl2_plain": (None, {148: "<|User|>", 149: "<|Assistant|>", 150: "<image>"}, None),
    "mistral3": (PIXTRAL, {150: "[IMG]", 12: "[IMG_BREAK]", 13: "[IMG_END]"}, 0),
}
CONTROLS = "<pad> </s> <s> <unk> <start_of_turn> <end_of_turn> <|im_start|> <|im_end|> [INST] [/INST]".split()


def write_text(folder: Path, family: str) -> None:
    """A tokenizer of 160 tokens with the model's ids for images, and the family's chat template."""
    template, fixed, _ = FAMILIES[family]
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "ĊĊ", "ĊĊĊ"]
    words = iter([*CONTROLS, *letters])
    texts = {id: fixed.get(id) or next(words, f"spare{id}") for id in range(160)}
    vocabulary = {text: id for id, text in texts.items()}
    alike = dict(special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": vocabulary[text], "content": text} | alike for text in [*CONTROLS, *fixed.values()]],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["Ċ Ċ", "ĊĊ Ċ"]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about | ({"chat_template": template} if template else {})))


@pytest.fixture(scope="module", params=FAMILIES)
def client(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sees")
    tiny_vision.write(request.param, folder)
    write_text(folder, request.param)
    command = [
        sys.executable,
        "-m",
        "zse",
        "serve",
        str(folder),
        "--model-name",
        "tiny",
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(
        [*command, "--threads", "2", "--max-rows", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    assert " on http://" in line, process.communicate()[1]
    with openai.OpenAI(base_url=line.split(" on ")[1].split()[0] + "/v1", api_key="x", max_retries=0) as client:
        client.family = request.param
        yield client
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in stderr, stderr


def ask(client, *parts, **options):
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": uri(part)}}
        for part in parts
    ]
    options = {"temperature": 0, "max_tokens": 4, "logprobs": True, "extra_body": {"ignore_eos": True}} | options
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}], **options)


def scores(reply) -> list[float]:
    return [entry.logprob for entry in reply.choices[0].logprobs.content]


def test_a_picture_changes_the_answer_and_the_same_picture_does_not(client):
    red, noise = file_of(60, 60), file_of(60, 60, noise=True)
    first = ask(client, "What is", red, "this?")
    assert scores(ask(client, "What is", red, "this?")) == pytest.approx(scores(first), abs=1e-3)
    assert max(abs(a - b) for a, b in zip(scores(ask(client, "What is", noise, "this?")), scores(first))) > 1e-3
    # The same pixels as another file.
    same = io.BytesIO()
    Image.new("RGB", (60, 60), (255, 0, 0)).save(same, "WEBP", lossless=True)
    assert scores(ask(client, "What is", same.getvalue(), "this?")) == pytest.approx(scores(first), abs=1e-3)


def test_tokens_of_a_prompt_with_images(client):
    """Those of its parts and ends of rows, and what stands around: Gemma's line ends are one token with the template's."""
    vision, around = tiny_vision.vision(client.family), FAMILIES[client.family][2]
    words = ask(client, "ab").usage.prompt_tokens
    for sizes in (((60, 60),), ((60, 60), (9, 30)), ((60, 60), (9, 30), (20, 90))):
        seen = vision.beside(len(sizes))
        ends = len(sizes) - 1 if around is None else around * len(sizes)
        asked = ask(client, "ab", *(file_of(*size) for size in sizes)).usage.prompt_tokens
        assert asked == words + ends + sum(seen.num_tokens(*seen.target(*size)) for size in sizes)
    assert client.models.list().data[0].input_modalities == ["text", "image"]


def test_streams_several_answers_and_text_beside_them(client):
    red = file_of()
    whole = ask(client, red, n=2, logprobs=False)
    chunks = list(ask(client, red, stream=True, logprobs=False))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert {choice.message.content for choice in whole.choices} == {text}
    assert ask(client, "No picture").choices[0].finish_reason == "length"


def test_a_hostile_picture_is_a_400(client):
    with pytest.raises(openai.BadRequestError, match="cannot be decoded"):
        ask(client, file_of()[:60])
