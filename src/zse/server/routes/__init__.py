"""The routes: every (method, path) of the server stands in table.py, with who may call it."""
