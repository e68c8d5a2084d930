"""The size of the house: lines, long files and functions, names that stand for two things. Each bound only goes down."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

from zse.syntax import parse

SOURCE = Path(__file__).parents[1] / "src" / "zse"
MAX_LINES = 133_830
MAX_FILE, MAX_FUNCTION = 500, 80
# How many are longer, and how many names of public classes stand in two modules. The aim is none.
LONGER_FILES, LONGER_FUNCTIONS, DOUBLE_NAMES = 0, 0, 0


def sources(*endings: str) -> list[Path]:
    return sorted(p for p in SOURCE.rglob("*") if p.suffix in endings and "_native" not in p.parts)


def length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def public_classes(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def test_the_house_grows_no_more():
    total = sum(length(path) for path in sources(".py", ".c", ".h", ".cpp"))
    assert total <= MAX_LINES


def test_no_file_is_long():
    found = [
        f"{path.relative_to(SOURCE)}: {length(path)}"
        for path in sources(".py", ".c", ".h", ".cpp")
        if length(path) > MAX_FILE
    ]
    assert len(found) <= LONGER_FILES, "\n".join(found)


def test_no_function_is_long():
    found = [
        f"{path.relative_to(SOURCE)}:{line} {name}: {lines}"
        for path in sources(".py")
        for name, line, lines in functions(parse(path.read_text(encoding="utf-8")))
        if lines > MAX_FUNCTION
    ]
    assert len(found) <= LONGER_FUNCTIONS, "\n".join(found)


def test_a_name_stands_for_one_thing():
    texts = {path: path.read_text(encoding="utf-8") for path in sources(".py")}
    # Lines that look like one tell which modules to parse.
    names = Counter(name for text in texts.values() for name in set(re.findall(r"(?m)^class ([A-Za-z]\w*)", text)))
    twice = {name for name, count in names.items() if count > 1}
    places = defaultdict(list)
    for path, text in texts.items():
        for name in public_classes(parse(text)) if any(f"class {name}" in text for name in twice) else ():
            places[name].append(str(path.relative_to(SOURCE)))
    found = {name: where for name, where in places.items() if len(where) > 1}
    assert len(found) <= DOUBLE_NAMES, "\n".join(f"{name}: {', '.join(where)}" for name, where in found.items())


def test_long_functions_and_double_names_are_found():
    long = parse("def f():\n" + "    x = 1\n" * 80)
    assert list(functions(long)) == [("f", 1, 81)]
    assert public_classes(parse("class A: pass\nclass _B: pass\n")) == ["A"]


def test_test_modules_have_names_of_their_own():
    """pytest imports a module of a folder without __init__.py by its name alone: two of one name end the collection."""
    folders = [
        path.parent for path in Path(__file__).parent.rglob("test_*.py") if not (path.parent / "__init__.py").exists()
    ]
    names = Counter(path.name for folder in set(folders) for path in folder.glob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]
