"""ZPF: what it leaves out, and that no number, name or negation is among it."""

import re

import pytest

from zse.rag import compress
from zse.rag.documents import Chunk, Passage
from zse.rag.questions import make_set


def passage(text: str, document: str = "d", page: int = 0, headings=()) -> Passage:
    return Passage(document, 1, f"{document}.txt", 0, Chunk(text, list(headings), page, page, 0), 1.0)


def body(text: str, question: str = "anything?") -> str:
    return "\n".join(compress.zpf([passage(text)], question)[0].split("\n")[1:])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is what it is. The tower is 41 m high.", "tower is 41 m high."),
        ("There is a lot to see. Do not open it.", "Do not open it."),
        ("We went to The Hague and to A Coruña.", "We went to The Hague and to A Coruña."),
        ("Needless to say, a great deal of care went into it.", ""),
        ("The stairs are made of oak.", "stairs are made of oak."),
        ("In order to start, press the button.", "to start, press button."),
        ("It is one of the finest.", ""),
        ("All of this is for Grace.", "All of this is for Grace."),
        ("See this. Say never. Take three.", "Say never. Take three."),
        ("Type `the` and | go", "Type `the` and | go"),
        ('Say `the  very` to the man with "a the" in the hat.', 'Say `the very` to man with "a the" in hat.'),
        ("a | b  | c\n---|---|---\n1 | 2 | 3", "a | b | c\n1 | 2 | 3"),
        ("Все хорошо. 好的。", "Все хорошо. 好的。"),
        ('{\n    "a": {\n        "b": "x y",\n        "c": [\n            1,\n            "no"\n        ]\n    },\n    "d": "12"\n}', 'a:\n b: x y\n c:\n  - 1\n  - no\nd: "12"'),
        ("def f():\n    # the x of this\n    if x:\n\n        return 1\n", "def f():\n if x:\n  return 1"),
        ("def f():\n    # twice as fast\n    return 1\n", "def f():\n # twice as fast\n return 1"),
    ],
)  # fmt: skip
def test_rules(text, expected):
    assert body(text) == expected


def test_sources_and_repeated_lines():
    menu, told = "Skip to this site", "Press 7 to leave the building at night"
    parts = compress.zpf(
        [
            passage(f"{menu}\n{told}\nIt is red.", page=3, headings=["Rules", "Doors"]),
            passage(f"{menu}\n{told}\nIt is blue.", page=4, headings=["Rules", "Doors"]),
            passage(f"{menu}\n{told}", "other"),
        ],
        "site?",
    )
    assert parts == [
        f"[1] d.txt p3 Rules > Doors\n{menu}\nPress 7 to leave building at night\nIt is red.",
        "[2] = p4\nIt is blue.",
        "[3] other.txt\nPress 7 to leave building at night",  # of another source: it is cited by itself
    ]
    assert compress.plain([passage("x", page=3, headings=["Rules"])]) == ["[1] Source: d.txt, page 3\nRules\n\nx"]


def test_a_name_is_one_line_and_no_sign_of_another_passage():
    parts = compress.zpf([passage("one 1", "d"), passage("two 2", "= p4\n[9] mine")], "?")
    assert parts[1] == '[2] "= p4 [9] mine.txt"\ntwo 2'


def test_words_of_the_question_keep_a_sentence():
    assert body("It is a pleasure to see it.", "pleasure?") == "It is pleasure to see it."
    assert body("It is a pleasure to see it.") == ""


NEGATION = re.compile(r"\b(?:no|not|never|without|cannot)\b|n't\b", re.IGNORECASE)


@pytest.mark.parametrize("seed", [16, 99])
def test_every_number_name_and_negation_is_kept(seed):
    made, questions = make_set(seed)
    names = {word for one in made for word in [one.document.split("-")[1].capitalize()]}
    for question in questions:
        text = made[question.passage].chunk.text
        short = body(text)
        assert re.findall(r"\d+(?:[.:]\d+)?", short) == re.findall(r"\d+(?:[.:]\d+)?", text), text
        assert [name for name in names if name in text] == [name for name in names if name in short]
        meant = text.replace("goes without saying", "")  # an idiom, which is left out
        assert len(NEGATION.findall(short)) == len(NEGATION.findall(meant)), text
        assert question.answer in short, (question, short)
        assert short == body(text)
