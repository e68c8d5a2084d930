"""The hub's client: where the token goes, whose certificates and proxies, answers that are no answers."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from zse.formats import hub_client, huggingface


class Server:
    """answer(path) → (status, headers, body, Content-Length). asked: (host, path, token) of every request."""

    def __init__(self, answer):
        self.asked = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.asked.append((self.headers["Host"], self.path, self.headers["Authorization"]))
                status, headers, body, length = answer(self.path)
                self.send_response(status)
                for name, value in {"Content-Length": str(length), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """A server that answers as told, and is the hub unless another one was made before."""
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    made = []

    def make(answer, hub=True):
        made.append(Server(answer))
        if hub:
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{made[-1].port}/")
        return made[-1]

    yield make
    for server in made:
        server.http.shutdown()
        server.http.server_close()


def whole(status, body=b"{}", **headers):
    return status, headers, body, len(body)


def read(name="f", start=0):
    with hub_client.file("org/name", "c0ffee", name, start) as answer:
        return answer.status, b"".join(answer.blocks())


def test_the_token_goes_to_the_hub_alone(serve, monkeypatch, tmp_path):
    files = serve(lambda path: whole(200, b"weights"), hub=False)
    targets = {
        "/org/name/resolve/c0ffee/f": "/other",  # a repository that was renamed
        "/other": f"http://127.0.0.1:{files.port}/signed",
    }
    hub = serve(lambda path: whole(302, b"", Location=targets[path]))
    (tmp_path / "token").write_text("hf_kept\n")
    assert read() == (200, b"weights")
    assert [(path, token) for _, path, token in hub.asked] == [
        ("/org/name/resolve/c0ffee/f", "Bearer hf_kept"),
        ("/other", "Bearer hf_kept"),
    ]
    assert [(path, token) for _, path, token in files.asked] == [("/signed", None)]
    monkeypatch.setenv("HF_TOKEN", "hf_given")
    read()
    assert hub.asked[-1][2] == "Bearer hf_given"


def test_a_redirection_leads_to_http_alone(serve, tmp_path):
    (tmp_path / "secret").write_text("secret")
    for place in (f"file://{tmp_path}/secret", "ftp://127.0.0.1/secret", "data:,secret"):
        serve(lambda path, place=place: whole(302, b"", Location=place))
        with pytest.raises(hub_client.HubError):
            read()


def test_a_connection_that_ends_too_soon_is_told(serve):
    serve(lambda path: (200, {}, b"four", 10))
    with pytest.raises(hub_client.HubError, match="ended 6 bytes too soon|IncompleteRead") as caught:
        read()
    assert caught.value.status == 0


def test_the_hub_s_own_words(serve):
    serve(lambda path: whole(404, b"", **{"X-Error-Code": "EntryNotFound", "X-Error-Message": "no\x1b[31m such file"}))
    with pytest.raises(hub_client.HubError) as caught:
        read()
    assert (str(caught.value), caught.value.status, caught.value.code) == (
        "no\\x1b[31m such file",
        404,
        "EntryNotFound",
    )
    serve(lambda path: whole(503))
    with pytest.raises(hub_client.HubError, match="HTTP status 503"):
        hub_client.model("org/name", None)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{", b"\xff"])
def test_an_answer_that_is_no_model_is_a_value_error(serve, body):
    serve(lambda path: whole(200, body))
    with pytest.raises(ValueError):
        hub_client.model("org/name", "a/b")


@pytest.mark.parametrize(
    "sibling", [{}, {"rfilename": "f", "blobId": "../../x"}, {"rfilename": "f", "lfs": {"sha256": 5}}, 5]
)
def test_a_file_s_record_is_checked(sibling):
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        huggingface._records({"siblings": [sibling]})


def test_names_are_quoted(serve):
    hub = serve(lambda path: whole(200))
    hub_client.model("org/name", "refs/pr/1")
    read("a b?.json")
    assert [path for _, path, _ in hub.asked] == [
        "/api/models/org/name/revision/refs%2Fpr%2F1?blobs=true",
        "/org/name/resolve/c0ffee/a%20b%3F.json",
    ]


def test_offline_and_proxies(serve, monkeypatch):
    proxy = serve(lambda path: whole(200, b"through"), hub=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
    assert read() == (200, b"through")
    assert proxy.asked[0][:2] == ("hub.invalid", "http://hub.invalid/org/name/resolve/c0ffee/f")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(hub_client.HubError, match="HF_HUB_OFFLINE"):
        read()


def test_certificates(monkeypatch, tmp_path):
    """Of the file that is named; where the system has none, pip's."""
    asked = []
    monkeypatch.setattr(hub_client.ssl, "create_default_context", lambda cafile: asked.append(cafile))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "mine.pem")
    hub_client._certificates()
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")

    class Paths:
        cafile, capath = None, str(tmp_path)

    monkeypatch.setattr(hub_client.ssl, "get_default_verify_paths", lambda: Paths)
    hub_client._certificates()
    Paths.capath = None
    hub_client._certificates()
    assert asked[:2] == ["mine.pem", None] and asked[2].endswith("cacert.pem")
