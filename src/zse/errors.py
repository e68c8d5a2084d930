"""Errors that reach a user: one line that says what is wrong and what to do, an exit code, an API status."""

import sys


def one_line(text: object) -> str:
    """`text` on one line of printable characters: names come from files, and go to terminals and logs."""
    line = str(text)
    return line if line.isprintable() else line.encode("unicode_escape").decode("ascii")


def missing_package(error: ModuleNotFoundError) -> str | None:
    """What to do about an import of a package that this Python lacks; None for a module of zse's own, which is a
    bug."""
    name = (error.name or "").partition(".")[0]
    if name in ("", "zse", "zse_emulator"):
        return None
    if name in sys.stdlib_module_names:
        return f"Python {sys.version.split()[0]} at {sys.executable} was built without its module {name}: use another Python"
    return (
        f"the Python package {name} is not installed beside {sys.executable}: run `{sys.executable} -m pip install {name}`, "
        "or use the Python that zse was installed with; `zse doctor` lists what is missing"
    )


class ZSEError(Exception):
    """Base of every error that is shown to a user as one line. `exit_code` is the CLI's; `code` tells programs apart
    what they can act on ("out_of_memory": less beside it, and it fits)."""

    exit_code = 1
    code: str | None = ""


class FormatError(ZSEError):
    """A damaged or hostile file: which file, at which byte offset, which field, and why it is refused."""

    exit_code = 2

    def __init__(self, path, offset: int, field: str, reason: str):
        super().__init__(f"{one_line(path)}: offset {offset}: {one_line(field)}: {one_line(reason)}")
        self.path, self.offset, self.field, self.reason = str(path), offset, field, reason


class UnsupportedError(ZSEError):
    """Something this version does not know: names it and lists what is supported."""

    exit_code = 2

    def __init__(self, what: str, got: object, supported):
        names = ", ".join(str(name) for name in supported)
        super().__init__(f"{one_line(what)} {got!r} is not supported; supported: {names}")
        self.what, self.got, self.supported = what, got, tuple(supported)


class ConfigError(ZSEError):
    """An option or environment switch with a value that cannot be used."""

    exit_code = 2


class MemoryPlanError(ConfigError):
    """A model whose plan does not fit in the memory that is free."""

    code = "out_of_memory"


class ModelNotFoundError(ZSEError):
    """A model name that is neither in the catalog, nor in the store, nor a path."""

    exit_code = 2


class CompileError(ZSEError):
    """A kernel that does not compile; the message shows the author's line with a caret."""


class DeviceError(ZSEError):
    """A device call that failed: names the call and the code."""


class DeviceMemoryError(DeviceError):
    """An allocation for which the device has not enough memory."""

    code = "out_of_memory"


class DeviceLost(DeviceError):
    """The device failed in a way that this process cannot recover from: it must end, and may be started again."""

    exit_code = 75  # sysexits.h EX_TEMPFAIL


class GroupError(ZSEError):
    """The ranks of a group cannot go on together: one ended, is silent, or has another version or model."""

    exit_code = 75


class EngineError(ZSEError):
    """The engine process could not start, or died."""


class RequestError(ZSEError):
    """A request that is refused, in the terms of the API's error contract.

    status: HTTP status; type, code: strings of the contract's table; param: JSON path of the field or None. headers:
    more of the answer; close: the connection cannot be used after it."""

    headers: tuple[tuple[str, str], ...] = ()
    close = False

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.type, self.code, self.param = message, status, type, code, param
