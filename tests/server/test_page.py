"""The chat of the web page in headless Chromium."""

import json
import re

import pytest
from harness import wait_for
from pages import LAST, ask, said
from test_anthropic import CALL


@pytest.mark.timed
def test_the_first_paint(page, tool_server):
    page.open(tool_server.base + "/")
    page.wait("performance.getEntriesByName('first-contentful-paint').length")
    assert page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") < 1000
    weight = page.evaluate(
        "performance.getEntriesByType('resource').reduce((sum, { decodedBodySize }) => sum + decodedBodySize, 0)"
    )
    assert 0 < weight <= 250_000 + 100_000  # and the document of the API, which gives the settings their names


def test_a_chat_with_branches(page):
    ask(page, "One **two**")
    assert said(page) == "One two" and page.evaluate(f"{LAST}.querySelector('strong').innerText") == "two"
    assert re.search(r"\d+ tokens · .*first after \d+ ms", page.evaluate(f"{LAST}.innerText"))
    page.evaluate(f"[...{LAST}.querySelectorAll('button')].find(b => b.innerText === 'Regenerate').click()")
    page.wait(f"{LAST}.querySelector('.branches')?.innerText.includes('2 / 2')")
    page.wait(f"{LAST}.ariaBusy === 'false'")
    page.click("[aria-label='Previous version']")
    page.wait(f"{LAST}.querySelector('.branches').innerText.includes('1 / 2')")
    ask(page, "Three")
    # Another question in the place of the first one: a branch that holds no later message.
    page.evaluate("[...document.querySelectorAll('.message.user button')].find(b => b.innerText === 'Edit').click()")
    page.wait("document.querySelector('.editor textarea')")
    page.evaluate("document.querySelector('.editor textarea').select()")
    page.type("Four")
    page.press("Enter")
    page.wait(f"{LAST}.innerText.includes('Four') && {LAST}.ariaBusy === 'false'")
    assert page.evaluate("document.querySelectorAll('.message').length") == 2
    page.click(".message.user [aria-label='Previous version']")
    page.wait("document.querySelectorAll('.message').length === 4")
    # Kept by the browser, since this server has no keys.
    page.send("Page.reload")
    page.wait("document.querySelectorAll('.message').length === 4")
    page.click("[aria-label^='Delete']")
    page.wait("document.querySelectorAll('.message').length === 0")


def test_stop_ends_the_answer_and_its_work(page, tool_server):
    ask(page, "!tokens=5000 !ms=20", wait=False)
    page.wait(f"{LAST}.innerText.includes('abc')")
    page.press("Escape")
    page.wait(f"{LAST}.innerText.includes('stopped')")
    assert said(page).startswith("abc") and len(said(page)) < 2000
    wait_for(lambda: tool_server.state()["requests"] == tool_server.state()["engine_rows"] == 0)
    ask(page, "again")  # what was stopped is a part of the conversation
    assert said(page) == "again"


def test_reasoning_is_folded(page):
    ask(page, "<think>a secret</think>the answer")
    assert said(page) == "the answer"
    assert page.evaluate(f"{LAST}.querySelector('details').open") is False
    assert "a secret" in page.evaluate(f"{LAST}.querySelector('details').textContent")


def setting(page, name: str, text: str) -> None:
    page.wait(f"document.querySelector('.settings [name={name}]')")
    page.evaluate(f"document.querySelector('.settings [name={name}]').select()")
    page.type(text)


def last_request(page) -> dict:
    return json.loads(page.evaluate("localStorage.getItem('zse.request')"))


def test_settings_go_into_the_request(page):
    page.evaluate("[...document.querySelectorAll('button')].find(b => b.innerText === 'Settings').click()")
    setting(page, "temperature", "0.5")
    setting(page, "max_tokens", "3")
    setting(page, "system", "Be brief.")
    setting(page, "stop", "END\nSTOP")
    ask(page, "abcdef")
    assert said(page) == "abc" and "cut at max tokens" in page.evaluate(f"{LAST}.innerText")
    sent = last_request(page)
    assert (sent["temperature"], sent["max_tokens"], sent["stop"]) == (0.5, 3, ["END", "STOP"])
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    setting(page, "schema", "[1]")
    ask_refused = "The schema must be a JSON schema, an object."
    page.evaluate("document.querySelector('#question').focus()")
    page.type("more")
    page.press("Enter")
    page.wait(f"document.querySelector('.notice')?.innerText.includes({json.dumps(ask_refused)})")
    assert page.evaluate("document.querySelector('#question').value") == "more"
    setting(page, "schema", '{"type": "object"}')
    page.evaluate("document.querySelector('#question').focus()")
    page.press("Enter")
    page.wait("document.querySelectorAll('.message.assistant').length === 2")
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert last_request(page)["response_format"] == schema
    page.wait(f"{LAST}.ariaBusy === 'false'")


def test_tool_calls_are_shown_and_answered(page):
    tool = {"name": "weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}
    page.evaluate("[...document.querySelectorAll('button')].find(b => b.innerText === 'Settings').click()")
    setting(page, "tools", json.dumps([tool]))
    ask(page, CALL)
    assert page.evaluate(f"{LAST}.querySelector('pre').innerText") == json.dumps({"place": "Rome"}, indent=2)
    assert "calls weather" in page.evaluate(f"{LAST}.innerText")
    page.evaluate("document.querySelector('.results textarea').focus()")
    page.type("sunny")
    page.evaluate("document.querySelector('.results button').click()")
    page.wait("document.querySelectorAll('.message.assistant').length === 2")
    page.wait(f"{LAST}.ariaBusy === 'false'")
    sent = last_request(page)["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[2] == {"role": "tool", "content": "sunny", "tool_call_id": sent[1]["tool_calls"][0]["id"]}
    assert last_request(page)["tools"] == [{"type": "function", "function": tool}]


def test_an_error_is_a_line(page):
    ask(page, "!nan=0")
    assert "not finite" in page.evaluate(f"{LAST}.querySelector('.error').innerText")
    ask(page, "fine")
    assert said(page) == "fine"
    assert len(last_request(page)["messages"]) == 2  # the answer that failed is not sent back


def test_what_was_kept_and_is_broken_can_be_forgotten(page, tool_server):
    # The last to write: what the page itself keeps is behind.
    page.evaluate("addEventListener('pagehide', () => localStorage.setItem('zse.chats', '7'))")
    page.send("Page.reload")
    page.wait("document.querySelector('.error')?.innerText.includes('This page failed')")
    page.click("main button")
    page.wait("document.querySelector('#question')")


def test_a_model_that_sees_nothing_gets_no_images(page):
    page.evaluate(
        """(() => { const data = new DataTransfer(); data.items.add(new File(['x'], 'a.png', {type: 'image/png'}));
        document.querySelector('#question').dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true})) })()"""
    )
    page.wait("document.querySelector('.notice')?.innerText.includes('Images are not sent')")
    assert not page.evaluate("document.querySelector('.composer [type=file]')")
