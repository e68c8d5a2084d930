"""The web page in headless Chromium, over the fake engine, which repeats the last message: what a reader writes is what the model says."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser import SHIFT, Browser, program
from harness import Harness, wait_for
from servers import TEMPLATE
from test_admin_models import Store
from test_anthropic import CALL

from zse.server.keys import OWNER, Key

LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)"
VIEWS = ("chat", "dashboard", "models", "keys", "playground")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory, tool_server):
    """One browser for all tests, closed before the server looks for what is left. Without one they are left out; ZSE_REQUIRE_CHROMIUM=1 makes that a failure."""
    if program() is None:
        missing = "chromium is not installed"
        pytest.fail(missing) if os.environ.get("ZSE_REQUIRE_CHROMIUM") == "1" else pytest.skip(missing)
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def tool_server():
    harness = Harness(template=TEMPLATE)
    yield harness
    harness.assert_quiet()
    harness.close()


@pytest.fixture
def page(chromium, tool_server):
    """The chat of a reader who was never here. Behind each test: nothing failed, nothing was asked of another place."""
    chromium.window()
    chromium.errors.clear()
    chromium.requests.clear()
    chromium.open(tool_server.base + "/")
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


def test_images_are_refused(page):
    page.evaluate(
        """(() => { const data = new DataTransfer(); data.items.add(new File(['x'], 'a.png', {type: 'image/png'}));
        document.querySelector('#question').dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true})) })()"""
    )
    page.wait("document.querySelector('.notice')?.innerText.includes('Images are not sent')")


# Hostile output

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload='window.hacked = 1'><iframe srcdoc='<script>parent.hacked=1</script>'></iframe></svg>",
    "<style>body { display: none }</style><link rel=stylesheet href=//evil.example/x.css><base href=//evil.example>",
    "[a](javascript:window.hacked=1) [b](JaVaScRiPt:window.hacked=1) [c](java\tscript:window.hacked=1) [d](&#106;avascript:1)",
    "[e](data:text/html,<script>window.hacked=1</script>) [f](vbscript:1) [g](//evil.example) [h](/metrics) [i](file:///etc/passwd)",
    "![x](https://evil.example/beacon.png) ![y](javascript:1)",
    '<javascript:window.hacked=1> <https://ok.example/"onmouseover=window.hacked=1>',
    "| a |\n|---|\n| <img src=x onerror=window.hacked=1> |",
    "```html\n<script>window.hacked = 1</script>\n```",
    "`<script>window.hacked = 1</script>` **<b onclick=window.hacked=1>x</b>**",
    "$\\text{<script>window.hacked=1</script>} \\href{javascript:window.hacked=1}{x} \\unicode{<img src=x onerror=window.hacked=1>}$",
    "[x]: javascript:window.hacked=1\n\n[x]",
    '```" onclick="window.hacked=1\nx\n```',
    "constructor __proto__ toString $\\constructor \\__proto__ \\toString \\begin{constructor} x \\end{constructor}$",
    '{"constructor": null, "type": "script"}',
]
TAGS = (
    "script,img,svg,iframe,object,embed,style,link,base,form,video,audio,[onclick],[onerror],[onload],[style],[srcdoc]"
)


def test_hostile_output_is_inert(page):
    ask(page, "\n\n".join(HOSTILE))
    assert page.evaluate("window.hacked") is None
    assert page.evaluate(f"{LAST}.querySelectorAll('.markdown').length") == 1
    assert page.evaluate(f"{LAST}.querySelector('.markdown').querySelectorAll({json.dumps(TAGS)}).length") == 0
    links = page.evaluate(f"[...{LAST}.querySelectorAll('a')].map(a => [a.protocol, a.rel, a.target])")
    assert links and {tuple(link) for link in links} == {("https:", "noopener noreferrer nofollow", "_blank")}
    assert "(evil.example)" in said(page)  # where an image lies is said, and not asked
    assert page.evaluate("getComputedStyle(document.body).display") != "none"
    # The same as a question, in the title of the chat, and by parts as a stream brings it.
    assert page.evaluate("document.querySelector('#app').querySelectorAll('.drawer img, .drawer script').length") == 0
    for text in HOSTILE:
        for end in range(0, len(text), 7):
            shown(page, text[:end])
    assert page.evaluate("window.hacked") is None


def test_direction_controls_are_made_visible(lab):
    text = "access \u202eresu\u202c level `\u2066x\u2069`\n\n```\nif a\u202e:\n```\n\n[\u202egro.live](https://evil.example/)"
    markup = shown(lab, text)
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", markup)
    assert markup.count("U+202E") == 3 and markup.count("U+2066") == 1
    assert "<bdi>" in markup and "(evil.example)" in markup
    assert "href" not in shown(lab, "[x](https://evil\u202e.example/)")


DEEP = {
    "quotes": "> " * 20_000 + "x",
    "lists": "\n".join(" " * (2 * depth) + "- x" for depth in range(400)),
    "list markers": "- " * 20_000 + "x",
    "brackets": "[" * 50_000,
    "links": "[a](" * 20_000,
    "closed brackets": "[" * 10_000 + "](a)" * 10_000,
    "emphasis": "*a " * 20_000 + "b*" * 20_000,
    "runs": "**" * 30_000 + "x",
    "strikes": "~~a " * 20_000,
    "backticks": " ".join("`" * (index % 70) for index in range(5_000)),
    "dollars": "$a " * 30_000,
    "parentheses": "\\(" * 30_000,
    "braces": "$" + "{" * 10_000 + "x$",
    "fractions": "$$" + "\\frac" * 3_000 + "$$",
    "matrices": "$$" + "\\begin{matrix}" * 1_000 + "$$",
    "superscripts": "$$x" + "^{x" * 3_000 + "}" * 3_000 + "$$",
    "table": "|" * 20_000 + "\n" + "|-" * 20_000,
    "rows": "a|b\n-|-\n" + "|\n" * 20_000,
    "spaces": "# a" + " " * 50_000 + "b",
    "dashes": "- " * 20_000 + "x\n" + "-" * 20_000 + "x",
    "addresses": "https://a.example/" + ")" * 50_000 + " https://" * 5_000,
    "one line": "a" * 200_000,
    "escapes": "\\" * 50_000,
}


@pytest.mark.parametrize("name", DEEP)
def test_no_text_takes_long(lab, name):
    """Nesting is bounded, and time is that of a text of this length: a quadratic part would take minutes here."""
    began = time.monotonic()
    markup = shown(lab, DEEP[name])
    assert time.monotonic() - began < 5
    depth = most = 0
    for tag in re.findall(r"<(/?)(?!br|hr|mspace|input)[a-z][^>]*?(/?)>", markup):
        depth += 0 if tag[1] else -1 if tag[0] else 1
        most = max(most, depth)
    assert most <= 200


def test_the_policy_holds(chromium, tool_server):
    """What the tests above have found nothing of would be refused: scripts and styles in markup, markup of strings, another place."""
    chromium.open(tool_server.base + "/")
    chromium.wait("document.querySelector('#question')")
    tries = {
        "innerHTML": "document.body.innerHTML = '<b>x</b>'",
        "eval": "eval('1')",
        "Function": "new Function('return 1')()",
        "timer": "setTimeout('1')",
        "script": "(() => { const s = document.createElement('script'); s.text = 'window.hacked = 1'; document.body.append(s) })()",
        "fetch": "await fetch('https://evil.example/')",
        "frame": "document.body.append(Object.assign(document.createElement('iframe'), { srcdoc: 'x' }))",
    }
    for name, script in tries.items():
        found = chromium.evaluate(
            f"(async () => {{ try {{ await (async () => {{ {script} }})(); return 'done' }} catch (e) {{ return e.name }} }})()"
        )
        assert found in ("TypeError", "EvalError"), name
    assert chromium.evaluate("window.hacked") is None
    chromium.errors.clear()


# Markup

MARKED = [
    ("a\nb", "<p>a\nb</p>"),
    ("a  \nb\\\nc", "<p>a  <br>b<br>c</p>"),
    ("# *a* #\n#b", '<h3 class="level-1"><em>a</em></h3><p>#b</p>'),
    (
        "**a*b*c** __d__ _e_f_ 2*3*4",
        "<p><strong>a<em>b</em>c</strong> <strong>d</strong> <em>e_f</em> 2<em>3</em>4</p>",
    ),
    (
        "***a*** ****b**** snake_case_name ~~c~~ ~d~",
        "<p><em><strong>a</strong></em> ****b**** snake_case_name <del>c</del> ~d~</p>",
    ),
    ("`a` ``b`c`` `d", '<p><code dir="ltr">a</code> <code dir="ltr">b`c</code> `d</p>'),
    (r"\*a\* \q \$5", r"<p>*a* \q $5</p>"),
    ("> a\nb\n> - c", '<blockquote><p>a\nb</p><ul><li class="">c</li></ul></blockquote>'),
    ("- a\n- b\n\n  c", '<ul><li class=""><p>a</p></li><li class=""><p>b</p><p>c</p></li></ul>'),
    ("3. a\n   - b\n4. c", '<ol start="3"><li class="">a<ul><li class="">b</li></ul></li><li class="">c</li></ol>'),
    ("a\n- b\n\nc", '<p>a</p><ul><li class="">b</li></ul><p>c</p>'),
    ("1986. A year\n2 + 2", '<ol start="1986"><li class="">A year\n2 + 2</li></ol>'),
    ("---\n***\n- - -", "<hr><hr><hr>"),
    ("<b>a</b> &amp; &lt;", "<p>&lt;b&gt;a&lt;/b&gt; &amp;amp; &amp;lt;</p>"),
    ("a|b\nc", "<p>a|b\nc</p>"),
    ("$5 and $6, $ 7$", "<p>$5 and $6, $ 7$</p>"),
    ("[a]( /x ) [b] [c](", "<p><bdi>a</bdi> [b] [c](</p>"),
]


@pytest.mark.parametrize("text,markup", MARKED)
def test_markdown(lab, text, markup):
    assert shown(lab, text) == markup


def test_a_fence_that_is_still_open_is_code(lab):
    for text in ("```py\na = 1", "```py\na = 1\n```", "~~~py\na = 1\n~~~"):
        markup = shown(lab, text)
        assert ">py<" in markup and "<code>a = 1</code>" in markup
    assert shown(lab, "````\n```\n````").count("<figure") == 1


def test_a_table(lab):
    markup = shown(lab, "| a | b |\n|:--|--:|\n| `x|y` | 1 |\n| only |")
    assert re.findall(r"<t[hd] class=\"(\w*)\">", markup) == ["left", "right"] * 3
    assert "x|y" in markup and markup.count("<tr>") == 3


FORMULAS = [
    (r"x^2_i", "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>"),
    (r"\frac{1}{2}", "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>"),
    (r"\frac12", None),
    (r"\sqrt[3]{x}", "<mroot><mrow><mi>x</mi></mrow><mn>3</mn></mroot>"),
    (r"\alpha \le \mathbb{R}", '<mi>α</mi><mo stretchy="false">≤</mo><mi mathvariant="normal">ℝ</mi>'),
    (r"\left( x \right]", '<mo stretchy="true">(</mo><mi>x</mi><mo stretchy="true">]</mo>'),
    (r"\text{if } n", "<mtext>if&nbsp;</mtext><mi>n</mi>"),
    (r"f''", '<msup><mi>f</mi><mo stretchy="false">′′</mo></msup>'),
    (r"\unknown{x}", '<mtext class="unknown">\\unknown</mtext>'),
    (r"\begin{bmatrix}1 & 2 \\ 3 & 4\end{bmatrix}", None),
    (r"\not= \not\in \bm{x} \mathbf{AB}", None),
]


@pytest.mark.parametrize("formula,markup", FORMULAS)
def test_formulas(lab, formula, markup):
    found = re.sub(r"</?math[^>]*>|</?p>", "", shown(lab, f"${formula}$"))
    assert markup is None or markup in found
    if "bmatrix" in formula:
        assert found.count("<mtr>") == 2 and found.count("<mtd") == 4 and "[" in found
    if formula.startswith(r"\not"):
        assert "≠" in found and "∉" in found and "𝐀𝐁" in found


def test_a_formula_of_its_own_line_has_limits_below(lab):
    for text in ("$$\\sum_{i=1}^n i$$", "\\[\\sum_{i=1}^n i\\]", "$$\n\\sum_{i=1}^n i\n$$"):
        assert "<munderover>" in shown(lab, text) and 'display="block"' in shown(lab, text)
    assert "<msubsup>" in shown(lab, "$\\sum_{i=1}^n i$")
    assert "formula" not in shown(lab, "$$\\sum_{i=1}")  # its end has not come yet


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
