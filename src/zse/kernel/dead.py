"""Drop variables that nothing reads: staging leaves some behind where a static folded the code that used them."""

from collections import Counter
from collections.abc import Iterator

import zse.kernel.ir as ir

DEFINITIONS = (ir.Declare, ir.Assign, ir.LocalArray)


def walk(body: list[ir.Stmt]) -> Iterator[ir.Stmt]:
    """Every statement, inner ones included."""
    for stmt in body:
        yield stmt
        if stmt.blocks:
            for block in ir.blocks(stmt):
                yield from walk(block)


def reads_of(stmt: ir.Stmt) -> list[str]:
    """Names of the variables that a statement itself reads, with repetitions."""
    names: list[str] = []
    todo = list(ir.expressions(stmt))
    while todo:
        expr = todo.pop()
        if isinstance(expr, ir.Var):
            names.append(expr.name)
        elif not isinstance(expr, ir.Const):
            todo += ir.children(expr)
    return names


def _without(body: list[ir.Stmt], dead: set[str]) -> list[ir.Stmt]:
    kept = [stmt for stmt in body if not (isinstance(stmt, DEFINITIONS) and stmt.var.name in dead)]
    for stmt in kept:
        for block in ir.blocks(stmt):
            block[:] = _without(block, dead)
    return kept


def remove_dead_variables(function: ir.Function, reads: Counter[str]) -> ir.Function:
    """Expressions have no side effects, so an unread variable and what computes it can go, and what only they read.
    reads: how often each is read, of ir.verify()."""
    definitions: dict[str, list[ir.Stmt]] = {}
    for stmt in walk(function.body):
        if isinstance(stmt, DEFINITIONS):
            definitions.setdefault(stmt.var.name, []).append(stmt)
    todo = [name for name in definitions if not reads[name]]
    dead = set(todo)
    while todo:
        freed = Counter(name for stmt in definitions[todo.pop()] for name in reads_of(stmt))
        reads.subtract(freed)
        found = [name for name in freed if name in definitions and not reads[name] and name not in dead]
        todo += found
        dead.update(found)
    return ir.Function(function.symbol, function.params, _without(function.body, dead), function.origin)
