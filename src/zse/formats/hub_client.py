"""What a pull asks of a Hugging Face hub (https://huggingface.co/docs/hub/api): the files of a model and their bytes,
over HTTP by the standard library.

The settings are those of huggingface_hub: HF_ENDPOINT; HF_TOKEN, or the token that `hf auth login` left (HF_TOKEN_PATH,
HF_HOME); HF_HUB_OFFLINE. Proxies: HTTPS_PROXY, NO_PROXY. Certificates: REQUESTS_CA_BUNDLE or SSL_CERT_FILE, else the
system's, else pip's."""

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any
from urllib.parse import quote, urlsplit

from zse import __version__
from zse.errors import one_line

TIMEOUT_SECONDS = 30  # without one byte
BLOCK_BYTES = 1 << 18
_MOST_BYTES = 64 << 20  # of an answer in JSON: 10,000 files are 4 MB


class HubError(Exception):
    """Why the hub did not answer as asked. status: of its answer, 0 when none came or not all of it; code: the hub's
    own word for it (X-Error-Code): RepoNotFound, RevisionNotFound, EntryNotFound, GatedRepo."""

    def __init__(self, reason: object, status: int = 0, code: str = ""):
        super().__init__(one_line(str(reason).strip() or type(reason).__name__))
        self.status, self.code = status, code


class FileAnswer:
    """The hub's answer to a question for a file. status: 206 where it begins at the byte that was asked for, else
    200."""

    def __init__(self, response: http.client.HTTPResponse):
        self._response, self.status = response, response.status
        self.is_page = response.headers.get("Content-Type", "").startswith("text/html")

    def blocks(self) -> Iterator[bytes]:
        """The bytes. HubError when the connection ends before them."""
        while block := _read(self._response, BLOCK_BYTES):
            yield block
        if self._response.length:
            raise HubError(f"the connection ended {self._response.length} bytes too soon")


def model(repo: str, revision: str | None) -> dict[str, Any]:
    """What the hub says of a repository, with sizes and hashes of its files. HubError; ValueError for an answer that is
    not JSON."""
    tail = "" if revision is None else f"/revision/{quote(revision, safe='')}"
    with _ask(f"/api/models/{quote(repo)}{tail}?blobs=true") as response:
        data = b"".join(iter(lambda: _read(response, _MOST_BYTES), b""))
    try:
        answer = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(answer, dict):
        raise ValueError("no object")
    return answer


@contextmanager
def file(repo: str, commit: str, name: str, start: int) -> Iterator[FileAnswer]:
    """A file of a commit from byte `start` on, where the server can. HubError."""
    with _ask(f"/{quote(repo)}/resolve/{commit}/{quote(name)}", {"Range": f"bytes={start}-"}) as response:
        yield FileAnswer(response)


def _ask(path: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise HubError("HF_HUB_OFFLINE is set")
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(endpoint + path, headers={"User-Agent": f"zse/{__version__}", **(headers or {})})
    if token := _token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        return _opener().open(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            said = error.headers.get("X-Error-Message") or f"HTTP status {error.code} {error.reason}"
            raise HubError(said, error.code, error.headers.get("X-Error-Code", "")) from None
    except (OSError, http.client.HTTPException) as error:
        raise HubError(getattr(error, "reason", error)) from None


def _read(response: http.client.HTTPResponse, size: int) -> bytes:
    try:
        return response.read(size)
    except (OSError, http.client.HTTPException) as error:
        raise HubError(error) from None


def _token() -> str:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(name, "").strip():
            return token
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = os.environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    with (
        suppress(OSError),
        open(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token"), encoding="utf-8") as file,
    ):
        return file.read().strip()
    return ""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """The token goes to the hub and nowhere else: files come from other hosts, with an address that is signed."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        further = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if further is not None and token and urlsplit(newurl)[:2] == urlsplit(req.full_url)[:2]:
            further.add_unredirected_header("Authorization", token)
        return further


def _opener() -> urllib.request.OpenerDirector:
    """HTTP, HTTPS and proxies: a redirection leads to nothing else."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=_certificates()),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener


def _certificates() -> ssl.SSLContext:
    bundle, system = os.environ.get("REQUESTS_CA_BUNDLE") or None, ssl.get_default_verify_paths()
    if bundle is None and system.cafile is None and system.capath is None:
        with suppress(ImportError):
            bundle = import_module("pip._vendor.certifi").where()
    return ssl.create_default_context(cafile=bundle)
