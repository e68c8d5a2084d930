"""What the commands that talk to a server share: which one, with which key, and its answers."""

import json
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from urllib.parse import quote, urlsplit

from zse import env
from zse.cli.parser import option
from zse.errors import ConfigError, ZSEError
from zse.server import presence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

SERVER = option("--server", "URL", "its address (default: the server of this user that runs here)")
KEY = option("--api-key", "KEY", "an admin's key, where the server asks for one (default: ZSE_API_KEY)")
SILENT_S = 3600.0  # a load may take long and says nothing unless it is streamed


class RemoteServer:
    """A server at an address, with the key that it is to be shown. needs: what to say of a key that may not."""

    def __init__(self, url: str, key: str | None, needs: str = "an admin's key"):
        self.url, self._key, self._needs = url.rstrip("/"), key or env.get("ZSE_API_KEY"), needs

    def ask(self, method: str, path: str, body: dict | None = None) -> dict:
        """The JSON of the answer. Raises ZSEError with what the server says against it."""
        with self._answer(method, path, body) as answer:
            return json.loads(answer.read())

    def upload(self, path: str, file: "BinaryIO", size: int) -> dict:
        """The JSON of the answer to a file that is the body. Raises ZSEError."""
        with self._answer("POST", path, file, size) as answer:
            return json.loads(answer.read())

    def follow(self, path: str, body: dict, show: "Callable[[dict], None]") -> dict:
        """The last event of a stream, each of which is shown. Raises ZSEError."""
        last: dict = {}
        with self._answer("POST", path, body | {"stream": True}) as answer:
            for line in answer:
                if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]":
                    last = json.loads(line[6:])
                    if "error" in last:
                        raise ZSEError(_said(last))
                    show(last)
        return last

    @contextmanager
    def _answer(self, method: str, path: str, body: "dict | BinaryIO | None", size: int = 0):
        """path: with a query that is encoded already. size: of a file."""
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"--server {self.url}: give an address such as http://127.0.0.1:8000")
        connection = HTTPConnection(parts.hostname, parts.port or 80, timeout=SILENT_S)
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        sent: Any = body
        if isinstance(body, dict):
            headers["content-type"], sent = "application/json", json.dumps(body)
        elif body is not None:
            headers |= {"content-type": "application/octet-stream", "content-length": str(size)}
        try:
            path, mark, query = path.partition("?")
            connection.request(method, parts.path + quote(path) + mark + query, sent, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                try:
                    said = _said(json.loads(answer.read()))
                except ValueError:
                    said = f"HTTP status {answer.status}"
                hint = f"; give {self._needs}: --api-key or ZSE_API_KEY" if answer.status in (401, 403) else ""
                raise ZSEError(f"{self.url}: {said.rstrip('.')}{hint}")
            yield answer
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, ZSEError):
                raise
            raise ZSEError(f"{self.url}: {error or type(error).__name__}") from None
        finally:
            connection.close()


def _said(body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error or "no server of ours answers there")


def server_of(args, needs: str = "an admin's key") -> RemoteServer:
    """The one that --server names, or the only one that runs. Raises ConfigError."""
    if args.server is not None:
        return RemoteServer(args.server, args.api_key, needs)
    found = [server["url"] for server in presence.running()]
    if not found:
        raise ConfigError("no server of this user runs here; start one with `zse serve`, or name one with --server URL")
    if len(found) > 1:
        raise ConfigError(f"several servers run here: {', '.join(found)}; name one with --server URL")
    return RemoteServer(found[0], args.api_key, needs)
