"""What a request may ask of the form of its answer."""

import msgspec

JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE, LARK, GBNF, TEXT = (
    "json_object", "json_schema", "regex", "choice", "lark", "gbnf", "text")
KINDS = (JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE, LARK, GBNF, TEXT)
MAX_SOURCE_BYTES = 64 << 10


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Reasoning that stands before the answer, which the grammar does not see. opening, closing: its marks. is_open: the
    prompt ends inside it. budget: tokens after which the closing mark is forced; None: none."""

    opening: str
    closing: str
    is_open: bool = False
    budget: int | None = None


class Structure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The form of an answer. kind: of KINDS; source: the JSON schema, regular expression, JSON array of choices or grammar
    (Lark as llguidance reads it, or llama.cpp's GBNF) as text; "" for json_object and text (any text: only `thinking`
    counts). lenient: keywords of a schema that are not implemented are passed over, not refused."""

    kind: str
    source: str = ""
    lenient: bool = False
    thinking: Thinking | None = None
