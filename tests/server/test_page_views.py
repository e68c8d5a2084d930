"""The views of the web page in headless Chromium: sizes, colours, keyboard, dashboard, models, keys, playground, login."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser import SHIFT
from pages import LAST, ask, log_in, press_in, row
from test_admin_models import Store

from zse.server.keys import OWNER, Key

VIEWS = ("chat", "documents", "dashboard", "models", "keys", "logs", "playground")


# Views, sizes, colours

CONTRAST = """((pairs) => {
    const probe = document.body.appendChild(document.createElement('i'));
    const light = (name) => {
        probe.style.color = `var(--${name})`;
        const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
        const [r, g, b] = parts.map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = pairs.map(([one, other]) => {
        const [low, high] = [light(one), light(other)].sort((x, y) => x - y);
        return (high + 0.05) / (low + 0.05);
    });
    probe.remove();
    return found;
})"""
PAIRS = [(text, back) for text in ("text", "dim", "accent", "bad", "good") for back in ("back", "soft")] + [
    ("on-accent", "accent")
]


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out(page, dark):
    """WCAG 2.1's 4.5 for text."""
    page.window(dark=dark)
    found = page.evaluate(f"{CONTRAST}({json.dumps(PAIRS)})")
    assert {pair: ratio for pair, ratio in zip(PAIRS, found, strict=True) if ratio < 4.5} == {}
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.evaluate(
        "(e => { e.value = 'dark'; e.dispatchEvent(new Event('change', {bubbles: true})) })(document.querySelector('.theme select'))"
    )
    assert (page.evaluate("getComputedStyle(document.body).backgroundColor") == back) is dark


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_every_view_fits(page, width):
    """No view is wider than its window. ZSE_TEST_SCREENSHOTS=FOLDER keeps pictures of them."""
    text = (
        "# A heading\n\nText `code` "
        + "long " * 60
        + "\n\n```\n"
        + "x" * 300
        + "\n```\n\n|a|b|c|d|e|f|\n|-|-|-|-|-|-|\n"
    )
    ask(page, text + "|" + "some cell |" * 6 + "\n\n$$" + "a + b + " * 30 + "c$$\n\n" + "y" * 200)
    page.window(width, 800, phone=width < 500)
    folder = os.environ.get("ZSE_TEST_SCREENSHOTS")
    for view in VIEWS:
        page.evaluate(f"location.hash = '{view}'")
        page.wait(f"document.querySelector('nav [aria-current]')?.hash === '#{view}'")
        time.sleep(0.1)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        over = page.evaluate(
            "[...document.querySelectorAll('#main button, #main input, #main select')].filter(e => e.offsetParent && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)"
        )
        assert not over, view
        for dark in (False, True) if folder else ():
            page.window(width, 800, dark=dark, phone=width < 500)
            page.screenshot(Path(folder or "", f"{view}-{width}-{'dark' if dark else 'light'}.png"))


def test_the_keyboard_suffices(page):
    assert page.focused() == "Message"
    page.type("One")
    page.press("Enter", SHIFT)
    page.type("two")
    page.press("Enter")
    page.wait(f"{LAST} && {LAST}.ariaBusy === 'false'")
    assert page.evaluate("document.querySelector('.message.user .plain').textContent") == "One\ntwo"
    page.evaluate("document.activeElement.blur()")
    seen = []
    for _ in range(40):
        page.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            if seen:
                break  # once around
            continue
        name = page.focused()
        seen.append(name)
        assert page.evaluate(
            "document.activeElement.matches(':focus-visible') && getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        ), name
    assert seen[0] == "To the content"
    for name in (
        "Chat",
        "Dashboard",
        "Models",
        "Playground",
        "New chat",
        "Settings",
        "Copy",
        "Regenerate",
        "Edit",
        "Message",
    ):
        assert name in seen, (name, seen)
    while page.focused() != "Playground":
        page.press("Tab")
    page.press("Enter")
    page.wait("document.querySelector('h1')?.innerText === 'Playground'")


def test_the_dashboard_has_numbers(page):
    ask(page, "some tokens")
    page.evaluate("location.hash = 'dashboard'")
    page.wait("document.querySelectorAll('.chart').length === 5 && document.querySelector('.totals')")
    page.evaluate("location.hash = 'chat'")
    page.wait("document.querySelector('#question')")
    page.evaluate("location.hash = 'dashboard'")
    page.wait("document.querySelector('.totals')")
    ask_again = "fetch('/v1/completions', {method: 'POST', headers: {'content-type': 'application/json'}, body: '{\"prompt\": \"abc\"}'}).then(r => r.status)"
    assert page.evaluate(ask_again) == 200
    page.wait("[...document.querySelectorAll('.chart')].every(c => c.querySelector('path').getAttribute('d'))", 8)
    text = page.evaluate("document.querySelector('.view').innerText")
    assert "KV pages in use" in text and re.search(r"weights 1\.0 MiB", text) and re.search(r"p50 [\d.,]+ ms", text)


def test_readings(lab):
    """Rates, quantiles and bounds of two texts of /metrics."""
    found = lab.evaluate(
        r"""(async () => {
        const { Reading, rate, quantile, shownBytes } = await import('/page/metrics.js');
        const { ceiling } = await import('/page/chart.js');
        const text = (n) => `# TYPE c counter\nc{model="a\\"b"} ${10 * n}\nc{model="x"} 1\nt_bucket{model="x",le="0.1"} 0\n` +
            `t_bucket{model="x",le="0.2"} ${n}\nt_bucket{model="x",le="+Inf"} ${n}\nzse_engine_pages 100\nzse_engine_free_pages 75\n`;
        const [one, two] = [new Reading(text(0), 0), new Reading(text(4), 2)];
        return [rate(one, two, 'c'), rate(one, two, 'c', 'a"b'), rate(two, one, 'c'), quantile(one, two, 't', 0.5), quantile(one, one, 't', 0.5),
            two.kvUse(), ceiling(0), ceiling(3), ceiling(50), shownBytes(3 * 2 ** 20), shownBytes(0)];
    })()"""
    )
    assert found == [20, 20, 0, pytest.approx(0.15), None, 0.25, 1, 5, 50, "3.0 MiB", "0 B"]


def test_the_playground_s_code_runs(page, tool_server):
    page.evaluate("location.hash = 'playground'")
    page.wait("document.querySelector('.playground [name=body]')")
    body = {"model": "fake", "messages": [{"role": "user", "content": 'it\'s "a" \\ test \u00e9'}], "max_tokens": 64}
    page.evaluate("document.querySelector('[name=body]').select()")
    page.type(json.dumps(body, ensure_ascii=False))
    page.evaluate("document.querySelector('form button.primary').click()")
    page.wait("document.querySelector('[aria-live] h2')?.innerText.startsWith('200')")
    page.wait("[...document.querySelectorAll('pre')].at(-1).innerText.includes('test é')")
    answers = []
    for name, command in (("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])):
        page.evaluate(f"[...document.querySelectorAll('.tabs button')].find(b => b.innerText === '{name}').click()")
        page.wait(f"document.querySelector('.tabs [aria-pressed=true]').innerText === '{name}'")
        code = page.evaluate("document.querySelector('section pre').textContent")
        done = subprocess.run(
            [*command, code], capture_output=True, text=True, timeout=20, env=os.environ | {"ZSE_API_KEY": "none"}
        )
        if name == "curl" and done.returncode == 127:
            continue  # no curl on this machine
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout)["choices"][0]["message"]["content"])
    assert set(answers) == {body["messages"][0]["content"]}
    page.evaluate("document.querySelector('[name=body]').select()")
    page.type("{")
    page.wait("document.querySelector('.error')?.innerText.includes('not valid JSON')")


def test_keys_are_made_changed_and_revoked(chromium, own_server, tmp_path):
    server = own_server(key="owner", database=str(tmp_path / "server.db"))
    log_in(chromium, server, "owner")
    chromium.evaluate("location.hash = 'keys'")
    press_in(chromium, "document", "New key")
    chromium.wait("document.activeElement.name === 'name'")
    chromium.type("phone <b>")
    chromium.press("Enter")  # the browser holds the form to the name's pattern
    assert chromium.evaluate("document.querySelector('.key-form [name=name]').validity.patternMismatch")
    chromium.evaluate("document.querySelector('.key-form [name=name]').select()")
    chromium.type("phone")
    chromium.evaluate("document.querySelector('.key-form [name=rpm]').focus()")
    chromium.type("50")
    chromium.evaluate("document.querySelector('.key-form [name=expires]').value = '2090-01-02T03:04'")
    chromium.click(".key-form [name=models]")
    chromium.press("Enter")
    chromium.wait("document.querySelector('.secret')")
    text = chromium.evaluate("document.querySelector('.secret').innerText")
    assert server.get("/v1/models", {"authorization": f"Bearer {text}"}).status == 200
    press_in(chromium, "document", "Done")
    chromium.wait(f"!document.querySelector('.secret') && {row('phone')}.innerText.includes('50 rpm')")
    (stored,) = server.get("/admin/keys", {"authorization": "Bearer owner"}).json["data"]
    assert (stored["rpm"], stored["models"], stored["admin"], stored["tpm"]) == (50, ["fake"], False, 0)
    assert stored["expires"] > 3_700_000_000 and text not in chromium.evaluate("document.body.innerText")
    press_in(chromium, row("phone"), "Change")
    chromium.wait("document.querySelector('.key-form [name=rpm]')?.value === '50'")
    chromium.evaluate("document.querySelector('.key-form [name=rpm]').value = ''")
    chromium.click(".key-form [name=models]")
    press_in(chromium, "document.querySelector('.key-form')", "Save")
    chromium.wait(f"{row('phone')}.innerText.includes('all models')")
    (stored,) = server.get("/admin/keys", {"authorization": "Bearer owner"}).json["data"]
    assert (stored["rpm"], stored["models"]) == (0, None) and stored["expires"] > 3_700_000_000
    assert server.post("/v1/completions", {"prompt": "abc"}, {"authorization": f"Bearer {text}"}).status == 200
    press_in(chromium, row("phone"), "Revoke")
    assert server.get("/v1/models", {"authorization": f"Bearer {text}"}).status == 200  # asked first
    press_in(chromium, row("phone"), "Revoke, really")
    chromium.wait(f"{row('phone')}.innerText.includes('revoked')")
    assert server.get("/v1/models", {"authorization": f"Bearer {text}"}).status == 401
    chromium.wait(
        "[...document.querySelectorAll('[aria-label=Usage] tr')].some(row => /phone\\s+fake\\s+1\\s+0/.test(row.innerText))"
    )
    chromium.wait("[...document.querySelectorAll('[aria-label=Changes] tr')].length === 4")
    if folder := os.environ.get("ZSE_TEST_SCREENSHOTS"):
        press_in(chromium, "document", "New key")
        chromium.screenshot(Path(folder, "keys-wide.png"))
        chromium.window(390, 844, dark=True, phone=True)
        chromium.screenshot(Path(folder, "keys-narrow.png"))
    chromium.evaluate("sessionStorage.clear()")
    assert not chromium.errors


def test_models_come_and_go(chromium):
    models = {"one": "", "two": "--load-ms 600 --max-context 64", "three": "--fatal broken"}
    server = Store(models)
    try:
        chromium.window()
        chromium.open(server.base + "/#models")
        chromium.wait(f"{row('two')}?.innerText.includes('Serve')")
        press_in(chromium, row("two"), "Serve")
        chromium.wait(f"{row('two')}.innerText.includes('unloaded')")
        press_in(chromium, row("two"), "Load")
        chromium.wait(f"{row('two')}.querySelector('progress')")
        chromium.wait(f"{row('two')}.innerText.includes('3.0 MiB')")
        assert chromium.evaluate(f"{row('two')}.innerText").split()[:4] == ["two", "loaded", "0", "64"]
        press_in(chromium, row("two"), "Unload")
        chromium.wait(f"{row('two')}.innerText.includes('unloaded')")
        press_in(chromium, row("three"), "Serve")
        press_in(chromium, row("three"), "Load")
        chromium.wait("document.querySelector('.error')?.innerText.includes('broken')")
        chromium.evaluate("location.hash = 'chat'")
        chromium.wait("document.querySelector('[name=model]')?.options.length === 3")
        chromium.evaluate("location.hash = 'models'")
        press_in(chromium, row("two"), "Remove")
        press_in(chromium, row("two"), "Remove, really")
        chromium.wait(f"{row('two')}.innerText.includes('Serve')")
        assert set(server.cards()) == {"one", "three"} and not chromium.errors
        chromium.screenshot(
            Path(os.environ["ZSE_TEST_SCREENSHOTS"], "models-wide.png")
        ) if "ZSE_TEST_SCREENSHOTS" in os.environ else None
    finally:
        chromium.send("Page.navigate", url="about:blank")
        server.close()


def test_a_model_is_pulled(chromium):
    server = Store({"one": "", "hf:org/two": ""})
    server.app.library.step_s = 0.4
    try:
        chromium.window()
        chromium.open(server.base + "/#models")
        chromium.wait("document.querySelector('[name=name]')")
        chromium.evaluate("document.querySelector('[name=name]').focus()")
        chromium.type("hf:org/two")
        chromium.press("Enter")
        pulled = "[...document.querySelectorAll('[aria-label=Pulls] tr')].at(-1)"
        chromium.wait(f"/downloading, \\d+ B of 300 B/.test({pulled}?.innerText)")
        chromium.wait(f"{pulled}.querySelector('progress').value > 0")
        chromium.wait(f"{pulled}.innerText.includes('stored')")
        chromium.wait("document.querySelector('[aria-label=Models]').innerText.includes('hf:org/two')")
        assert "hf:org/two" in server.cards()
        chromium.evaluate("document.querySelector('[name=name]').focus()")
        chromium.type("gone")
        chromium.press("Enter")
        chromium.wait(
            "document.querySelector('[role=alert]')?.innerText === 'gone: the hub cannot be reached: Connection refused'"
        )
        if folder := os.environ.get("ZSE_TEST_SCREENSHOTS"):
            chromium.screenshot(Path(folder, "pulls-wide.png"))
            chromium.window(390, 844, phone=True)
            chromium.screenshot(Path(folder, "pulls-narrow.png"))
        assert not chromium.errors
    finally:
        chromium.send("Page.navigate", url="about:blank")
        server.close()


def test_a_server_without_a_database_of_keys(page):
    page.evaluate("location.hash = 'keys'")
    page.wait("document.querySelector('.error')?.innerText.includes('start it with --database')")


def test_login(chromium, own_server):
    server = own_server(key=(Key("a", "right-key"), Key("w", "admin-key", access=OWNER)))
    chromium.window()
    chromium.open(server.base + "/")
    chromium.wait("document.querySelector('[name=key]')")
    assert "ZSE" in chromium.evaluate("document.body.innerText") and "fake" not in chromium.evaluate(
        "document.body.innerText"
    )
    assert chromium.focused() == "key"
    chromium.type("wrong-key")
    chromium.press("Enter")
    chromium.wait("document.querySelector('.error')?.innerText.includes('valid API key')")
    chromium.evaluate("document.querySelector('[name=key]').select()")
    chromium.type("right-key")
    chromium.press("Enter")
    chromium.wait("document.querySelector('#question')")
    ask(chromium, "secret question")
    # The key and the chat live in this tab; no cookie, nothing that the next reader of this browser would find.
    assert (
        chromium.evaluate("document.cookie") == ""
        and chromium.evaluate("sessionStorage.getItem('zse.key')") == "right-key"
    )
    assert "secret" not in chromium.evaluate("JSON.stringify(localStorage)") and "key" not in chromium.evaluate(
        "JSON.stringify(localStorage)"
    )
    assert "key" not in chromium.evaluate("location.href")
    chromium.evaluate("location.hash = 'dashboard'")
    chromium.wait('document.body.innerText.includes("needs an admin\'s key")')
    chromium.evaluate("[...document.querySelectorAll('button')].find(b => b.innerText === 'Log out').click()")
    chromium.wait("document.querySelector('[name=key]')")
    assert chromium.evaluate("sessionStorage.length") == 0
    chromium.type("admin-key")
    chromium.press("Enter")
    chromium.wait("document.querySelector('#question')")
    assert chromium.evaluate("document.querySelectorAll('.message').length") == 0
    chromium.evaluate("location.hash = 'dashboard'")
    chromium.wait("document.querySelectorAll('.chart').length === 5")
    chromium.evaluate("sessionStorage.clear()")
    assert not chromium.errors
