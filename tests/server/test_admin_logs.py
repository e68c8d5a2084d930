"""GET /admin/logs: levels, times, searches, bounds, a live tail; no prompt, no key."""

import json
import logging
import time

import pytest
from harness import request, wait_for
from pages import log_in
from test_page_chats import shoot

from zse.log import MOST_CHARACTERS, RecentRecords
from zse.server.keys import OWNER, Key

OWNERS = {"authorization": "Bearer admin-key"}
PATH = "/admin/logs"
HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[2J"


@pytest.fixture
def log():
    """The log of a server that zse serve started."""
    logger = logging.getLogger("zse")
    before = logger.level
    logger.setLevel(logging.INFO)
    yield logger
    logger.setLevel(before)


@pytest.fixture
def server(own_server, log):
    server = own_server(key=(Key("owner", "admin-key", access=OWNER), Key("tenant", "user-key")))
    server.app.logs.attach()
    yield server
    log.removeHandler(server.app.logs)


def listed(server, query: str = "") -> list[dict]:
    return server.get(f"{PATH}?{query}", OWNERS).json["data"]


def test_records_are_found(server, log):
    headers = {"authorization": "Bearer user-key"}
    reply = server.post("/v1/completions", {"prompt": "a secret prompt", "max_tokens": 4}, headers)
    id = reply.headers["x-request-id"]
    wait_for(lambda: listed(server, f"search={id}"))  # written behind the answer
    log.warning("a warning of %s", HOSTILE)
    try:
        raise ValueError(7)
    except ValueError:
        log.exception("it %s", "broke")
    found = listed(server)
    access, (warning, error) = listed(server, f"search={id}")[0], listed(server, "level=warning")
    assert (access["request_id"], access["status"], access["tenant"]) == (id, 200, "tenant")
    assert access["path"] == "/v1/completions" and access["duration_ms"] > 0 and access["time"].endswith("Z")
    assert warning["message"] == "a warning of <img src=x onerror=alert(1)>\\u202e\\x1b[2J"
    assert "ValueError: 7" in error["exception"] and error["level"] == "error"
    text = json.dumps(found)
    assert "secret" not in text and "user-key" not in text and "admin-key" not in text
    assert [record["level"] for record in listed(server, "level=warning")] == ["warning", "error"]
    assert [record["message"] for record in listed(server, "level=error")] == ["it broke"]
    assert [record["request_id"] for record in listed(server, f"search={id.upper()}")][:1] == [id]
    assert [record["level"] for record in listed(server, f"after={warning['id']}&level=warning")] == ["error"]
    last = listed(server, "limit=2")
    assert len(last) == 2 and last[0]["id"] + 1 == last[1]["id"] > warning["id"]
    assert listed(server, f"since={int(time.time()) + 3600}") == []
    for query, param in (("level=loud", "level"), ("limit=0", "limit"), ("since=x", "since"), ("stream=1", "stream")):
        assert server.get(f"{PATH}?{query}", OWNERS).error["param"] == param
    assert server.get(PATH, headers).status == 403 and server.get(PATH).status == 401


def test_texts_and_numbers_are_bounded(log):
    records = RecentRecords(3)
    records.attach()
    try:
        for number in range(5):
            log.info("%d %s", number, "x" * 5000)
        found = list(records.newest_first(0))
        assert [record.message[0] for record in found] == ["4", "3", "2"]
        assert {len(record.message) for record in found} == {MOST_CHARACTERS}
        assert [record.id for record in records.newest_first(4)] == [5]
    finally:
        log.removeHandler(records)


def events(sock, until: str) -> list[dict]:
    data = b""
    while until.encode() not in data:
        piece = sock.recv(1 << 16)
        assert piece, data
        data += piece
    return [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]


def test_a_tail_ends_with_its_key_and_its_server(server, log):
    with server.connect() as first, server.connect() as second:
        for sock in (first, second):
            sock.sendall(request("GET", f"{PATH}?stream=true&level=warning", None, OWNERS))
        assert b"text/event-stream" in first.recv(1 << 12)
        log.info("not this")
        log.warning("this one")
        assert [record["message"] for record in events(first, "this one")] == ["this one"]
        assert [record["message"] for record in events(second, "this one")] == ["this one"]
        second.close()  # a client that leaves
        wait_for(lambda: server.state()["connections"] == 1)
        server.call(lambda: server.app.replace_keys([Key("tenant", "user-key")], {}))
        assert events(first, '"invalid_api_key"')[-1]["error"]["code"] == "invalid_api_key"
        server.call(lambda: server.app.replace_keys([Key("owner", "admin-key", access=OWNER)], {}))
    with server.connect() as sock:
        sock.sendall(request("GET", f"{PATH}?stream=true&level=error", None, OWNERS))
        assert b"text/event-stream" in sock.recv(1 << 12)
        server.app.draining = True
        events(sock, "[DONE]")
        server.app.draining = False
    server.assert_quiet()


def test_the_page_shows_them(chromium, server, log):
    chromium.open(server.base + "/version")
    chromium.errors.clear()  # those of a page that was open, whose server may be gone, too
    chromium.forget(server.base)
    log_in(chromium, server, "admin-key")
    log.error("it broke: %s", HOSTILE)
    chromium.evaluate("location.hash = 'logs'")
    rows = "[...document.querySelectorAll('tbody tr')].map(row => row.innerText)"
    chromium.wait(f"{rows}.some(row => row.includes('it broke'))")
    assert chromium.evaluate("document.querySelectorAll('#app img').length") == 0
    assert "\u202e" not in chromium.evaluate("document.querySelector('#app').textContent")
    log.warning("one more, live")
    chromium.wait(f"{rows}[0]?.includes('one more, live')")
    server.post("/v1/completions", {"prompt": "x"}, {"authorization": "Bearer user-key"})
    chromium.wait(f"{rows}.some(row => row.includes('/v1/completions') && row.includes('200'))")
    shoot(chromium, "logs")
    chromium.evaluate(
        "(e => { e.value = 'error'; e.dispatchEvent(new Event('change', {bubbles: true})) })(document.querySelector('[name=level]'))"
    )
    chromium.wait(f"{rows}.length === 1 && {rows}[0].includes('it broke')")
    chromium.evaluate("[...document.querySelectorAll('button')].find(b => b.innerText === 'Pause').click()")
    chromium.wait("[...document.querySelectorAll('button')].some(b => b.innerText === 'Go on')")
    log.error("while it pauses")
    assert chromium.evaluate(f"{rows}.length") == 1
    chromium.evaluate("[...document.querySelectorAll('button')].find(b => b.innerText === 'Go on').click()")
    chromium.wait(f"{rows}[0]?.includes('while it pauses')")
    chromium.send("Page.navigate", url="about:blank")
    assert not chromium.errors
