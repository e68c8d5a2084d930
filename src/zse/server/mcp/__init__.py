"""Tools of others: a client of MCP servers (Model Context Protocol, revisions 2025-06-18 and 2025-03-26) that the operator
lists in the file of --mcp. Nothing of it is imported by a start without that option."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
