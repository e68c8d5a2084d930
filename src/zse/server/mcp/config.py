"""The file of --mcp: the JSON that MCP clients share ({"mcpServers": {NAME: …}}), with bounds of ours."""

import ipaddress
import os
import re
import stat
from codecs import BOM_UTF8
from urllib.parse import urlsplit

import msgspec

from zse.errors import ConfigError, RequestError, one_line
from zse.sampling.fields import Array, Boolean, Custom, Field, Fields, Integer, Number, Object, OneOf, String, refused
from zse.server.keys import check_mode

MAX_FILE_BYTES, MAX_SERVERS, MAX_RESULT_BYTES = 1 << 20, 32, 1 << 20
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
EVERY = "*"  # in allow and deny: all tools
_HEADER, _VARIABLE = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}"), re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# What the transport itself writes.
_OWN_HEADERS = {"host", "content-length", "content-type", "accept", "connection", "transfer-encoding", "mcp-session-id"}


class McpServerConfig(msgspec.Struct, frozen=True):
    """One server. command: the program and its arguments, () for one that `url` reaches. allow: tools that may run unasked;
    deny: that nobody sees. timeout_s: of a call. max_result_bytes: of its text."""

    label: str
    command: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str = ""
    headers: dict[str, str] = {}
    allow_remote: bool = False
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    timeout_s: float = 60.0
    max_result_bytes: int = 64 << 10


def _pairs(names: re.Pattern, what: str) -> Custom:
    """An object of texts without line ends, whose names match."""

    def check(value: object, path: str) -> dict[str, str]:
        if type(value) is not dict:
            raise refused("invalid_type", f"'{path}' must be an object of strings.", path)
        for name, text in value.items():
            if not names.fullmatch(name):
                raise refused("invalid_value", f"'{path}': {one_line(name)[:64]!r} is no name of {what}.", path)
            if type(text) is not str or any(mark in text for mark in "\r\n\0"):
                raise refused("invalid_value", f"'{path}.{name}' must be a string without line ends.", path)
        return dict(value)

    return Custom(check, {"type": "object"})


def _text(value: object, path: str) -> str:
    text = String(1 << 16).check(value, path)
    if "\0" in text:
        raise refused("invalid_value", f"'{path}' holds a zero byte.", path)
    return text


_TEXT = Custom(_text, {})
_TOOL_NAMES = Array(String(64, empty=False), 256)
_FIELDS: Fields = {
    "type": Field(OneOf(("stdio", "http", "streamable-http", "streamableHttp"))),
    "command": Field(_TEXT),
    "args": Field(Array(_TEXT, 256)),
    "env": Field(_pairs(_VARIABLE, "a variable")),
    "cwd": Field(_TEXT),
    "url": Field(String(2048, empty=False)),
    "headers": Field(_pairs(_HEADER, "a header")),
    "allow_remote": Field(Boolean(), default=False),
    "allow": Field(_TOOL_NAMES, default=[]),
    "deny": Field(_TOOL_NAMES, default=[]),
    "timeout_s": Field(Number(0, 3600, above_low=True), default=60.0),
    "max_result_bytes": Field(Integer(1, MAX_RESULT_BYTES), default=64 << 10),
    "disabled": Field(Boolean(), default=False),
}


def read_file(path: str) -> tuple[McpServerConfig, ...]:
    """The servers of a file, but those that are disabled. Raises ConfigError, which never shows a value of env or
    headers."""
    try:
        with open(path, "rb") as file:
            state, data = os.fstat(file.fileno()), file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--mcp {path}: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"--mcp {path}: larger than {MAX_FILE_BYTES} bytes")
    if stat.S_ISREG(state.st_mode) and state.st_mode & 0o022:
        raise ConfigError(f"--mcp {path}: other users can change what is run here; run chmod go-w {path}")
    try:
        value = msgspec.json.decode(data.removeprefix(BOM_UTF8))
        fields = Object({"mcpServers": Field(Custom(lambda value, path: value, {}), required=True)}).check(value, "")
        listed = fields["mcpServers"]
        if type(listed) is not dict or len(listed) > MAX_SERVERS:
            raise refused("invalid_type", f"'mcpServers' must be an object of at most {MAX_SERVERS} servers.", "")
        servers = [_server(label, entry) for label, entry in listed.items()]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--mcp {path}: it is no JSON: {one_line(error)}") from None
    except RequestError as error:
        raise ConfigError(f"--mcp {path}: {error.message}") from None
    found = tuple(server for server in servers if server is not None)
    if any(server.env or server.headers for server in found):
        check_mode("--mcp", path, state)
    return found


def _server(label: str, value: object) -> McpServerConfig | None:
    path = f"mcpServers.{one_line(label)[:64]}"
    if not LABEL.fullmatch(label):
        raise refused("invalid_value", f"'{path}': a name has 1 to 32 letters, digits, '_' and '-'.", path)
    given = Object(_FIELDS).check(value, path)
    if (given["command"] is None) == (given["url"] is None):
        raise refused("invalid_value", f"'{path}' must have one of 'command' and 'url'.", path)
    is_stdio = given["command"] is not None
    foreign = ("url", "headers") if is_stdio else ("args", "env", "cwd")
    for name in foreign:
        if given[name]:
            raise refused("invalid_value", f"'{path}.{name}' says nothing beside the other kind of server.", path)
    if given["type"] is not None and (given["type"] == "stdio") != is_stdio:
        raise refused("invalid_value", f"'{path}.type' does not fit what else is there.", path)
    if not is_stdio:
        _check_url(given["url"], given["allow_remote"], f"{path}.url")
        taken = sorted(_OWN_HEADERS & {name.lower() for name in given["headers"] or ()})
        if taken:
            raise refused("invalid_value", f"'{path}.headers': {taken[0]} is written by the transport.", path)
    if given["disabled"]:
        return None
    return McpServerConfig(
        label,
        (given["command"], *(given["args"] or ())) if is_stdio else (),
        given["env"] or {},
        given["cwd"],
        given["url"] or "",
        given["headers"] or {},
        given["allow_remote"],
        tuple(given["allow"]),
        tuple(given["deny"]),
        given["timeout_s"],
        given["max_result_bytes"],
    )


def is_loopback(host: str) -> bool:
    """An address of this machine, or its name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_url(url: str, allow_remote: bool, path: str) -> None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", 0
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if (
        not is_plain
        or not host
        or port == 0
        or parts.scheme not in ("http", "https")
        or parts.fragment
        or "@" in parts.netloc
    ):
        raise refused("invalid_value", f"'{path}' must be http://HOST[:PORT]/PATH or https://…, without a user.", path)
    if not allow_remote and not is_loopback(host):
        message = f"'{path}': {host} is not this machine; set \"allow_remote\": true to let requests' data go there."
        raise refused("invalid_value", message, path)
