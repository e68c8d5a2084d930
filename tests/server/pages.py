"""What the tests of the web page share: a browser, a server over the fake engine, which repeats the last message (what a reader writes is what the
model says), and what a reader does."""

import json
import os

import pytest
from browser import Browser, program

LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory, tool_server):
    """One browser for a module's tests, closed before the server looks for what is left. Without one they are left out;
    ZSE_REQUIRE_CHROMIUM=1 makes that a failure."""
    if program() is None:
        missing = "chromium is not installed"
        pytest.fail(missing) if os.environ.get("ZSE_REQUIRE_CHROMIUM") == "1" else pytest.skip(missing)
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture
def page(chromium, tool_server):
    """The chat of a reader who was never here. Behind each test: nothing failed, nothing was asked of another place."""
    chromium.window()
    chromium.errors.clear()
    chromium.requests.clear()
    # Of the same origin, and nothing that keeps what it shows when it is left.
    chromium.open(tool_server.base + "/version")
    chromium.forget(tool_server.base)
    chromium.open(tool_server.base + "/")
    chromium.wait("document.querySelector('#question')")
    chromium.evaluate(
        "window.refused = []; addEventListener('securitypolicyviolation', e => refused.push(e.violatedDirective)); 0"
    )
    yield chromium
    assert not chromium.errors
    elsewhere = [url for url in chromium.requests if not url.startswith((tool_server.base, "about:"))]
    assert not elsewhere
    assert chromium.evaluate("window.refused ?? []") == []


@pytest.fixture
def lab(chromium, tool_server):
    """A tab that has the page's modules: what was open before stays."""
    chromium.errors.clear()
    if not chromium.evaluate("location.href").startswith(tool_server.base):
        chromium.open(tool_server.base + "/")
    yield chromium
    assert not chromium.errors


def ask(page, text: str, wait: bool = True) -> None:
    """Sends a message; with `wait` until its answer has ended."""
    count = page.evaluate("document.querySelectorAll('.message.assistant').length")
    page.evaluate("document.querySelector('#question').focus()")
    page.type(text)
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.message.assistant').length === {count + 1}")
    if wait:
        page.wait(f"{LAST}.ariaBusy === 'false'")


def said(page) -> str:
    return page.evaluate(f"{LAST}.querySelector(':scope > .markdown')?.innerText ?? ''")


def shown(page, text: str, name: str = "Markdown") -> str:
    """The markup that a text becomes."""
    return page.evaluate(
        f"""(async () => {{
        const [{{ render }}, {{ html }}, {{ Markdown }}] =
            await Promise.all(['vendor/preact', 'html', 'markdown'].map((name) => import(`/page/${{name}}.js`)));
        const place = document.createElement('div');
        render(html`<${{Markdown}} text=${{{json.dumps(text)}}} />`, place);
        return place.firstElementChild.innerHTML;
    }})()"""
    )


def log_in(chromium, server, key: str) -> None:
    chromium.window()
    chromium.open(server.base + "/")
    chromium.wait("document.querySelector('[name=key]')")
    chromium.type(key)
    chromium.press("Enter")
    chromium.wait("document.querySelector('nav')")


def row(name: str) -> str:
    """The line of a table that begins so."""
    return f"[...document.querySelectorAll('tr')].find(row => row.innerText.startsWith({json.dumps(name)}))"


def press_in(chromium, within: str, label: str) -> None:
    found = f"[...({within}?.querySelectorAll('button') ?? [])].find(b => b.innerText === {json.dumps(label)})"
    chromium.wait(found)
    chromium.evaluate(f"{found}.click()")
