"""Retrieved passages as text for a prompt: plain, or ZPF, in fewer tokens with the same facts.

ZPF keeps every number, name, negation and unit; docs/retrieval.md has its grammar. Rules,
in this order:

1. A passage is headed by its number and its source, `[1] name p3 heading > heading`; `[2] =` where the source is the same.
2. A line that stood in a passage before is left out where it belongs to the same document or tells nothing (menus, footers).
3. JSON loses quotes, brackets and commas: `key: value`, one blank of indent a level. Other code loses empty lines, rulers and three
   of four blanks of indent. Rulers of tables go.
4. In prose a sentence goes that has no fact, no word of the question, and no word beyond rag/generic_words.py; articles, fillers of
   speech and empty phrases go. So does a comment of code that only says again what the line below it says.

A fact: a digit or a number's word, a negation, a sign, a quotation, or a name: a word with a capital, at the beginning of a sentence
one that is no generic word. A unit stands in the sentence of its number."""

import re
from collections.abc import Sequence

from zse.rag.documents import Passage
from zse.rag.generic_words import GENERIC
from zse.rag.words import asked_words, words_of

_MAX_ASKED = 64  # words of a question that sentences are kept for

# Negations, quantities and words that turn a sentence round: a sentence with one of them is kept.
_NEGATIONS = frozenset(
    """no not never none nobody nothing nowhere neither nor without cannot except unless only but however instead if less more must
    shall may should least most until before after forbidden prohibited warning caution danger important required optional""".split()
)
_NUMBERS = frozenset(
    """one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty hundred thousand million billion half
    quarter third double triple dozen first second last once twice zero january february march april may june july august september
    october november december monday tuesday wednesday thursday friday saturday sunday""".split()
)
_HOLDS = _NEGATIONS | _NUMBERS
_PHRASES = [
    (re.compile(rf"\b{old}\b", re.IGNORECASE), new)
    for old, new in (
        (r"in order to", "to"),
        (r"due to the fact that", "because"),
        (r"in the event that", "if"),
        (r"at this point in time", "now"),
        (r"with (?:regard|respect) to", "about"),
        (r"a (?:large|great) number of", "many"),
        (r"as well as", "and"),
        (r"(?:please note|it should be noted|it is important to note|it is worth noting|note) that", ""),
        (r"as a matter of fact|needless to say|it goes without saying that|all in all|above all|in general|generally speaking", ""),
        (r"(?:is|are) able to", "can"),
    )
]  # fmt: skip
_FILLERS = frozenset(
    "a an the very really quite rather simply basically actually essentially just indeed certainly obviously clearly please".split()
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[\"'(\[]?[A-Z0-9])")
_WORD = re.compile(r"(^\W*|[.!?|:;>•–—(\"-]\s*)?\b([^\W\d_]+(?:['’][^\W\d_]+)?)")
_SPAN = re.compile('`[^`]*`|"[^"]*"|“[^”]*”|\0')
_ONE_OF = re.compile(r"\bone of\b", re.IGNORECASE)
_FACT = re.compile(r"[\d%°€$£¥§@#`\"“”«»/\\=<>{}_|]|n['’]t\b")
_JSON_PAIR = re.compile(r'^(\s*)"((?:[^"\\]|\\.)*)"\s*:\s*(.*?),?\s*$')
_JSON_ITEM = re.compile(r'^(\s*)("(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null),?\s*$')
_COMMENTS = ("#", "//", "--", "/*", "*")
_BRACKETS = re.compile(r"^[\s{}\[\],]*$")
_ORPHANS = re.compile(r"(^|: ?|- )[,;] *")
_RULER = re.compile(r"^\W*$")
_CODE = re.compile(
    r"^\s*(?:(?:async )?def |class |import |from \S+ import |return\b|[\w.]+\(.*\)[;:]?$|[\w.\[\]\"']+ [-+*/|&]?= |#include|(?:if|for|while|else|elif|try|with)\b.*[:{]$"
    r"|(?:public|private|static|const|let|var|fn|func|function|struct|void|int)\b.*[;{(=]|[})\];]+$|//|/\*|\*/|@\w+)"
)
_QUOTED = re.compile(r'^"([^"\\,:{}\[\]#]*[^"\\,:{}\[\]#\d\s][^"\\,:{}\[\]#]*)"$')
_WORDS_OF_JSON = ('"true"', '"false"', '"null"')


def plain(passages: Sequence[Passage]) -> list[str]:
    """Each passage as it is, under its number, source, pages and headings. Join them with an empty line."""
    parts = []
    for number, passage in enumerate(passages, 1):
        chunk = passage.chunk
        where = f"[{number}] Source: {passage.name}"
        if chunk.first_page:
            where += f", page {chunk.first_page}" + (
                f"-{chunk.last_page}" if chunk.last_page > chunk.first_page else ""
            )
        above = f"\n{' > '.join(chunk.headings)}" if chunk.headings else ""
        parts.append(f"{where}{above}\n\n{chunk.text.strip()}")
    return parts


def zpf(passages: Sequence[Passage], question: str) -> list[str]:
    """The same passages in ZPF, in their order: what a later one leaves out stands in one before it. The same passages and question give
    the same text. Join them with "\\n"."""
    return [
        f"[{number}] {source}" + (f"\n{text}" if text else "")
        for number, (source, text) in enumerate(zpf_parts(passages, question), 1)
    ]


def zpf_parts(passages: Sequence[Passage], question: str) -> list[tuple[str, str]]:
    """(source, text) of each."""
    asked = frozenset(asked_words(question, _MAX_ASKED))
    seen: dict[str, set[str]] = {}  # line → the documents in which it stood
    before = [None, *passages[:-1]]
    return [
        (_source(passage, previous), _compact(_new_lines(passage, seen), asked))
        for passage, previous in zip(passages, before, strict=True)
    ]


def _source(passage: Passage, before: Passage | None) -> str:
    chunk = passage.chunk
    is_same = before is not None and before.document == passage.document
    pages = ""
    if chunk.first_page:
        pages = f" p{chunk.first_page}" + (f"-{chunk.last_page}" if chunk.last_page > chunk.first_page else "")
    headings = [] if is_same and before and before.chunk.headings == chunk.headings else chunk.headings
    first = chunk.text.lstrip().partition("\n")[0].strip()
    shown = [heading for heading in headings if heading not in (first, passage.name)]
    name = f'"{passage.name}"' if passage.name.lstrip().startswith("=") else passage.name
    return " ".join(f"{'=' if is_same else name}{pages} {' > '.join(shown)}".split())


def _new_lines(passage: Passage, seen: dict[str, set[str]]) -> list[str]:
    """Those that tell something that no passage before told."""
    out = []
    for line in passage.chunk.text.split("\n"):
        text = line.strip()
        documents = seen.setdefault(text, set())
        # Of one line of code or a table nothing is left out: what repeats there has another place.
        is_known = passage.document in documents and len(words_of(text)) > 3
        if not (is_known or documents and not tells(text) and not _CODE.match(line)) or not text:
            out.append(line)
        if text:
            documents.add(passage.document)
    return out


def _compact(lines: list[str], asked: frozenset[str]) -> str:
    filled = [line for line in lines if line.strip()]
    num_json = sum(bool(_JSON_PAIR.match(line) or _BRACKETS.match(line)) for line in filled)
    if filled and num_json * 5 >= len(filled) * 3:
        return "\n".join(_json_lines(filled))
    if filled and sum(bool(_CODE.match(line)) for line in filled) * 3 >= len(filled):
        return "\n".join(_code_lines(filled))
    out = []
    for line in filled:
        if not _RULER.match(line) and (short := _prose(" ".join(line.split()), asked)):
            out.append(short)
    return "\n".join(out)


def _json_lines(lines: list[str]) -> list[str]:
    """YAML's look: what stands deeper belongs to the line above; items of a list begin with "-"."""
    out = []
    levels: list[int] = []
    for line in lines:
        if _BRACKETS.match(line):
            continue
        indent = len(line) - len(line.lstrip())
        while levels and levels[-1] >= indent:
            levels.pop()
        levels.append(indent)
        start = " " * (len(levels) - 1)
        if pair := _JSON_PAIR.match(line):
            value = pair[3].strip()
            out.append(f"{start}{pair[2]}:" + ("" if value in ("{", "[") else f" {_bare(value)}"))
        elif item := _JSON_ITEM.match(line):
            out.append(f"{start}- {_bare(item[2])}")
        else:
            out.append(start + line.strip())
    return out


def _bare(value: str) -> str:
    """A string without its quotes where it cannot be taken for anything else."""
    found = _QUOTED.match(value)
    return found[1] if found and value not in _WORDS_OF_JSON and found[1] == found[1].strip() else value


def _code_lines(lines: list[str]) -> list[str]:
    """Levels of indent by one blank each."""
    out = []
    levels = [0]
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        text = line.strip()
        if text.startswith(_COMMENTS) and not has_fact(text.lstrip("#/-* ")):
            if set(words_of(text)) <= set(words_of(below)) | GENERIC:
                continue  # a ruler, or what the line says by itself
        indent = len(line.expandtabs(4)) - len(line.expandtabs(4).lstrip())
        while levels[-1] > indent:
            levels.pop()
        if levels[-1] < indent:
            levels.append(indent)
        out.append(" " * (len(levels) - 1) + re.sub(r"(?<=\S)  +(?=#|//)", " ", text))
    return out


def tells(sentence: str) -> bool:
    """Whether it has a fact or a word that is not generic."""
    return has_fact(sentence) or not _is_generic(sentence)


def _prose(line: str, asked: frozenset[str]) -> str:
    """Of a line the sentences that tell something, in fewer words."""
    kept = []
    for sentence in _SENTENCE.split(line):
        if tells(sentence) or asked & set(words_of(sentence)):
            kept.append(_shorter(sentence))
    return " ".join(filter(None, kept))


def has_fact(sentence: str) -> bool:
    """Whether it has a number, a name, a negation, a unit or a quotation; for text in scripts without capitals always."""
    if (
        _FACT.search(sentence)
        or not sentence.isascii()
        and any(ord(letter) > 0x24F for letter in sentence if letter.isalpha())
    ):
        return True
    for found in _WORD.finditer(_ONE_OF.sub("of", sentence)):
        word, is_first = found[2], found[1] is not None
        lower = word.lower()
        if lower in _HOLDS or word[0].isupper() and not (is_first and _is_generic(lower)):
            return True
    return False


def _is_generic(word: str) -> bool:
    return all(part in GENERIC for part in words_of(word))


def _shorter(sentence: str) -> str:
    if " | " in sentence:
        return sentence  # a row of a table
    spans = _SPAN.findall(sentence)
    sentence = _SPAN.sub("\0", sentence)
    for old, new in _PHRASES:
        sentence = old.sub(new, sentence)
    words, split = [], sentence.split()
    for word, after in zip(split, [*split[1:], ""], strict=True):
        # The Hague, A Coruña: a capital twice is a name.
        is_filler = word.lower() in _FILLERS and (word.islower() or after[:1].islower())
        if not is_filler:
            words.append(word)
    short = _ORPHANS.sub(r"\1", " ".join(words)).replace(" ,", ",")
    return re.sub("\0", lambda _: spans.pop(0), short)
