"""--cors-origin: which pages of other origins may use the API from a browser, and what their preflights are told."""

import pytest
from harness import chat_body, request
from test_lifecycle import Process

from zse.errors import ConfigError
from zse.server.cross_origin import CrossOrigin, read_origins
from zse.server.keys import Key, Quota

CHAT, PAGE = "/v1/chat/completions", "https://app.example"
KEY = "sk-of-the-page"


def headers_of(reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control") or name == "vary"}


def send(server, method, path, headers):
    return server.raw(request(method, path, None, headers))


def preflight(server, path, origin, method="POST", **headers):
    asked = {"origin": origin, "access-control-request-method": method} | headers
    return send(server, "OPTIONS", path, asked)


@pytest.fixture
def shared(own_server):
    def make(*origins, **options):
        server = own_server(**options)
        server.app.cross_origin = CrossOrigin(frozenset(origins))
        return server

    return make


def test_nothing_is_said_without_the_option(server):
    reply = send(server, "GET", "/v1/models", {"origin": PAGE})
    assert reply.status == 200 and headers_of(reply) == {}
    assert preflight(server, CHAT, PAGE).status == 405


def test_pages_of_a_named_origin(shared):
    server = shared(PAGE, key=KEY)
    wanted = "authorization, content-type, x-stainless-lang"
    reply = preflight(server, CHAT, PAGE, **{"access-control-request-headers": wanted})
    assert reply.status == 200 and reply.body == b""
    assert headers_of(reply) == {
        "access-control-allow-origin": PAGE,
        "access-control-allow-methods": "POST",
        "access-control-allow-headers": wanted,
        "access-control-max-age": "600",
        "vary": "origin",
    }
    assert preflight(server, "/v1/responses/x", PAGE).headers["access-control-allow-methods"] == "GET, DELETE"
    odd = preflight(server, CHAT, PAGE, **{"access-control-request-headers": "a b; c"})
    assert "access-control-allow-headers" not in odd.headers
    local = preflight(server, CHAT, PAGE, **{"access-control-request-private-network": "true"})
    assert local.headers["access-control-allow-private-network"] == "true"
    # Answers: whole, streamed, and refused.
    bearer = {"origin": PAGE, "authorization": f"Bearer {KEY}"}
    for headers, status in ((bearer, 200), ({"origin": PAGE}, 401)):
        reply = send(server, "GET", "/v1/models", headers)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in reply.headers
    streamed = server.post(CHAT, chat_body("a", stream=True, max_tokens=2), bearer)
    assert streamed.status == 200 and streamed.headers["access-control-allow-origin"] == PAGE
    # Others, and what is no page's question.
    for origin in ("https://app.example.evil", "http://app.example", "null"):
        assert preflight(server, CHAT, origin).status in (401, 405)
        assert headers_of(send(server, "GET", "/v1/models", {"origin": origin})) == {}
    assert send(server, "OPTIONS", CHAT, {"origin": PAGE}).status in (401, 405)
    assert preflight(server, "/v1/nothing", PAGE).status == 404


def test_every_origin_with_keys_and_no_admin_without(shared):
    server = shared("*", key=KEY)
    reply = preflight(server, "/admin/keys", PAGE)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, PAGE)
    server = shared(PAGE)
    assert preflight(server, "/v1/models", PAGE, "GET").status == 200
    assert preflight(server, "/admin/keys", PAGE).status == 405
    assert headers_of(send(server, "GET", "/admin/models", {"origin": PAGE})) == {}


def test_a_quota_leaves_the_headers_alone(shared):
    server = shared(PAGE, key=(Key("page", KEY, quota=Quota(rpm=100)),))
    reply = send(server, "GET", "/v1/models", {"origin": PAGE, "authorization": f"Bearer {KEY}"})
    assert reply.headers["access-control-allow-origin"] == PAGE and reply.headers["x-ratelimit-limit-requests"] == "100"


@pytest.mark.parametrize("given", ["app.example", "https://app.example/", "https://app.example/page", "HTTPS://A", ""])
def test_what_is_no_origin_is_refused(given):
    with pytest.raises(ConfigError, match="is no origin; write https://name"):
        read_origins([given], True)
    assert read_origins(["https://a.b:8443", "http://[::1]:3000", "*"], True) == {
        "https://a.b:8443",
        "http://[::1]:3000",
        "*",
    }


def test_the_option(tmp_path):
    environment = {"ZSE_HOME": str(tmp_path)}
    refused = Process("--cors-origin", "*", wait=False, env=environment).finish()
    assert refused[0] == 2 and "--cors-origin '*' without keys" in refused[1] and "Traceback" not in refused[1]
    process = Process("--cors-origin", PAGE, env=environment)
    with process.send(request("GET", "/v1/models", None, {"origin": PAGE})) as sock:
        assert b"access-control-allow-origin: https://app.example" in sock.recv(4096)
    process.popen.terminate()
    assert process.finish()[0] == 0


def test_a_form_of_a_page(shared, tmp_path):
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--b\r\n'
    form += b'Content-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nhello\r\n--b--\r\n'
    server = shared(PAGE, database=str(tmp_path / "server.db"), key=KEY)
    headers = {"content-type": "multipart/form-data; boundary=b", "authorization": f"Bearer {KEY}"}
    for origin, status in ((PAGE, 200), ("https://other.example", 403)):
        assert server.post("/v1/files", form, headers | {"origin": origin}).status == status
