"""What `make test` leaves to `make test-rest`: no value of a parameter, no test that does not say so, and nothing that neither runs."""

from types import SimpleNamespace

import pytest
from breadth import combinations


def item(test: str, marks=("each",), args=(), **params):
    found = SimpleNamespace(nodeid=f"{test}[{params}]", callspec=SimpleNamespace(params=params))
    found.get_closest_marker = lambda name: SimpleNamespace(args=args) if name in marks else None
    return found


@pytest.mark.parametrize("args", [(), ("b",), ("a", "b")])
def test_every_value_runs_once(args):
    items = [item("t", args=args, a=a, b=b) for a in range(4) for b in "xyz"]
    items += [item("u", args=args, a=9, b="x")]
    left = combinations(items)
    ran = [each.callspec.params for each in items if each not in left]
    for name in args or ("a", "b"):
        for test in "tu":
            of_test = [each.callspec.params[name] for each in items if each.nodeid.startswith(test)]
            assert {*of_test} <= {params[name] for params in ran}
    assert len(ran) == (3 if args == ("b",) else 4 + 3 - 1) + 1, "no more than are needed"


def test_others_are_not_touched():
    items = [item("t", (), a=1), item("t", (), a=1), item("u", a=1), item("u", ("each", "exhaustive"), a=1)]
    plain = SimpleNamespace(nodeid="v", get_closest_marker=lambda name: SimpleNamespace(args=()))
    assert combinations([*items, plain]) == []


def test_what_does_not_run_does_not_count():
    """A case that is left out for another reason has shown no value."""
    first, second = item("t", ("each", "exhaustive"), a=1), item("t", a=1)
    assert combinations([first, second]) == [] and combinations([second, first, item("t", a=1)]) != []
