"""Tools of MCP servers in the web page: switched on, confirmed, refused, allowed; shown with what they got and gave."""

import json
import os
import sys
from pathlib import Path

import mcp_server
from harness import Harness
from pages import LAST, ask, press_in, said
from servers import TEMPLATE


def calls(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_tools_are_chosen_confirmed_and_shown(chromium, tmp_path):
    entry = {"command": sys.executable, "args": [mcp_server.__file__], "allow": ["weather"]}
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"one": entry, "two": entry, "broken": {"command": "no-such"}}}))
    server = Harness(template=TEMPLATE, mcp=str(path))
    chromium.errors.clear()
    results = "[...document.querySelectorAll('.message.tool')].map(m => m.querySelector('pre').innerText)"
    question = f"{LAST}.querySelector('[role=group].tool-call')"
    try:
        chromium.window()
        chromium.open(server.base + "/")
        chromium.wait("document.querySelector('#question')")
        assert server.call(lambda: {one.state for one in server.app.mcp.by_label.values()}) == {"stopped"}
        press_in(chromium, "document", "Settings")
        chromium.wait("document.querySelector('.server-tools')")
        assert "no program" in chromium.evaluate("document.querySelector('.server-tools').innerText")
        chromium.evaluate("document.querySelector('.server-tools [value=one]').click()")
        if folder := os.environ.get("ZSE_TEST_SCREENSHOTS"):
            chromium.screenshot(Path(folder, "tools-settings.png"))

        ask(chromium, calls("say", text="<b>seen</b>"))  # not allowed: it is asked for
        chromium.wait(question)
        if folder:
            chromium.screenshot(Path(folder, "tools-question.png"))
        assert chromium.evaluate(results) == [] and "calls say" in chromium.evaluate(f"{LAST}.innerText")
        press_in(chromium, LAST, "Run")
        chromium.wait(f"{results}.length === 1 && {LAST}.ariaBusy === 'false'")
        assert chromium.evaluate(results) == ["user:<b>seen</b>"]  # text, not markup
        chromium.wait(f"{LAST}.innerText.includes('seen')")

        ask(chromium, calls("say", text="no"))
        press_in(chromium, LAST, "Refuse")
        chromium.wait(f"{results}.length === 2")
        assert chromium.evaluate(results)[1] == "The user refused this call."
        # The fake model repeats its question when it is refused; from now on that may run.
        chromium.wait(question)
        press_in(chromium, LAST, "Always allow in this chat")
        chromium.wait(f"{results}.length === 3 && {LAST}.ariaBusy === 'false' && !{question}")
        assert said(chromium) == "no"
        ask(chromium, calls("say", text="again"), wait=False)
        chromium.wait(f"{results}.length === 4 && {LAST}.ariaBusy === 'false'")
        assert said(chromium) == "again"

        # What the operator allows runs at once.
        ask(chromium, calls("weather", place="Rome"), wait=False)
        chromium.wait(f"{results}.length === 5 && {LAST}.ariaBusy === 'false'")
        assert "14 degrees in Rome" in chromium.evaluate(results)[4]
        press_in(chromium, "document", "New chat")
        ask(chromium, calls("say", text="x"))
        chromium.wait(question)  # another chat
        chromium.evaluate("location.reload()")
        chromium.wait(f"document.querySelector('#question') && {question}")  # nothing runs because a chat is opened
        assert chromium.evaluate(results) == []
        assert not chromium.errors
    finally:
        chromium.send("Page.navigate", url="about:blank")
        server.close()


def test_a_page_without_servers(page):
    press_in(page, "document", "Settings")
    page.wait("document.querySelector('form.settings')")
    assert not page.evaluate("document.querySelector('.server-tools')")
