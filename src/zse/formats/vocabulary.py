"""vocab.txt, the vocabulary of BERT models that have no tokenizer.json: one token a line, by id."""

import msgspec

from zse.errors import FormatError

_TOKENS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}


def tokenizer_json(vocabulary: bytes, config: dict | None, path: object) -> bytes:
    """The tokenizer.json that says the same. config: tokenizer_config.json. FormatError."""
    config = config or {}
    try:
        lines = vocabulary.decode().split("\n")
    except UnicodeDecodeError as error:
        raise FormatError(path, error.start, "vocab.txt", "is not UTF-8") from None
    ids = {line.rstrip("\r"): id for id, line in enumerate(lines[:-1] if lines[-1] == "" else lines)}
    given = {role: config.get(f"{role}_token", text) for role, text in _TOKENS.items()}
    texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in given.items()}
    found: dict[str, int] = {}
    for role in ("unk", "cls", "sep"):
        id = ids.get(str(texts[role]))
        if id is None:
            raise FormatError(path, 0, "vocab.txt", f"does not hold {texts[role]!r}, the {role}_token")
        found[role] = id
    special = [text for text in dict.fromkeys(texts.values()) if text in ids]
    return msgspec.json.encode(
        {
            "model": {"type": "WordPiece", "vocab": ids, "unk_token": texts["unk"]},
            "added_tokens": [{"id": ids[text], "content": text, "special": True} for text in special],
            "normalizer": {
                "type": "BertNormalizer",
                "lowercase": config.get("do_lower_case", True),
                "strip_accents": config.get("strip_accents"),
                "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": {
                "type": "BertProcessing",
                "cls": [texts["cls"], found["cls"]],
                "sep": [texts["sep"], found["sep"]],
            },
        }
    )
