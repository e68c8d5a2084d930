"""Images in the messages of requests: data URIs, which is all that is taken. No address is ever fetched.

A message with images has a list as its content, of {"type": "text", "text"} and {"type": "image", "path"} with either "url", a data URI,
or "file", the id of a file of the tenant's. path: where the request has it, for what is said of it."""

import re
from typing import Any

from zse.sampling.fields import Custom, Field, Object, OneOf, String, expect, refused

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp")
_HEAD = re.compile(r"data:image/(?:png|jpeg|jpg|webp)((?:;[a-z-]+=[^;,]{0,64})*);base64,", re.IGNORECASE)
_SHOWN_HEAD = "data:image/png;base64,"  # where a request does not say the type: the file's bytes do


def data_uri(value: Any, path: str) -> str:
    """The value, which must be a data URI of an image that is taken. Raises RequestError."""
    expect(str, value, path)
    if _HEAD.match(value):
        return value
    if value[:8].lower().startswith(("http:", "https:", "//")):
        message = f"'{path}': no URL is fetched; send the image itself, as a data URI (data:image/png;base64,…)."
    else:
        message = f"'{path}' must be a data URI of a PNG, JPEG or WebP in base64 (data:image/png;base64,…)."
    raise refused("invalid_value", message, path)


def image(url: str | None, file: str | None, path: str, field: str) -> dict:
    """The part of an image, of which one of both is given. Raises RequestError."""
    if (url is None) == (file is None):
        both = "" if url is None else ", and then no file_id"
        raise refused("missing_required_parameter", f"'{field}' is required{both}.", field)
    return {"type": "image", "path": path} | ({"url": url} if file is None else {"file": file})


def _bare(value: Any, path: str) -> str:
    """Base64 alone, as Ollama has it."""
    expect(str, value, path)
    return data_uri(value if ":" in value[:8] else _SHOWN_HEAD + value, path)


BARE_IMAGE = Custom(_bare, {"type": "string", "pattern": "^[A-Za-z0-9+/]+={0,2}$"})


def _source(value: Any, path: str) -> dict:
    """The source of an image block of Anthropic's → the `image_url` of a chat request."""
    kind = expect(dict, value, path).get("type")
    if kind == "file":
        return {"file_id": _FILE.check(value, path)["file_id"]}
    if kind == "url":
        data_uri(value.get("url"), path + ".url")
    values = _SOURCE.check(value, path)
    return {"url": data_uri(f"data:{values['media_type']};base64,{values['data']}", path + ".data")}


_SOURCE = Object(
    {
        "type": Field(OneOf(("base64",)), required=True),
        "media_type": Field(OneOf(MEDIA_TYPES), required=True),
        "data": Field(String(empty=False), required=True),
    }
)
_FILE = Object({"type": Field(OneOf(("file",)), required=True), "file_id": Field(String(128), required=True)})
SOURCE = Custom(_source, {"anyOf": [_SOURCE.schema, _FILE.schema]})


def images_of(messages: list[dict]) -> list[dict]:
    """The parts that are images, in the prompt's order."""
    lists = (message["content"] for message in messages if type(message["content"]) is list)
    return [part for parts in lists for part in parts if part["type"] == "image"]


def num_characters(messages: list[dict]) -> int:
    """Of the images as they were sent: those of a body that are no text."""
    return sum(len(part.get("url", "")) for part in images_of(messages))


def text_of(content: str | list[dict]) -> str:
    """What a message says beside its images."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content if part["type"] == "text")


def with_text(content: str | list[dict], text: str) -> str | list[dict]:
    """The content with another text, which stands before its images."""
    if isinstance(content, str):
        return text
    return [{"type": "text", "text": text}, *(part for part in content if part["type"] == "image")]


def as_parts(content: str | list[dict]) -> str | list[dict]:
    """The content as a chat request writes it."""

    def shown(part: dict) -> dict:
        address = {"url": part["url"]} if "url" in part else {"file_id": part.get("file")}
        return part if part["type"] == "text" else {"type": "image_url", "image_url": address}

    return content if isinstance(content, str) else [*map(shown, content)]


def for_template(messages: list[dict]) -> list[dict]:
    """The messages as a chat template gets them: of an image it learns that there is one."""

    def shown(part: dict) -> dict:
        return part if part["type"] == "text" else {"type": "image"}

    return [
        one if isinstance(one["content"], str) else one | {"content": [*map(shown, one["content"])]} for one in messages
    ]
