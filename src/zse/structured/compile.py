"""From a Structure to llguidance's grammar, and llguidance's view of a vocabulary. Runs in the grammar process only."""

import json
import re
from collections import OrderedDict
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from zse.structured.gbnf import lark_of
from zse.structured.options import CHOICE, GBNF, JSON_OBJECT, JSON_SCHEMA, LARK, REGEX, WHITESPACE, Structure
from zse.structured.schema import expressed

MAX_CACHED = 64
# Lexer states take 1 to 2 kB each (llguidance's figure); a mask may take some 15 ms at most.
LIMITS: dict[str, Any] = dict(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# Processor time that what a token takes may take; more, and the request ends: all requests of a step wait for its
# masks.
MASK_S = 0.25
SLOW = f"a mask of the grammar takes longer than {MASK_S} s"
_COMPLEX = ("too large", "too complex", "too many", "fuel", "limit", "exceeded")

_WORDS = {
    "coerce_one_of": "oneOf needs branches that differ in type, in the const or enum of a required property, or in what is "
    'required; use anyOf, or "strict": false',
    "NoExtension": "no token can follow",
}


class GrammarError(ValueError):
    """A grammar that is refused. code: invalid_schema or schema_too_complex."""

    def __init__(self, message: str, code: str = "invalid_schema"):
        super().__init__(message)
        self.code = code


def refusal(reason: str) -> GrammarError:
    """llguidance's words on one line, without those for who programs it."""
    line = " ".join(reason.split())
    line = next((words for mark, words in _WORDS.items() if mark in line), line)
    unread = re.match(r"Unimplemented keys: \[(.*?)\]", line)
    if unread is not None:
        words = unread[1].replace('"', "'")
        line = f"""nothing enforces {words} as this schema has it; leave it out, or say "strict": false, which passes over it"""
    line = line if len(line) <= 300 else line[:300] + "…"
    is_complex = any(word in line.lower() for word in _COMPLEX)
    return GrammarError(line, "schema_too_complex" if is_complex else "invalid_schema")


def grammar_of(structure: Structure) -> str:
    """llguidance's grammar for a structure. Raises GrammarError."""
    kind, source = structure.kind, structure.source
    try:
        if kind in (JSON_OBJECT, JSON_SCHEMA):
            schema = json.dumps(expressed(json.loads(source))) if kind == JSON_SCHEMA else '{"type":"object"}'
            options: Any = {"whitespace_pattern": WHITESPACE, "lenient": structure.lenient}
            return LLMatcher.grammar_from_json_schema(schema, defaults=options)
        if kind == REGEX:
            return LLMatcher.grammar_from_regex(source)
        if kind == CHOICE:
            words = " | ".join(quoted(word) for word in json.loads(source))
            return LLMatcher.grammar_from_lark("start: " + words)
        if kind == LARK:
            return LLMatcher.grammar_from_lark(source)
        if kind == GBNF:
            return LLMatcher.grammar_from_lark(lark_of(source))
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply", "schema_too_complex") from None
    except Exception as error:  # the converters raise exceptions of their own; all of them are about the source
        raise refusal(str(error) or type(error).__name__) from None
    raise GrammarError(f"no grammar is called {kind}")


def quoted(text: str) -> str:
    """`text` as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


class Vocabulary:
    """A model's tokens as llguidance wants them. vocab_size: lines of its head, which may be more than the
    tokenizer's."""

    def __init__(self, tokenizer, vocab_size: int, eos_ids: frozenset[int]):
        self._tokenizer = tokenizer
        known = min(tokenizer.vocab_size, vocab_size)
        self.vocab_size, self.eos_ids = vocab_size, eos_ids
        # llguidance counts the tokens; empty ones, which pad a head, are never allowed.
        self.tokens = [tokenizer.token_bytes(id) for id in range(known)] + [b""] * (vocab_size - known)
        self.special_token_ids = [id for id in range(known) if tokenizer.is_special(id)]
        self.eos_token_id = min(eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.is_tokenizer_wrapper = True
        self.guide = LLTokenizer(self, n_vocab=vocab_size, eos_token=sorted(eos_ids))  # type: ignore[arg-type]

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text, as llguidance asks for them."""
        data = text if isinstance(text, bytes) else text.encode()
        encode = getattr(self._tokenizer, "encode_bytes", None)
        if encode is not None:
            return encode(data)
        return self._tokenizer.encode(data.decode("utf-8", "replace"), add_bos=False)

    def mark(self, text: str) -> list[int]:
        """Token ids of a mark such as </think>: its own token where there is one."""
        return self._tokenizer.encode(text, special=True, add_bos=False)

    def compile(self, structure: Structure):
        """An LLMatcher at its start. Raises GrammarError."""
        matcher = LLMatcher(self.guide, grammar_of(structure), log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise refusal(matcher.get_error())
        return matcher


class Cache:
    """Compiled grammars by (kind, source, lenient), the longest unused one goes first."""

    def __init__(self, size: int = MAX_CACHED):
        self._size = size
        self._entries: OrderedDict[tuple, Any] = OrderedDict()

    @staticmethod
    def key(structure: Structure) -> tuple:
        return structure.kind, structure.source, structure.lenient

    def get(self, key: tuple):
        """A fresh copy of the matcher, or None."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found.deep_copy()

    def put(self, key: tuple, matcher) -> None:
        self._entries[key] = matcher
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)
