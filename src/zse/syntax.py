"""Python source as a tree, by one thread at a time."""

import ast
import warnings
from _thread import allocate_lock  # a start does without the module threading

# CPython counts how deep it is in a tree for all threads together: two that parse fail now and then (SystemError). What
# it may warn of is all threads', too.
_parsing = allocate_lock()


def parse(source: str) -> ast.Module:
    """ast.parse(), which raises what it does, without Python's warnings of what stands in the source."""
    with _parsing, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)
