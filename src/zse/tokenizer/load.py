"""`load_tokenizer(source)`: the tokenizer of an open model, whatever file it came in."""

from zse.errors import FormatError, UnsupportedError
from zse.tokenizer import bpe, huggingface, pieces
from zse.tokenizer.base import Tokenizer

KINDS = ("gguf", "hf")
PIECES = ("bert", "t5")  # `tokenizer.ggml.model` of WordPiece and Unigram


def load_tokenizer(source, path: str | None = None) -> Tokenizer:
    """source: a ModelSource of zse.formats, or its TokenizerSource. FormatError: none there, or damaged.

    GGUF vocabularies and the common kinds of tokenizer.json are read into the C tables of this package, other kinds of
    tokenizer.json by the `tokenizers` library. Tables that stand ready-made in a `.zse` are taken as they are, unless
    they were made by another version.
    """
    path = path or str(getattr(source, "path", "model"))
    described = getattr(source, "tokenizer", source)
    if described is None:
        raise FormatError(path, 0, "tokenizer", "the model has no tokenizer; serve a file that holds one")
    image = getattr(described, "image", None)
    if image is not None:
        section = image()
        if bpe.is_section(section):
            return bpe.from_section(section, path)
    if described.kind == "gguf":
        if described.fields.get("tokenizer.ggml.model") in PIECES:
            return pieces.from_gguf(described.fields, path)
        return bpe.from_gguf(described.fields, path)
    if described.kind == "hf":
        generation = getattr(source, "generation_config", None)
        return huggingface.from_json(described.json, described.config, described.special_tokens, generation, path)
    raise UnsupportedError("tokenizer source", described.kind, KINDS)


def tokenizer_image(source) -> bytes | None:
    """The tables of a model's tokenizer for load_tokenizer() to find again; None where there are no such tables."""
    try:
        tokenizer = load_tokenizer(source)
    except (FormatError, UnsupportedError):
        return None  # converting a model does not need its tokenizer to be one that is served
    # The section has no place for what only the post-processor of an embedding model says.
    is_plain = tokenizer.end_id in (None, tokenizer.eos_id) and tokenizer.pair_separators == 1
    return tokenizer.to_section() if isinstance(tokenizer, bpe.BPETokenizer) and is_plain else None
