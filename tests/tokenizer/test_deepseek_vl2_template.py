"""The chat template of folders of DeepSeek-VL2, which have none, against its conversation.py and processor as described there: the begin
of text, each message by itself, an answer up to the end of text."""

import pytest
from vocabularies import bpe_fields

from zse.errors import RequestError
from zse.formats.directory import TEMPLATES
from zse.tokenizer.bpe import from_gguf
from zse.tokenizer.chat_template import ChatTemplate, ImageText

SOURCE = TEMPLATES["DeepseekVLV2ForCausalLM"]
CONTROLS = "<|User|> <|Assistant|> <image> <s> </s>".split()


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(SOURCE, from_gguf(bpe_fields([], CONTROLS, bos_token_id=259, eos_token_id=260)))


def said(role: str, content) -> dict:
    return {"role": role, "content": content}


def test_a_conversation(template):
    messages = [said("system", " Be kind. "), said("user", "Hi\n"), said("assistant", " Hello. "), said("user", "Why?")]
    text = template.render(messages).text
    assert text == "<s>Be kind.<|User|>: Hi\n\n<|Assistant|>:Hello.</s><|User|>: Why?\n\n<|Assistant|>:"
    assert template.render(messages[1:], add_generation_prompt=False).text.endswith("<|User|>: Why?\n\n")
    with pytest.raises(RequestError, match="system, user and assistant"):
        template.render([*messages, said("tool", "7")])


def test_images_stand_where_their_parts_do(template):
    parts = [
        {"type": "image"},
        {"type": "text", "text": "Left."},
        {"type": "image"},
        {"type": "text", "text": "<image>"},
    ]
    assert "<|User|>: <image>\nLeft.<image>\n<image>\n\n" in template.render([said("user", parts)]).text
    ids = template.encode([said("user", parts)], images=ImageText("<image>", "<image>", 2))
    assert ids.count(template._tokenizer.find("<image>")) == 2  # the user's own is words
