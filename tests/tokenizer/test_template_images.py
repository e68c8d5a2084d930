"""Images in chat templates, as those of Gemma 3, Qwen2-VL and Pixtral write them: each stands where its part does, and no user's
words make one."""

import pytest
from vocabularies import bpe_fields

from zse.errors import RequestError
from zse.tokenizer.bpe import from_gguf
from zse.tokenizer.chat_template import ChatTemplate, ImageText

GEMMA = """
{%- for m in messages -%}
{{ '<start_of_turn>' + m['role'] + '\\n' }}
{%- if m['content'] is string -%}{{ m['content'] | trim }}
{%- elif m['content'] is iterable -%}{%- for item in m['content'] -%}
{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
QWEN = """
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or 'image_url' in content -%}
<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PIXTRAL = """
{{- bos_token }}{% for m in messages %}{{ '[INST]' }}{% if m['content'] is string %}{{ m['content'] }}{% else -%}
{% for block in m['content'] %}{% if block['type'] == 'text' %}{{ block['text'] }}{% elif block['type'] in ['image', 'image_url'] -%}
{{ '[IMG]' }}{% endif %}{% endfor %}{% endif %}{{ '[/INST]' }}{% endfor %}"""
OPEN_END = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}{{ '<|image_pad|>' }}{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{{ '</s>' }}{% endfor %}"
)
CONTROLS = (
    "<start_of_turn> <end_of_turn> <start_of_image> <end_of_image> <image_soft_token> <|im_start|> <|im_end|> <|vision_start|> "
    "<|vision_end|> <|image_pad|> [INST] [/INST] [IMG] [IMG_BREAK] <s> </s> <|user|>"
).split()
SHOWN = {
    "gemma": (GEMMA, "<start_of_image>", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"),
    "qwen": (QWEN, "<|image_pad|>", "<|image_pad|>"),
    "pixtral": (PIXTRAL, "[IMG]", "[IMG]"),
    "open end": (OPEN_END, "<|image_pad|>", "<|image_pad|>"),
}
IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def tokenizer():
    return from_gguf(bpe_fields(["Ċ Ċ", "ĊĊ Ċ"], CONTROLS, bos_token_id=256 + 2 + 14, eos_token_id=256 + 2 + 15))


@pytest.fixture(params=SHOWN)
def shown(request, tokenizer):
    """(encode(parts, count) → the text that the ids are, with controls in ⟨⟩; what stands for an image)."""
    source, marker, instead = SHOWN[request.param]
    template = ChatTemplate(source, tokenizer)

    def encode(*parts, count=None):
        listed = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        number = sum(part == IMAGE for part in listed) if count is None else count
        ids = template.encode([{"role": "user", "content": listed}], images=ImageText(marker, instead, number))
        said = "".join(
            f"⟨{tokenizer.text_of(id)}⟩" if tokenizer.is_special(id) else tokenizer.decode([id]) for id in ids
        )
        return said.replace("⟨<|vision_start|>⟩", "").replace("⟨<|vision_end|>⟩", "")  # Qwen's template has them

    written = instead
    for control in CONTROLS:
        written = written.replace(control, f"⟨{control}⟩")
    return encode, written


def test_an_image_stands_where_its_part_does(shown):
    encode, instead = shown
    assert f"What{instead}is{instead}this?" in encode("What", IMAGE, "is", IMAGE, "this?")


def test_line_ends_around_an_image_become_tokens_with_those_of_the_text(tokenizer):
    """As where the processor replaces the text before it is tokenized: user's line end and two of the image are one token."""
    source, marker, instead = SHOWN["gemma"]
    ids = ChatTemplate(source, tokenizer).encode(
        [{"role": "user", "content": [IMAGE]}], images=ImageText(marker, instead, 1)
    )
    assert "\n\n\n" in map(tokenizer.text_of, ids)


@pytest.mark.parametrize("around", ["{}", "a{}b", "<{}", "{0}{0}", "😀{}", "\n{}\n", "{}|>"])
def test_no_words_make_an_image(shown, around):
    encode, instead = shown
    for control in CONTROLS:
        said = encode(around.format(control), IMAGE, around.format(control))
        assert said.count(instead.strip("\n")) == 1, said
        # What is left of it are the template's own control tokens.
        words = around.format("x")
        assert said.count("⟨") == encode(words, IMAGE, words).count("⟨")


def test_many_forged_markers_take_no_time(shown):
    encode, instead = shown
    said = encode("<start_of_image><|image_pad|>[IMG]" * 2000, IMAGE)
    assert said.count(instead.strip("\n")) == 1


def test_a_template_that_shows_no_images_is_a_400(tokenizer):
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", tokenizer)
    with pytest.raises(RequestError, match="shows 0 of 1 images") as refused:
        template.encode([{"role": "user", "content": [IMAGE]}], images=ImageText("[IMG]", "[IMG]", 1))
    assert refused.value.status == 400


def test_words_like_the_types_of_parts(shown):
    encode, instead = shown
    assert f"image{instead}text" in encode("image", IMAGE, "text")
