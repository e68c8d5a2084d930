"""tokenizer.json (Hugging Face): byte-level BPE of the known patterns, WordPiece and Unigram go into the C tables, the
rest to `tokenizers`.

Reading 150,000 entries takes `tokenizers` 0.6 s and more, which is longer than the rest of a start; the C tables take
0.1 s, nearly all of it JSON.
"""

import struct
from typing import NamedTuple

import msgspec

from zse.errors import FormatError, UnsupportedError
from zse.formats.file import INCOMPLETE
from zse.tokenizer import bpe, normalize, pieces, wrapped
from zse.tokenizer.base import Tokenizer

_CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# The pattern of a Split pre-tokenizer -> the scanner that equals it.
PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": bpe.GPT2,
    _CASELESS % "{1,3}": bpe.LLAMA3,
    _CASELESS % "": bpe.QWEN2,
    _CASELESS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}") % "": bpe.QWEN35,
    _CASED % ("", "", ""): bpe.TEKKEN,
    _CASED % (_CONTRACTION, _CONTRACTION, "{1,3}"): bpe.O200K,
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)


def from_json(
    data: bytes,
    config: dict | None = None,
    special_tokens: dict | None = None,
    generation_config: dict | None = None,
    path: str = "tokenizer.json",
) -> Tokenizer:
    """The tokenizer of a tokenizer.json.

    Args:
        data: the file.
        config: tokenizer_config.json.
        special_tokens: special_tokens_map.json.
        generation_config: generation_config.json, for its eos_token_id.
        path: for messages.

    FormatError: damaged. UnsupportedError: a kind of decoder whose tokens cannot be told apart in bytes.
    """
    try:
        parsed = _parsed(data)
        model = parsed["model"]
        added = parsed.get("added_tokens") or []
        ids = {token["content"]: int(token["id"]) for token in added}
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(path, 0, "tokenizer.json", f"not a tokenizer: {error}{INCOMPLETE}") from None
    roles = special_roles(config or {}, special_tokens or {}, ids, model, generation_config or {})
    try:
        around = _around(parsed.get("post_processor"))
        # BERT's files name no BOS and EOS: [CLS] and [SEP] are.
        roles |= {"bos": around.before} if roles["bos"] is None else {}
        roles |= {"eos": around.after} if roles["eos"] is None else {}
        adds_bos, adds_eos = _adds(around, roles, config or {})
        pre = scanner_of(parsed)
        tokenizer: Tokenizer | None = None
        if pre is not None:
            tokenizer = _native(parsed, pre, roles, path)
        elif _kind(model) in ("WordPiece", "Unigram"):
            tokenizer = _pieces(parsed, roles)
    except normalize.UnknownStep as error:
        raise UnsupportedError(f"{path}: tokenizer step", str(error), sorted(normalize.STEPS)) from None
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise FormatError(path, 0, "tokenizer.json", f"damaged: {type(error).__name__}: {error}") from None
    if tokenizer is None:
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            _refuse_repeated(vocabulary, path)
        tokenizer = wrapped.WrappedTokenizer(data, parsed, path)
        tokenizer.bos_id, tokenizer.eos_id = roles["bos"], roles["eos"]
        tokenizer.unknown_id, tokenizer.pad_id = roles["unk"], roles["pad"]
        tokenizer.eos_ids = bpe.ends_of(tokenizer)
        for role in ("bos", "eos", "unk", "pad"):
            if roles[role] is not None and roles[role] not in range(tokenizer.vocab_size):
                raise FormatError(path, 0, f"{role}_token", f"{roles[role]!r} is not a token id")
    tokenizer.adds_bos, tokenizer.adds_eos = adds_bos, adds_eos
    tokenizer.end_id, tokenizer.pair_separators = around.after, around.separators
    tokenizer.eos_ids |= {id for id in roles["ends"] if 0 <= id < tokenizer.vocab_size}
    return tokenizer


def _kind(model: dict) -> str:
    """Files of before 2020 do not name it."""
    by_keys = "Unigram" if "unk_id" in model else "WordPiece" if "max_input_chars_per_word" in model else "BPE"
    return model.get("type", by_keys)


def _pieces(parsed: dict, roles: dict) -> Tokenizer:
    tokenizer = pieces.from_json(parsed)
    tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id = roles["bos"], roles["eos"], roles["pad"]
    return tokenizer


def _parsed(data: bytes) -> dict:
    """The JSON of a tokenizer.json but for the merges, which stay text: half of the file, and `tokenizers` reads them
    itself."""
    parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(parts.pop("model"), type=dict[str, msgspec.Raw])
    parsed = {key: msgspec.json.decode(part) for key, part in parts.items()}
    parsed["model"] = {key: part if key == "merges" else msgspec.json.decode(part) for key, part in model.items()}
    return parsed


def special_roles(
    config: dict, special_tokens: dict, ids: dict[str, int], model: dict, generation_config: dict
) -> dict:
    """ "bos", "eos", "unk", "pad" -> id or None; "ends" -> every id that the model's files call an end."""
    vocab = model.get("vocab")
    vocabulary = vocab if isinstance(vocab, dict) else {}

    def id_of(role):
        for source in (config, special_tokens):
            token = source.get(f"{role}_token")
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                return ids.get(text, vocabulary.get(text))
        return None

    roles = {role: id_of(role) for role in ("bos", "eos", "unk", "pad")}
    ends = generation_config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    roles["ends"] = {id for id in [*ends, roles["eos"]] if isinstance(id, int) and not isinstance(id, bool)}
    return roles


def scanner_of(parsed: dict) -> int | None:
    """The scanner (bpe.GPT2, ...) that does what the file asks for, None when only `tokenizers` can do it."""
    model, normalizer, decoder = parsed["model"], parsed.get("normalizer"), parsed.get("decoder")
    if model.get("type", "BPE") != "BPE" or "merges" not in model or model.get("byte_fallback") or model.get("dropout"):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    if decoder is None or decoder.get("type") != "ByteLevel":
        return None
    if any(
        token.get(flag) for token in parsed.get("added_tokens") or [] for flag in ("lstrip", "rstrip", "single_word")
    ):
        return None
    steps = parsed.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", []) if steps.get("type") == "Sequence" else [steps]
    kinds = [step.get("type") for step in steps]
    if not steps or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    has_pattern = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and has_pattern:
        return bpe.GPT2
    if kinds == ["Digits", "ByteLevel"] and has_pattern and steps[0].get("individual_digits"):
        return bpe.SMOLLM
    if (
        kinds == ["Split", "ByteLevel"]
        and not has_pattern
        and steps[0].get("behavior") == "Isolated"
        and not steps[0].get("invert")
    ):
        pattern = steps[0].get("pattern")
        return PATTERNS.get(str(pattern.get("Regex"))) if isinstance(pattern, dict) else None
    return None


class _Array:
    """An array as zse.formats hands it over."""

    def __init__(self, type: str, count: int, raw: bytes):
        self.type, self.count, self.raw = type, count, raw


def _strings(items: list[bytes]) -> _Array:
    pack = struct.Struct("<Q").pack
    return _Array("string", len(items), b"".join([part for item in items for part in (pack(len(item)), item)]))


def _refuse_repeated(vocabulary: dict, path: str) -> None:
    """FormatError where two texts have one id: a plain piece could be a control token. What is no number the reader
    refuses."""
    numbers = [id for id in vocabulary.values() if isinstance(id, int)]
    if len(set(numbers)) == len(numbers):
        return
    seen: dict[int, str] = {}
    for text, id in vocabulary.items():
        if isinstance(id, int) and seen.setdefault(id, text) != text:
            reason = f"{seen[id]!r} and {text!r} have the same id {int(id)}: each text needs its own"
            raise FormatError(path, 0, "vocab", reason)


def _native(parsed: dict, pre: int, roles: dict, path: str) -> bpe.BPETokenizer:
    model, vocabulary = parsed["model"], parsed["model"]["vocab"]
    added = parsed.get("added_tokens") or []
    size = 1 + max([*vocabulary.values(), *(token["id"] for token in added)])
    if size > 4 * (len(vocabulary) + len(added)):
        raise ValueError(f"token id {size - 1} in a vocabulary of {len(vocabulary)}")
    tokens, types = [b""] * size, [UNUSED] * size
    for text, id in vocabulary.items():
        tokens[id], types[id] = text.encode("utf-8", "surrogatepass"), NORMAL
    if size - types.count(UNUSED) < len(vocabulary):
        _refuse_repeated(vocabulary, path)
    for token in added:
        tokens[token["id"]] = token["content"].encode("utf-8", "surrogatepass")
        types[token["id"]] = CONTROL if token.get("special") else USER_DEFINED
    merges = msgspec.json.decode(model["merges"])
    if merges and not isinstance(merges[0], str):
        merges = [f"{left} {right}" for left, right in merges]
    fields = {
        "model": "gpt2",
        "tokens": _strings(tokens),
        "token_type": _Array("i32", size, struct.pack(f"<{size}i", *types)),
        "merges": _strings([merge.encode("utf-8", "surrogatepass") for merge in merges]),
    }
    fields |= {
        f"{ours}_token_id": roles[role]
        for ours, role in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
        if roles[role] is not None
    }
    tokenizer = bpe.from_gguf(
        {f"tokenizer.ggml.{key}": value for key, value in fields.items()},
        path,
        (pre, bool(model.get("ignore_merges")), False),
    )
    tokenizer.is_nfc = parsed.get("normalizer") is not None
    return tokenizer


class _Around(NamedTuple):
    """What a post-processor puts around a text and between two: ids or None; where it says nothing is_given is
    False."""

    is_given: bool
    before: int | None = None
    after: int | None = None
    separators: int = 1


def _around(post_processor: dict | None) -> _Around:
    """Of a TemplateProcessing, BertProcessing or RobertaProcessing."""
    steps = post_processor.get("processors", [post_processor]) if isinstance(post_processor, dict) else []
    for step in steps:
        kind = step.get("type") if isinstance(step, dict) else None
        if kind in ("BertProcessing", "RobertaProcessing"):
            return _Around(True, step["cls"][1], step["sep"][1], 1 if kind == "BertProcessing" else 2)
        if kind == "TemplateProcessing":
            known = step.get("special_tokens") or {}
            single, pair = ([list(part.items())[0] for part in step.get(key) or []] for key in ("single", "pair"))
            ids = [known[part["id"]]["ids"][0] if name == "SpecialToken" else None for name, part in single]
            texts = [at for at, (name, _) in enumerate(pair) if name == "Sequence"]
            between = texts[1] - texts[0] - 1 if len(texts) == 2 else 1
            return _Around(True, *((ids[0], ids[-1]) if ids else (None, None)), max(between, 1))
    return _Around(False)


def _adds(around: _Around, roles: dict, config: dict) -> tuple[bool, bool]:
    """Whether BOS and EOS belong around a text: what the post-processor says, else tokenizer_config.json."""
    if around.is_given:
        return around.before is not None and roles["bos"] is not None, around.after is not None and roles[
            "eos"
        ] is not None
    return (
        bool(config.get("add_bos_token")) and roles["bos"] is not None,
        bool(config.get("add_eos_token")) and roles["eos"] is not None,
    )
