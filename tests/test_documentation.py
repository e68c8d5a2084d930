"""The documentation is true: commands and options exist, links resolve, the CLI reference is the parsers'."""

import re
import shlex
from pathlib import Path

import pytest

from zse.cli import main, reference

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def commands_in(text):
    """`zse …` in code spans and in code blocks, as word lists."""
    fenced = "\n".join(re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    lines = fenced.splitlines() + re.findall(r"^ {4}(.*)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        for part in line.removeprefix("$ ").split(" | "):
            command = re.match(r"(?:\w+=\S+ )*(?:\.venv/bin/)?(zse [a-z].*)", part)
            if command:
                yield line, shlex.split(command[1], comments=True)


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_options_exist(name):
    for line, words in commands_in((ROOT / name).read_text()):
        command = words[1]
        assert command in main.COMMANDS, f"{name}: {line}"
        known = {option for action in main.parser_of(command)._all_actions() for option in action.option_strings}
        for word in words[2:]:
            if re.match(r"--?[a-z]", word):
                assert word.partition("=")[0] in known, f"{name}: {word} in {line}"


def test_the_command_finder_finds():
    text = "see `zse ls --json` or\n\n    zse pull smollm2   # fetch\n    cat x | zse run m -\n"
    found = [words for _, words in commands_in(text)]
    assert found == [["zse", "pull", "smollm2"], ["zse", "run", "m", "-"], ["zse", "ls", "--json"]]


@pytest.mark.parametrize("name", NAMES)
def test_links_resolve(name):
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, (
                f"{name}: {target}"
            )


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_of_a_merge(name):
    assert not re.search(r"^(<{7} |>{7} |={7}$)", (ROOT / name).read_text(), re.MULTILINE)


# Files of others, which docstrings name as their source.
FOREIGN = {"benchmarks/bench_serving.py", "docs/design/benchmark_plan.md", "docs/format.md", "docs/gguf.md"}
NAMED = re.compile(
    r"(?<![\w/.<-])((?:\w+/)+\w+\.(?:py|md|cpp|c|h|sh|toml))\b(?:(?<=py): ?([A-Za-z_]+(?:\.[A-Za-z_]+)*))?"
)


def named_files(text):
    """(file, name in it or "") where a text names a file below a folder; behind no address and not as a pattern."""
    text = re.sub(r"https?://\S+|\w+\.(?:com|org|io)/\S+", "", text)
    for found in NAMED.finditer(text):
        if found[1] not in FOREIGN and "NAME" not in found[1]:
            quoted = text[found.start() - 1 : found.start()] == "`"
            yield found[1], (found[2] or "") if quoted else ""


def test_pages_and_docstrings_name_files_that_exist():
    """A file may be named from any folder above it; in pages `a/file.py: Class.method` has to be there, too."""
    sources = [
        path
        for folder in ("src", "tests", "benchmarks", "examples", "docs", "scripts", "deploy")
        for path in sorted((ROOT / folder).rglob("*.*"))
    ]
    by_tail = {}
    for path in sources:
        parts = path.relative_to(ROOT).parts
        for start in range(len(parts)):
            by_tail.setdefault("/".join(parts[start:]), []).append(path)
    history = {ROOT / "CHANGELOG.md"}
    lost = []
    for page in [
        *(set(PAGES) - history),
        *(path for path in sources if "src" in path.parts and path.suffix in (".py", ".c", ".h", ".cpp")),
    ]:
        for file, name in named_files(page.read_text()):
            holders = [path.read_text() for path in by_tail.get(file, ()) if name]
            known = [all(re.search(rf"\b{part}\b", text) for part in name.split(".")) for text in holders]
            if file not in by_tail or name and not any(known):
                lost.append(f"{page.relative_to(ROOT)}: {file} {name}")
    assert not lost, "\n".join(sorted(lost))


def test_the_file_finder_finds():
    text = "see `a/b.py: C.d`, a/e.h; https://x.org/a/f.py, github.com/a/g.py and models/NAME.py, a/Dockerfile.cpu"
    assert list(named_files(text)) == [("a/b.py", "C.d"), ("a/e.h", "")]


def test_the_cli_reference_is_up_to_date():
    assert (ROOT / "docs/cli.md").read_text() == reference.text(), "run: python -m zse.cli.reference > docs/cli.md"


def test_the_cli_reference_names_every_option():
    text = reference.text()
    for command in main.COMMANDS:
        section = text.partition(f"\n## zse {command}\n")[2].partition("\n## ")[0]
        for action in main.parser_of(command)._all_actions():
            for option in action.option_strings:
                assert option in ("-h", "--help") or f"{option}" in section, f"{command} {option}"


@pytest.mark.parametrize("name", NAMES)
def test_make_targets_exist(name):
    wanted = set(re.findall(r"(?:`|^ {4}|^\$ )make ([a-z]+)", (ROOT / name).read_text(), re.MULTILINE))
    makefile = ROOT / "Makefile"
    targets = set(re.findall(r"^([a-z-]+):", makefile.read_text(), re.MULTILINE)) if makefile.exists() else set()
    assert wanted <= targets, f"{name}: {wanted - targets}"


def test_readme_shows_the_two_commands_first():
    text = (ROOT / "README.md").read_text()
    assert 0 < text.index("make serve") < text.index("make test") < text.index("\n## ")


def test_pages_agree_on_kv_caches_of_8_bits():
    """They have run on an H200 (benchmarks/LOG.md); two pages said they had not, a third that they had."""
    for name in ("docs/devices.md", "docs/models.md"):
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert "--kv-dtype int8|fp8" in text and "ot yet run on GPU hardware" not in text
