"""`load_tokenizer(source)`: the tokenizer of an open model, whatever file it came in."""

from zse.errors import FormatError, UnsupportedError
from zse.tokenizer.base import Tokenizer

KINDS = ("gguf", "hf")


def load_tokenizer(source, path: str | None = None) -> Tokenizer:
    """source: a ModelSource of zse.formats, or its TokenizerSource. FormatError: none there, or damaged.

    GGUF vocabularies and the common kinds of tokenizer.json are read into the C tables of this package; other kinds of
    tokenizer.json by the `tokenizers` library.
    """
    path = path or str(getattr(source, "path", "model"))
    described = getattr(source, "tokenizer", source)
    if described is None:
        raise FormatError(path, 0, "tokenizer", "the model has no tokenizer; serve a file that holds one")
    if described.kind == "gguf":
        from zse.tokenizer.bpe import from_gguf
        return from_gguf(described.fields, path)
    if described.kind == "hf":
        from zse.tokenizer.huggingface import from_json
        return from_json(described.json, described.config, described.special_tokens,
                         getattr(source, "generation_config", None), path)
    raise UnsupportedError("tokenizer source", described.kind, KINDS)
