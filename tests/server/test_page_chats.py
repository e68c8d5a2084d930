"""The web page's chats where the server keeps them: list, search, rename, delete, branches, two tabs, hostile titles and messages."""

import json
import os
from pathlib import Path

import pytest
from pages import LAST, ask, log_in, said
from test_stored_keys import bearer
from test_stored_responses import keys, path  # noqa: F401

TITLES = "[...document.querySelectorAll('.drawer.left .title')].map(e => e.innerText)"
HOSTILE = "<img src=x onerror=alert(1)>\u202e[x](javascript:alert(1))"


@pytest.fixture
def server(own_server, path, keys):  # noqa: F811
    return own_server(database=path)


@pytest.fixture
def me(keys):  # noqa: F811
    return bearer(keys[0])


@pytest.fixture
def tab(chromium, server, keys):  # noqa: F811
    """A reader with a key."""
    chromium.errors.clear()
    chromium.open(server.base + "/version")
    chromium.forget(server.base)
    log_in(chromium, server, keys[0])
    chromium.wait("document.querySelector('#question')")
    yield chromium
    assert not chromium.errors
    chromium.send("Page.navigate", url="about:blank")


def titles(tab, wanted: list[str]) -> None:
    tab.wait(
        f"JSON.stringify({TITLES}) === {json.dumps(json.dumps(wanted, ensure_ascii=False, separators=(',', ':')))}"
    )


def kept(server, me) -> dict[str, dict]:
    """Cards by title."""
    return {card["title"]: card for card in server.get("/v1/chats", me).json["data"]}


def wait_kept(server, me, tab, *wanted: str) -> None:
    """Until the server has these chats, and of the first the last answer, too."""
    for _ in range(200):
        cards = kept(server, me)
        if [*cards] == [*wanted]:
            last = server.get(f"/v1/chats/{cards[wanted[0]]['id']}", me).json["messages"][-1]
            if last.get("finish"):
                return
        tab.evaluate("new Promise(done => setTimeout(done, 20))")
    raise AssertionError([*kept(server, me)])


def choose(tab, title: str) -> None:
    tab.evaluate(
        f"[...document.querySelectorAll('.drawer.left .title')].find(e => e.innerText === {json.dumps(title)}).click()"
    )


def write(tab, selector: str, text: str) -> None:
    tab.wait(f"document.querySelector({json.dumps(selector)})")
    tab.evaluate(
        f"document.querySelector({json.dumps(selector)}).focus(); document.querySelector({json.dumps(selector)}).select?.()"
    )
    tab.type(text)


def shoot(tab, name: str) -> None:
    if folder := os.environ.get("ZSE_TEST_SCREENSHOTS"):
        for width, shape in ((1280, "wide"), (390, "narrow")):
            for dark in (False, True):
                tab.window(width, 800, dark=dark, phone=width < 500)
                is_list = name == "chats" and shape == "narrow" and dark  # one picture with the list open
                tab.evaluate(f"{json.dumps(is_list)} && document.querySelector('.narrow-only').click()")
                tab.evaluate("new Promise(done => setTimeout(done, 50))")
                tab.screenshot(Path(folder, f"{name}-{shape}-{'dark' if dark else 'light'}.png"))
        tab.window()


def test_chats_live_on_the_server(tab, server, me):
    ask(tab, "first question")
    tab.evaluate(f"[...{LAST}.querySelectorAll('button')].find(b => b.innerText === 'Regenerate').click()")
    tab.wait(f"{LAST}.querySelector('.branches')?.innerText.includes('2 / 2') && {LAST}.ariaBusy === 'false'")
    tab.click("[aria-label='Previous version']")
    tab.click(".drawer .primary")
    titles(tab, ["New chat", "first question"])
    ask(tab, "second question")
    wait_kept(server, me, tab, "second question", "first question")
    assert tab.evaluate("Object.keys(sessionStorage).concat(Object.keys(localStorage)).includes('zse.chats')") is False
    # In another window, with nothing of this one's: the last chat is there, the others come when they are opened.
    tab.send("Page.reload")
    tab.wait("document.querySelectorAll('.message').length === 2")
    titles(tab, ["second question", "first question"])
    assert said(tab) == "second question"
    choose(tab, "first question")
    tab.wait(f"{LAST}?.querySelector('.branches')?.innerText.includes('1 / 2')")  # the branch that was shown
    ask(tab, "and on")
    wait_kept(server, me, tab, "first question", "second question")
    roles = [
        node["role"]
        for node in server.get(f"/v1/chats/{kept(server, me)['first question']['id']}", me).json["messages"]
    ]
    assert roles == ["root", "user", "assistant", "assistant", "user", "assistant"]
    shoot(tab, "chats")
    # Renamed, searched, deleted.
    tab.click("[aria-label='Rename second question']")
    write(tab, "[aria-label='Title of the chat']", "Another 100% name")
    tab.press("Enter")
    titles(tab, ["first question", "Another 100% name"])
    tab.click("[aria-label='Rename first question']")
    write(tab, "[aria-label='Title of the chat']", "forgotten")
    tab.press("Escape")
    titles(tab, ["first question", "Another 100% name"])
    write(tab, "[type=search]", "ANOTHER")
    titles(tab, ["Another 100% name"])
    write(tab, "[type=search]", "nothing")
    tab.wait("document.querySelector('.drawer.left').innerText.includes('No chat has this')")
    tab.evaluate("document.querySelector('[type=search]').select()")
    tab.press("Backspace")
    titles(tab, ["first question", "Another 100% name"])
    tab.click("[aria-label='Delete first question']")
    titles(tab, ["Another 100% name"])
    tab.wait("document.querySelector('.message.user')?.innerText.includes('second question')")
    assert [*kept(server, me)] == ["Another 100% name"]


def test_two_tabs_lose_nothing(tab, server, me):
    ask(tab, "one")
    wait_kept(server, me, tab, "one")
    card = kept(server, me)["one"]
    other = {
        "version": card["version"],
        "messages": [{"parent": -1, "role": "root"}, {"parent": 0, "role": "user", "content": "theirs"}],
    }
    assert server.post(f"/v1/chats/{card['id']}", other, me).status == 200
    ask(tab, "two")
    tab.wait("document.querySelector('.notice')?.innerText.includes('kept as a copy')")
    wait_kept(server, me, tab, "one (copy)", "one")
    mine = server.get(f"/v1/chats/{kept(server, me)['one (copy)']['id']}", me).json["messages"]
    assert [node["content"] for node in mine] == ["", "one", "one", "two", "two"]
    assert server.get(f"/v1/chats/{card['id']}", me).json["messages"][1]["content"] == "theirs"
    # What others changed meanwhile is there when the reader comes back.
    choose(tab, "one")
    tab.wait("document.querySelector('.message.user')?.innerText.includes('theirs')")
    other["messages"][1]["content"] = "changed"
    assert server.post(f"/v1/chats/{card['id']}", other | {"version": card["version"] + 1}, me).status == 200
    tab.evaluate("dispatchEvent(new Event('focus'))")
    tab.wait("document.querySelector('.message.user')?.innerText.includes('changed')")


def test_more_come_as_the_list_is_scrolled(tab, server, me):
    for number in range(70):
        body = {"version": 0, "title": f"chat {number}", "messages": [{"parent": -1, "role": "root"}]}
        assert server.post(f"/v1/chats/c{number}", body, me).status == 200
    tab.send("Page.reload")
    tab.wait(f"{TITLES}.length === 30 && {TITLES}[0] === 'chat 69'")
    tab.evaluate("(e => { e.scrollTop = e.scrollHeight })(document.querySelector('.drawer.left'))")
    tab.wait(f"{TITLES}.length === 60")
    tab.evaluate(
        "[...document.querySelectorAll('.drawer.left button')].find(b => b.innerText === 'Older chats').click()"
    )
    tab.wait(f"{TITLES}.length === 70 && {TITLES}.at(-1) === 'chat 0'")
    assert "Older chats" not in tab.evaluate("document.querySelector('.drawer.left').innerText")


def test_hostile_words_stay_text(tab, server, me):
    calls = [{"id": "c", "name": HOSTILE, "arguments": HOSTILE}]
    messages = [
        {"parent": -1, "role": "root"},
        {"parent": 0, "role": "user", "content": HOSTILE},
        {
            "parent": 1,
            "role": "assistant",
            "content": HOSTILE,
            "reasoning": HOSTILE,
            "model": HOSTILE,
            "error": HOSTILE,
            "calls": calls,
        },
        {"parent": 2, "role": "tool", "content": HOSTILE, "name": HOSTILE, "call_id": HOSTILE},
    ]
    assert server.post("/v1/chats/h", {"version": 0, "title": HOSTILE, "messages": messages}, me).status == 200
    tab.send("Page.reload")
    tab.wait("document.querySelectorAll('.message').length === 3")
    found = tab.evaluate(
        "[document.querySelectorAll('#app img, #app script, [onerror]').length, "
        "[...document.querySelectorAll('#app a')].filter(a => !/^(https?:|mailto:|#)/.test(a.getAttribute('href'))).length, "
        "document.querySelector('.drawer.left .title').textContent, document.querySelector('#app').textContent]"
    )
    assert found[:2] == [0, 0] and found[2].startswith("<img src=x onerror") and "\u202e" not in found[3]
    shoot(tab, "hostile-chat")


def test_a_chat_that_cannot_be_kept_says_so(tab, server, monkeypatch):
    monkeypatch.setattr("zse.server.database.chats.MOST_BYTES", 100)
    ask(tab, "x" * 200)
    tab.wait("document.querySelector('.notice')?.innerText.includes('could not be kept')")


def test_without_a_database_the_browser_keeps_them(chromium, own_server):
    server = own_server(key="secret-key")
    chromium.errors.clear()
    log_in(chromium, server, "secret-key")
    chromium.wait("document.querySelector('#question')")
    ask(chromium, "one")
    chromium.send("Page.reload")
    chromium.wait("document.querySelectorAll('.message').length === 2")
    assert "one" in chromium.evaluate("sessionStorage.getItem('zse.chats')") and not chromium.errors
    chromium.evaluate("sessionStorage.clear()")
    chromium.send("Page.navigate", url="about:blank")
