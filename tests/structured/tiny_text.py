"""A tokenizer of 160 tokens for the tiny model: printable ASCII, line feed, some pieces of JSON, control tokens."""

import json

PIECES = ['{"', '":', '", "', '"}', "true", "null", "12", " a", "on", "in"]
CONTROLS = [
    "<unk>",
    "<s>",
    "</s>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
]


def _letters(text: str) -> str:
    """As byte-level BPE writes it."""
    return text.replace(" ", "Ġ").replace("\n", "Ċ")


def write(folder, control: str = "", letters: str = "") -> None:
    """Write tokenizer.json and its configuration beside a tiny model. control: one more token of that kind; letters: byte-level
    letters of more bytes."""
    vocabulary: dict[str, int] = {}
    for text in [*CONTROLS, *(chr(code) for code in range(32, 127)), "\n"]:
        vocabulary[text if text in CONTROLS else _letters(text)] = len(vocabulary)
    merges = []
    for piece in map(_letters, PIECES):
        for end in range(2, len(piece) + 1):
            if piece[:end] not in vocabulary:
                merges.append(f"{piece[: end - 1]} {piece[end - 1]}")
                vocabulary[piece[:end]] = len(vocabulary)
    for text in [*letters, *([control] if control else [])]:
        vocabulary[text] = len(vocabulary)
    added = [
        {
            "id": vocabulary[text],
            "content": text,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for text in [*CONTROLS, *([control] if control else [])]
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    )
