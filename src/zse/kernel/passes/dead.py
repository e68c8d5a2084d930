"""Drop variables that nothing reads: staging leaves some behind where a static folded the code that used them."""

from collections.abc import Iterator

from zse.kernel import ir


def _reads(expr: ir.Expr) -> Iterator[str]:
    if isinstance(expr, ir.Var):
        yield expr.name
    for child in ir.children(expr):
        yield from _reads(child)


def all_reads(body: list[ir.Stmt]) -> Iterator[str]:
    """Names of the variables that these statements read, with repetitions."""
    for stmt in body:
        for expr in ir.expressions(stmt):
            yield from _reads(expr)
        for block in ir.blocks(stmt):
            yield from all_reads(block)


def _without(body: list[ir.Stmt], used: set[str]) -> tuple[list[ir.Stmt], bool]:
    kept: list[ir.Stmt] = []
    changed = False
    for stmt in body:
        if isinstance(stmt, ir.Declare | ir.Assign | ir.LocalArray) and stmt.var.name not in used:
            changed = True
            continue
        for block in ir.blocks(stmt):
            block[:], inner = _without(block, used)
            changed = changed or inner
        kept.append(stmt)
    return kept, changed


def remove_dead_variables(function: ir.Function) -> ir.Function:
    """Expressions have no side effects, so an unread variable and what computes it can go; repeated until nothing changes."""
    body, changed = function.body, True
    while changed:
        body, changed = _without(body, set(all_reads(body)))
    return ir.Function(function.symbol, function.params, body, function.origin)
