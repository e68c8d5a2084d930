"""Text → the words that are indexed and asked for: one rule for both.

A word is a run of letters and digits, in lower case, without Latin diacritics, and in English without the plural's s
(D. Harman, "How effective is suffixing?", 1991). An identifier gives its parts and the whole: maxTokens, max_tokens → max, token,
maxtokens. Scripts without spaces (Chinese, Japanese, Thai and others) give pairs of neighbouring characters."""

import re
from functools import lru_cache

from zse.lazy import unicodedata

MAX_WORD = 64  # characters; what is longer is cut: base64 is no word
_NO_SPACES = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
# Vowel signs of Hebrew, Arabic and the scripts of India are no letters to `re`, but part of a word.
_SIGNS = "\u0591-\u05c7\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
_RUN = re.compile(rf"[{_NO_SPACES}]+|(?:[^\W{_NO_SPACES}]|[{_SIGNS}])+")
_DIACRITICS = re.compile("[\u0300-\u036f]")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\WA-Z\d_]+|\d+|[^\W_]")
_IS_JOINED = re.compile("_|[a-z][A-Z]|[A-Z]{2}[a-z]")
_IS_PAIRS = re.compile(f"[{_NO_SPACES}]")


def words_of(text: str) -> list[str]:
    """In their order, repeated ones as often as they stand there."""
    if not text.isascii():
        plain = _DIACRITICS.sub("", unicodedata.normalize("NFKD", text))
        text = unicodedata.normalize("NFC", plain)
    words: list[str] = []
    for run in _RUN.findall(text):
        words += _words_of_run(run)
    return words


@lru_cache(1 << 16)
def _words_of_run(run: str) -> tuple[str, ...]:
    if _IS_PAIRS.match(run):
        return tuple(run[at : at + 2] for at in range(len(run) - 1)) or (run,)
    run = run[: 2 * MAX_WORD]
    parts = _PARTS.findall(run) if _IS_JOINED.search(run) else [run]
    whole = _stem(run.replace("_", "").lower()[:MAX_WORD])
    if len(parts) < 2:
        return (whole,) if whole else ()
    return (*(_stem(part.lower()[:MAX_WORD]) for part in parts if part), whole) if whole else ()


def _stem(word: str) -> str:
    if len(word) < 4 or word[-1] != "s":
        return word
    if word.endswith("ies"):
        return word if word[-4] in "ae" else word[:-3] + "y"
    if word.endswith("es"):
        return word if word[-3] in "aeo" else word[:-1]
    return word if word[-2] in "us" else word[:-1]


# Words of an English question that say nothing of what is asked for; without them a search reads a tenth of the postings.
STOP_WORDS = frozenset(
    _stem(word)
    for word in """a about above after again against all also am an and any are as at be because been before being below between both but by
    can could did do does doing down during each few for from further had has have having he her here hers him his how i if in
    into is it its itself just me more most my no nor not of off on once only or other our out over own same she should so some
    such than that the their them then there these they this those through to too under until up very was we were what when where
    which while who whom why will with would you your please tell""".split()
)


def asked_words(text: str, most: int) -> list[str]:
    """The words of a question, each once, without STOP_WORDS unless it has no others; at most so many."""
    words = list(dict.fromkeys(words_of(text)))
    telling = [word for word in words if word not in STOP_WORDS]
    return (telling or words)[:most]
