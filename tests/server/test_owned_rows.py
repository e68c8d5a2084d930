"""Every statement on what tenants own names the tenant: all statements of the server's database and of the documents' are read and parsed."""

import ast
import re
from pathlib import Path

import pytest

import zse.rag
import zse.server.database
from zse.rag import schema
from zse.server.database.schema import MIGRATIONS

FOLDERS = [Path(package.__file__).parent for package in (zse.server.database, zse.rag)]
MADE = " ".join(sum((*MIGRATIONS, *schema.MIGRATIONS), ()))
TABLES = set(re.findall(r"CREATE (?:VIRTUAL )?TABLE (\w+)", MADE))
# Of the server, or of accounts, whose rows no client names.
SHARED = {"keys", "usage", "audit", "windows", "secrets"}
# Every word stands with its owner's number before it, and rows go by ids of chunks that were read by tenant; nothing else is asked of these.
WORDS = {
    "INSERT INTO words (rowid, text) VALUES (?, ?)",
    "DELETE FROM words WHERE rowid = ?",
    "SELECT doc, count(*) FROM postings WHERE term = ? GROUP BY doc LIMIT ?",
}
# What the server asks for itself: the next work, whoever's it is.
OWN = {
    "SELECT tenant, id, version, row, vector_model, num_embedded FROM documents"
    " WHERE num_chunks > 0 AND (vector_model <> ? OR num_embedded < num_chunks)"
    " ORDER BY tenant <= ?, tenant, row LIMIT 1"
}
# What clears rows away, whoever's they are.
GENERAL_CLEARS = {"DELETE FROM {} WHERE expires <= ?"}
# What the server does for all: files that have ended, contents that nobody has, batches that go on.
CLEARS = {"SELECT tenant, id FROM files WHERE expires <= ?", "SELECT id FROM files"}
CLEARS |= {"SELECT tenant, {} FROM batches WHERE ended = 0 ORDER BY created"}
# The statements of all tables of one kind, in which the table's name is put; who makes one of them for which table.
GENERAL, OWNER = "owned.py", re.compile(r"OwnedTable\(\s*\"(\w+)\"")
VERBS = re.compile(r"^(SELECT|UPDATE|DELETE|INSERT|REPLACE|WITH)\b")


def text_of(node: ast.AST) -> str | None:
    """A statement, with {} for what is put in; None: no statement."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    else:
        return None
    text = " ".join(text.split())
    return text if VERBS.match(text) else None


def statements(general: bool = False) -> list[str]:
    out = []
    for file in sorted(file for folder in FOLDERS for file in folder.glob("*.py")):
        if file.name != "schema.py" and (file.name == GENERAL) == general:
            nodes = list(ast.walk(ast.parse(file.read_text())))
            parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
            out += [text for node in nodes if node not in parts and (text := text_of(node))]
    return out


def problem(statement: str, general: bool = False) -> str:
    """What is wrong with it; "": nothing. general: it is one of GENERAL, so that its table need not stand in it."""
    tables = set(re.findall(r"\b(?:FROM|INTO|(?<!DO )UPDATE|JOIN) (\w+|\{\})", statement))
    if not tables or not tables <= TABLES | ({"{}"} if general else set()):
        return "its table does not stand in it"
    owned = tables - SHARED
    if not owned or statement in WORDS | OWN | (GENERAL_CLEARS if general else CLEARS):
        return ""
    if len(owned) > 1 or statement.count("SELECT") > 1 or re.search(r"\bOR\b", statement):
        return "more than one table, or OR"
    if statement.startswith("INSERT INTO"):
        return "" if re.search(r"\(tenant\b", statement) and "ON CONFLICT" not in statement else "no tenant"
    return "" if re.search(r"\bWHERE tenant = \?", statement) else "no tenant = ?"


def test_every_statement_names_the_tenant():
    found, general = statements(), statements(general=True)
    assert len(found) > 20 and len(general) >= 7 and TABLES > SHARED
    assert {statement: text for statement in found if (text := problem(statement))} == {}
    assert {statement: text for statement in general if (text := problem(statement, general=True))} == {}
    assert set(found) >= WORDS | OWN and set(general) >= GENERAL_CLEARS
    made = {name for folder in FOLDERS for file in folder.glob("*.py") for name in OWNER.findall(file.read_text())}
    assert made <= TABLES - SHARED
    for table in TABLES - SHARED - {"postings", "stored"} - made:
        assert sum(table in statement for statement in found) >= 2


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT body FROM responses WHERE id = ?",
        "SELECT body FROM responses WHERE id = ? AND tenant = 'a'",
        "SELECT body FROM responses WHERE tenant = ? OR id = ?",
        "DELETE FROM responses WHERE id = ?",
        "UPDATE responses SET body = ? WHERE id = ?",
        "INSERT INTO responses (id, body) VALUES (?, ?)",
        "SELECT body FROM {} WHERE tenant = ?",
        "SELECT text FROM chunks WHERE document = ?",
        "SELECT doc FROM postings WHERE term LIKE ?",
        "SELECT rowid FROM words WHERE words MATCH ?",
        "SELECT keys.id FROM keys JOIN responses ON tenant = tenant",
    ],
)
def test_those_that_do_not_are_found(statement):
    assert problem(statement)
    assert problem(statement, general=True) or "{}" in statement


@pytest.mark.parametrize("statement", ["SELECT {} FROM {} WHERE id = ?", "DELETE FROM {} WHERE id = ?"])
def test_general_ones_that_do_not_are_found(statement):
    assert problem(statement, general=True)
