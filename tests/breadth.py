"""Which cases of a grid `make test` runs, and which it leaves to `make test-rest`."""


def combinations(items: list) -> list:
    """The items of tests marked `each` of whose parameters (those that the mark names, or all) each value stood in a case before.

    What is not in the list has every value at least once, such as each family, each scheme and each architecture; the list has what is
    left of their combinations. Cases marked `exhaustive` count for neither."""
    found, seen = [], set()
    for item in items:
        mark, callspec = item.get_closest_marker("each"), getattr(item, "callspec", None)
        if mark is None or callspec is None or item.get_closest_marker("exhaustive"):
            continue
        test = item.nodeid.partition("[")[0]
        values = {(test, name, repr(callspec.params[name])) for name in mark.args or callspec.params}
        if values <= seen:
            found.append(item)
        seen |= values
    return found
