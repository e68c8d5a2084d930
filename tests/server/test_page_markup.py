"""What a model's text becomes in the web page: hostile output, Markdown, formulas; and the policy behind it."""

import json
import re
import time

import pytest
from pages import LAST, ask, said, shown

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
