"""The fixed set: documents of mixed kinds with questions whose answers stand in known passages, made of seeds and templates.

Every document is about one thing with an invented name. Seven things of different kinds have one name, and each has a twin of the same
kind, whose name and facts are alike and which it mentions: what finds only the name, or only the kind, is wrong. Half of the
questions are asked in the document's words, half in others, which share no word with it but the name."""

import random
from collections.abc import Callable
from typing import NamedTuple

from zse.lazy import json
from zse.rag.documents import Chunk

DEFAULT_SEED = 16
KINDS = ("prose", "table", "code", "json", "list", "manual", "faq")
QUESTIONS = 3  # of each document
PER_KIND = 16  # documents, half of them twins of the other half
# What a kind is about, and another word for it.
NOUNS = {
    "table": ("drill", "power tool"),
    "code": ("scheduler", "job runner"),
    "json": ("gateway", "proxy"),
    "manual": ("pump", "water mover"),
}


class MadePassage(NamedTuple):
    """document: id, of one chunk."""

    document: str
    kind: str
    title: str
    chunk: Chunk


class MadeQuestion(NamedTuple):
    """passage: of the list, where the answer stands as it is written here. is_paraphrase: in other words than the passage's."""

    text: str
    answer: str
    passage: int
    is_paraphrase: bool


class Fact(NamedTuple):
    """said: with {name}, {noun} and {value}; asked in its words, and in others, with {name} and {noun} or {other}."""

    label: str
    value: str
    said: str
    asked: str
    otherwise: str


_STARTS = "Bel Cor Dar El Fen Gal Hal Ist Jor Kel Lor Mar Nor Or Pel Quin Ros Sel Tar Ul Ver Wen Yar Zan".split()
_MIDDLES = "a e i o u an el in or ud am ev il os".split()
_ENDS = "bury dale ford gate holm ick land mere ness ova rick stad ton vik wold za".split()
_MATERIALS = "cedar,limestone,brushed steel,oak,basalt,copper,bamboo,slate,birch plywood,recycled glass".split(",")
_ROLES = "engineer,botanist,painter,surveyor,merchant,teacher,printer,clockmaker".split(",")
_COLOURS = "amber,teal,crimson,violet,olive,indigo,white,magenta".split(",")


def _name(draw: random.Random) -> str:
    return draw.choice(_STARTS) + draw.choice(_MIDDLES) + draw.choice(_ENDS)


def _person(draw: random.Random) -> str:
    first = draw.choice(
        "Ada Bruno Clara Dimitri Edith Farid Greta Hugo Ines Jonas Katya Luis Mira Nils Olga Piotr".split()
    )
    return f"{first} {_name(draw)}"


def _place(draw: random.Random) -> list[Fact]:
    year, height = str(draw.randrange(1780, 1990)), f"{draw.randrange(12, 90)} m"
    price, months = (
        f"{draw.randrange(3, 30)}.50 euros",
        draw.choice(("April to October", "May to September", "all year")),
    )
    person, stone = f"{_person(draw)}", draw.choice(_MATERIALS)
    return [
        Fact("built", year, "The {name} lighthouse was built in {value}.", "When was the {name} lighthouse built?", "In which year did they put up the beacon at {name}?"),
        Fact("height", height, "It has a height of {value} above the sea.", "What is the height of the {name} lighthouse?", "How tall is the tower of {name}?"),
        Fact("designer", person, f"It was designed by the {draw.choice(_ROLES)} {{value}}.", "Who designed the {name} lighthouse?", "Which architect drew the plans for the {name} tower?"),
        Fact("ticket", price, "A ticket costs {value} for an adult.", "What does a ticket for the {name} lighthouse cost?", "How much must a grown-up pay to visit {name}?"),
        Fact("season", months, "It is open to visitors from {value}.", "When is the {name} lighthouse open to visitors?", "During which months can one go inside the {name} beacon?"),
        Fact("material", stone, "The stairs are made of {value}.", "What are the stairs of the {name} lighthouse made of?", "From which material are the steps at {name}?"),
    ]  # fmt: skip


def _device(draw: random.Random) -> list[Fact]:
    weight, hours = f"{draw.randrange(4, 60) / 10} kg", f"{draw.randrange(5, 40)} hours"
    watts, colour = f"{draw.randrange(20, 900)} W", draw.choice(_COLOURS)
    noise, warranty = f"{draw.randrange(25, 70)} dB", f"{draw.randrange(2, 9)} years"
    return [
        Fact("weight", weight, "The weight of the {name} {noun} is {value}.", "What is the weight of the {name} {noun}?", "How heavy is the {name} {other}?"),
        Fact("battery life", hours, "The battery life is {value}.", "What is the battery life of the {name} {noun}?", "How long does the {name} {other} run on one charge?"),
        Fact("rated power", watts, "Its rated power is {value}.", "What is the rated power of the {name} {noun}?", "How much electricity does the {name} {other} draw?"),
        Fact("housing", colour, "The housing is {value}.", "Which colour is the housing of the {name} {noun}?", "What does the case of the {name} {other} look like?"),
        Fact("noise", noise, "Its noise is {value} at full speed.", "What is the noise of the {name} {noun} at full speed?", "How loud does the {name} {other} get?"),
        Fact("warranty", warranty, "The warranty lasts {value}.", "How long does the warranty of the {name} {noun} last?", "For what period does the maker guarantee the {name} {other}?"),
    ]  # fmt: skip


def _service(draw: random.Random) -> list[Fact]:
    values = [
        str(value)
        for value in (draw.randrange(1024, 60000), draw.randrange(2, 90), draw.randrange(3, 64), draw.randrange(2, 12))
    ]
    folder = f"/srv/{_name(draw).lower()}"
    level = draw.choice(("debug", "verbose", "warning", "trace"))
    return [
        Fact("port", values[0], "", "Which port does the {name} {noun} listen on?", "At what TCP number can clients connect to the {name} {other}?"),
        Fact("timeout_seconds", values[1], "", "What is the timeout of the {name} {noun} in seconds?", "After how long does the {name} {other} give up waiting?"),
        Fact("max_workers", values[2], "", "What is the maximum of workers of the {name} {noun}?", "How many processes may the {name} {other} start at once?"),
        Fact("retry_count", values[3], "", "What is the retry count of the {name} {noun}?", "How often does the {name} {other} try again after a failure?"),
        Fact("data_folder", folder, "", "Which data folder does the {name} {noun} use?", "Where does the {name} {other} keep its files on disk?"),
        Fact("log_level", level, "", "Which log level does the {name} {noun} have?", "How talkative are the messages that the {name} {other} writes?"),
    ]  # fmt: skip


_FILLER = (
    "There is a lot to see and to enjoy here.",
    "It is widely regarded as one of the finest of its kind.",
    "Over the course of time many people have come to appreciate it, and there is every reason to believe that they always will.",
    "As a matter of fact, it is really quite a pleasant experience for the whole family.",
    "Needless to say, a great deal of care went into every detail.",
    "In this section we take a closer look at it.",
    "It goes without saying that this is something to look forward to.",
    "All in all, it is well worth a visit at any time of the day.",
)
_SITE = ("Home | Products | Support | Contact", "Skip to main content", "Search this site")
_FOOT = ("Was this page helpful? Yes or no", "Please share this page with your friends", "Back to top")


def _with_filler(draw: random.Random, sentences: list[str]) -> str:
    out = []
    for index, sentence in enumerate(sentences):
        out.append(sentence)
        if index % 2 == 0:
            out.append(draw.choice(_FILLER))
    return " ".join(out)


def _prose(draw: random.Random, name: str, twin: str) -> tuple[list[Fact], str, list[str]]:
    facts = _place(draw)
    sentences = [fact.said.format(name=name, value=fact.value) for fact in facts]
    sentences.insert(3, f"It must not be confused with the lighthouse of {twin}, which is not open.")
    middle = len(sentences) // 2
    text = f"{_with_filler(draw, sentences[:middle])}\n\n{_with_filler(draw, sentences[middle:])}"
    return facts, text, ["Lighthouses of the coast", name]


def _table(draw: random.Random, name: str, twin: str) -> tuple[list[Fact], str, list[str]]:
    rows = [
        (name, facts := _device(draw)),
        *((f"{name[:-2]}{letter}", _device(draw)) for letter in "ax"),
        (twin, _device(draw)),
    ]
    draw.shuffle(rows)
    lines = ["Model | " + " | ".join(fact.label.capitalize() for fact in facts)]
    lines += [" | ".join([row_name, *(fact.value for fact in row)]) for row_name, row in rows]
    return facts, "\n".join(lines), ["Drills compared"]


def _code(draw: random.Random, name: str, twin: str) -> tuple[list[Fact], str, list[str]]:
    facts = _service(draw)
    lines = [
        f"class {name}Scheduler(BaseService):",
        f'    """The {name} scheduler. It does not share anything with {twin}."""',
        "",
    ]
    for fact in facts:
        value = fact.value if fact.value.isdigit() else f'"{fact.value}"'
        lines += [f"    # {fact.label.replace('_', ' ')} of this scheduler", f"    {fact.label.upper()} = {value}", ""]
    lines += [
        "    def start(self) -> None:",
        "        if self.is_running:",
        f'            raise RuntimeError("{name} is running already")',
        "        self.listener = Listener(self.PORT, timeout=self.TIMEOUT_SECONDS)",
        "",
        "    # ------------------------------------------------------------",
        "",
        "    def stop(self) -> None:",
        "        self.listener.close()",
    ]
    return facts, "\n".join(lines), [f"{name.lower()}_scheduler.py"]


def _json(draw: random.Random, name: str, twin: str) -> tuple[list[Fact], str, list[str]]:
    facts = _service(draw)
    values = {fact.label: int(fact.value) if fact.value.isdigit() else fact.value for fact in facts}
    network = {key: values.pop(key) for key in ("port", "timeout_seconds")}
    content = {"gateway": name, "description": f"Settings of {name}, not of {twin}", "network": network, "limits": values, "tags": ["internal", "stable"], "tls": False}  # fmt: skip
    return facts, json.dumps(content, indent=4), [f"{name.lower()}.json"]


def _list(draw: random.Random, name: str, twin: str) -> tuple[list[Fact], str, list[str]]:
    flour, minutes, heat = (
        f"{draw.randrange(2, 9) * 50} g",
        f"{draw.randrange(15, 95)} minutes",
        f"{draw.randrange(140, 250)} °C",
    )
    spice, rest, people = draw.choice(("caraway", "saffron", "sumac", "juniper", "fennel seed")), f"{draw.randrange(2, 20)} hours", f"{draw.randrange(2, 14)} people"  # fmt: skip
    facts = [
        Fact("flour", flour, "- {value} of rye flour", "How much rye flour is in {name} bread?", "What amount of grain meal goes into the {name} loaf?"),
        Fact("spice", spice, "- a spoon of ground {value}, not more", "Which ground spice is in {name} bread?", "With what is the {name} loaf seasoned?"),
        Fact("rest", rest, "- Let the dough rest for {value} in a cool place", "How long does the dough of {name} bread rest?", "For what time must one leave the {name} loaf to rise?"),
        Fact("heat", heat, "- Heat the oven to {value} before the bread goes in", "To what is the oven heated for {name} bread?", "At which temperature is the {name} loaf baked?"),
        Fact("minutes", minutes, "- Bake it for {value}, without opening the door", "How long is {name} bread baked?", "After what time does the {name} loaf come out?"),
        Fact("serves", people, "- The bread is enough for {value}", "For how many is {name} bread enough?", "How large a party does the {name} loaf serve?"),
    ]  # fmt: skip
    lines = [f"{name} bread, a recipe", "", *(fact.said.format(name=name, value=fact.value) for fact in facts)]
    return (
        facts,
        "\n".join(
            [*lines, f"- Do not take it for the bread of {twin}", "- Please take your time and, above all, enjoy it"]
        ),
        ["Bread of the region"],
    )


def _manual(draw: random.Random, name: str, twin: str) -> tuple[list[Fact], str, list[str]]:
    facts = _device(draw)
    sentences = [fact.said.format(name=name, noun="pump", value=fact.value) for fact in facts]
    warning = f"Warning: never run the {name} pump without water. Do not use the filter of the {twin}."
    body = [
        f"{name} pump",
        "Overview",
        _with_filler(draw, sentences[:3]),
        "Operation",
        _with_filler(draw, sentences[3:]),
        warning,
    ]
    return facts, "\n\n".join([*_SITE, *body, *_FOOT]), [f"{name} pump", "Manual"]


def _faq(draw: random.Random, name: str, twin: str) -> tuple[list[Fact], str, list[str]]:
    days, fee, seats = (
        f"{draw.randrange(3, 60)} days",
        f"{draw.randrange(4, 90)} dollars",
        f"{draw.randrange(5, 400)} seats",
    )
    floor, chief, hour = f"floor {draw.randrange(2, 30)}", _person(draw), f"{draw.randrange(6, 22)}:{draw.choice(('00', '15', '30', '45'))}"  # fmt: skip
    facts = [
        Fact("loan", days, "In general, books can be kept for {value}.", "How long can books of the {name} library be kept?", "What is the loan period at {name}?"),
        Fact("fee", fee, "The fee for a card is {value} in the year.", "What is the fee for a card of the {name} library?", "How much does membership at {name} cost?"),
        Fact("seats", seats, "The reading room has {value}.", "How many seats does the reading room of the {name} library have?", "What crowd can sit and study at {name}?"),
        Fact("maps", floor, "The maps are on {value}.", "Where are the maps of the {name} library?", "Which level of the {name} building has the atlases?"),
        Fact("director", chief, "The director is {value}.", "Who is the director of the {name} library?", "Which person runs the institution at {name}?"),
        Fact("closing", hour, "The doors are closed at {value} and no later.", "When are the doors of the {name} library closed?", "At what time do readers have to leave {name}?"),
    ]  # fmt: skip
    lines = []
    for fact in facts:
        said = fact.said.format(name=name, value=fact.value)
        lines += [f"Q: {fact.asked.format(name=name)}", f"A: {said} {draw.choice(_FILLER)}", ""]
    lines += ["Q: Are books of other libraries taken back?", f"A: No, those of {twin} are not."]
    return facts, "\n".join(lines), [f"{name} library", "Questions and answers"]


_MAKERS: dict[str, Callable[[random.Random, str, str], tuple[list[Fact], str, list[str]]]] = {
    "prose": _prose,
    "table": _table,
    "code": _code,
    "json": _json,
    "list": _list,
    "manual": _manual,
    "faq": _faq,
}


def make_set(seed: int = DEFAULT_SEED, per_kind: int = PER_KIND) -> tuple[list[MadePassage], list[MadeQuestion]]:
    """112 passages and 336 questions by default, the same ones for the same seed; num_tokens of their chunks is 0."""
    draw = random.Random(seed)
    passages: list[MadePassage] = []
    questions: list[MadeQuestion] = []
    taken: set[str] = set()
    for _ in range(per_kind // 2):
        name = twin = ""
        while not name or name in taken or twin in taken:
            name = _name(draw)
            twin = name[:-1] + draw.choice([letter for letter in "aeiklnorst" if letter != name[-1]])
        taken |= {name, twin}
        for kind in KINDS:
            noun, other_noun = NOUNS.get(kind, ("", ""))
            for one, other in ((name, twin), (twin, name)):
                facts, text, headings = _MAKERS[kind](draw, one, other)
                for index, fact in enumerate(draw.sample(facts, QUESTIONS)):
                    is_paraphrase = (len(passages) + index) % 2 == 1
                    asked = fact.otherwise if is_paraphrase else fact.asked
                    asked = asked.format(name=one, noun=noun, other=other_noun)
                    questions.append(MadeQuestion(asked, fact.value, len(passages), is_paraphrase))
                chunk = Chunk(text, headings, 0, 0, 0)
                passages.append(MadePassage(f"{kind}-{one.lower()}", kind, headings[0], chunk))
    return passages, questions
