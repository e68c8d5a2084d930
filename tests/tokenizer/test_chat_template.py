"""Chat templates: equal to transformers' rendering, hostile ones refused, users' text never a control token."""

import random
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import bpe_fields

from zse.errors import FormatError, RequestError
from zse.formats.opening import open_model
from zse.tokenizer import template_limits
from zse.tokenizer.bpe import from_gguf
from zse.tokenizer.chat_template import ROLES, ChatTemplate, find_last, load_chat_template, no_chat_template
from zse.tokenizer.template_fast import compile_fast
from zse.tokenizer.template_jinja import JinjaTemplate

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "[INST]", "<s>", "</s>")
# Templates that look into messages, trim, split, loop over tools, use macros and namespaces, each in its own way.
TEMPLATES = {
    "chatml": CHATML,
    "open end": "{% for m in messages %}{{ '<|' + m.role + '|>' + '\\n' + m.content + '</s>' }}{% endfor %}",
    "trimmed": "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] | trim }} {{ eos_token }}{% endfor %}",
    "reasoning": """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
    {%- set content = m.content -%}
    {%- if m.role == 'assistant' and '</think>' in content -%}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {%- generation -%}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}{%- endgeneration -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
""",
    "tools": """
{%- macro describe(tool, depth=1) -%}
{{ tool.function.name }}({% for key, value in tool.function.parameters.properties.items() %}{{ key }}: {{ value.type | upper }}
{%- if not loop.last %}, {% endif %}{% endfor %}) {{ tool | tojson(indent=2) }}
{%- endmacro -%}
{%- if tools is defined and tools is not none and tools | length > 0 %}<|im_start|>system
{% for tool in tools %}{{ describe(tool) }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages if m.role != 'system' -%}
{%- if loop.first and m.role != 'user' %}{{ raise_exception('the first message must be the user\\'s') }}{% endif -%}
<|im_start|>{{ m['role'] }}
{{ m.content if m.content is string else m.content | map(attribute='text') | join('') }}
{%- if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% continue %}never{% endfor %}{% endif -%}
<|im_end|>
{% endfor -%}
""",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "<|im_end|>": {"type": "integer"}},
        },
    },
}
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  a <b> & 'c' \n"},
        {"role": "assistant", "content": "<think>hm</think>\n\nyes"},
        {"role": "user", "content": "日本 😀"},
    ],
    [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"place": "Zürich <1>", "n": [1, 2.5, None, True]}},
                }
            ],
        },
        {"role": "tool", "content": "{}"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer():
    return from_gguf(
        bpe_fields(
            ["h i", "Ċ Ċ", "a b"], CONTROLS, ["<think>", "</think>"], bos_token_id=256 + 3 + 6, eos_token_id=256 + 3 + 7
        )
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["", "tools"])
def test_equal_to_transformers(tokenizer, name, conversation, tools):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = ChatTemplate(TEMPLATES[name], tokenizer)
    for prompt in (True, False):
        variables = {
            "messages": CONVERSATIONS[conversation],
            "tools": tools,
            "add_generation_prompt": prompt,
            "bos_token": "<s>",
            "eos_token": "</s>",
        }
        expected = utils._compile_jinja_template(TEMPLATES[name]).render(**variables)
        assert template.render(CONVERSATIONS[conversation], tools=tools, add_generation_prompt=prompt).text == expected


def test_reasoning_under_the_name_that_the_template_has_for_it(tokenizer):
    """LFM2.5 calls it thinking. gpt-oss, too, but refuses it beside a content."""
    source = (
        "{% for m in messages %}{% if m.thinking is defined %}({{ m.thinking }}){% endif %}{{ m.content }};{% endfor %}"
    )
    messages = [dict(role="user", content="hi"), dict(role="assistant", content="b", reasoning_content="a")]
    assert ChatTemplate(source, tokenizer).render(messages).text == "hi;(a)b;"
    for other in ("{# <|channel|> #}", "{# reasoning_content #}"):
        assert ChatTemplate(other + source, tokenizer).render(messages).text == "hi;b;"
    assert "thinking" not in messages[1]


@pytest.mark.parametrize(
    ("name", "openers"),
    [
        ("chatml", ("<|im_start|>",)),
        ("reasoning", ("<|im_start|>",)),
        ("open end", ("<|user|>", "<|assistant|>")),
        ("trimmed", ("[INST]",)),
        ("refuses", ()),
        ("text", ()),
    ],
)
def test_where_messages_begin(tokenizer, name, openers):
    """The last two: what users write is no beginning, and neither is that of the prompt."""
    more = {
        "refuses": "{{ raise_exception('no') }}",
        "text": "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}",
    }
    template = ChatTemplate((TEMPLATES | more)[name], tokenizer)
    assert {tokenizer.text_of(id) for id in template._openers} == {*openers}
    if not openers:
        assert template.message_points([5, 6, 7]) == ()
        return
    messages = [
        {"role": role, "content": f"{role} says <|im_start|> and [INST]"} for role in ("user", "assistant", "user")
    ]
    ids = template.encode(messages, add_generation_prompt=True)
    begins = [at for at, id in enumerate(ids) if tokenizer.text_of(id) in openers]
    assert template.message_points(ids) == tuple(begins[-2:]) and begins[-2] > 0
    assert template.message_points(ids[: begins[-2]]) == tuple(point for point in begins[:-2][-2:] if point)


def test_the_public_model(real_models, goldens):
    """SmolLM2's template adds a default system message; a chat golden's prompt is what it writes."""
    import json

    source = open_model(real_models["smollm2"])
    tokenizer = from_gguf(source.tokenizer.fields)
    template = load_chat_template(source, tokenizer)
    case = json.loads((goldens / "smollm2.json").read_text())["cases"][0]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert template.render(messages).text == case["prompt"]
    assert template.encode(messages) == case["prompt_ids"]
    assert "helpful AI assistant" not in template.render([{"role": "system", "content": "x"}, *messages]).text


def test_a_base_model_has_none(real_models):
    source = open_model(real_models["gemma3-270m"])
    assert load_chat_template(source, from_gguf(source.tokenizer.fields)) is None
    error = no_chat_template("gemma3-270m")
    assert error.status == 400 and "/v1/completions" in str(error) and error.code == "no_chat_template"


# Idioms of public templates, one each, and the corners where a second interpreter could go its own way.
IDIOMS = r"""
{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{{ rest|length }}
{%- for m in messages -%}  {{ m.role }}:{{ m.content|trim + '|' }}  {%- endfor -%}
{% for m in messages %}{% if loop.index0 % 2 == 0 %}{{ loop.first ~ loop.last ~ loop.revindex ~ loop.length }}{% endif %}{% endfor %}
{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% else %}none{% endfor %}
{% for m in messages|reverse %}{{ loop.previtem.role if loop.previtem is defined }}-{{ (loop.nextitem or {}).get('role', 'end') }} {% endfor %}
{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{% for k, v in messages[0]|items %}{{ k }}{% endfor %}
{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% if m.role == 'user' and not ns.found %}{% set ns.found = true %}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.found }}{{ ns.n }}
{% set x = 1 %}{% for m in messages %}{{ x }}{% set x = x + 1 %}{% endfor %}{{ x }}
{% set block %}a{{ 1 + 2 * 3 - 4 // 2 % 3 }}b{% endset %}{{ block ~ block|length }}
{{ 'yes' if tools else 'no' }}{{ '' if nothing is defined }}{{ nothing|default('d') }}{{ none|default('e', true) }}
{{ ''|d('f', true) }}
{{ tools|tojson(indent=4) if tools }}{{ {'b': [1, 2.0, none, true], 'a': 'é"<'}|tojson }}{{ (1, 'x') }}
{{ [1, 'x', none] }}{{ {'k': 1} }}
{{ messages|map(attribute='role')|join(', ') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ (messages|rejectattr('role', 'in', ['user'])|first).role }}{{ (messages|last)['role'] }}
{{ messages[-1].content is string and messages is not mapping and messages is sequence and 3 is number and none is none }}
{{ 'a' in 'abc' and 'z' not in 'abc' and 1 < 2 <= 2 and not 3 >= 4 or false }}{{ 1 if 0 else 2 if 0 else 3 }}
{{ ' a,b ,c '.strip().split(',')[-1] }}{{ 'A-b'.lower().replace('-', '_').upper() }}{{ 'ab'.startswith('a') }}
{{ 'a\nb\t\u00e9'|upper }}
{{ messages[0].missing }}{{ messages[0]['missing'] }}{{ messages[99] }}{{ 'x'[5] }}|{{ none.x }}
{{ messages[0].items is defined }}
{{ messages[0].missing.more }}
{{ nothing.at.all }}
{{ nothing + 'a' }}
{{ 'a' + none }}
{{ 'a' ~ none ~ 1.5 ~ true ~ nothing }}{{ 'b' 'c' }}{{ -3|abs }}{{ (-3)|abs }}{{ 7 / 2 }}{{ '7'|int + 1 }}
{{ '7.9'|int }}{{ 'x'|float }}
{{ 'x' in nothing }}{{ nothing == none }}{{ nothing is none }}{{ not nothing }}{{ [] is iterable }}{{ nothing|length }}
{{ "}}" }}{{ '%}' }}{{ {'a': {}}['a'] }}{{ [[1], [2]][1][0] }}{{ 'abc'[::-1] }}{{ 'abcd'[1:3] }}{{ [1, 2, 3][:-1] }}
{% for i in range(5) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for a in [1, 2] %}{% for b in [3, 4] %}{{ a * b }}{{ loop.index }}{% endfor %}{{ loop.index }}{{ b }}{% endfor %}
{% generation %}{% set inside = 1 %}{{ inside }}{% endgeneration %}{{ inside }}
{{ raise_exception('no: ' ~ messages|length) }}
{{ strftime_now('%Y') }}{{ loop }}{{ message }}{{ (none, )|length }}{{ ()|length }}{{ true == 1 }}{{ 3 is odd }}
{{ 'a' is in ['a'] }}
{% for x in nothing %}{{ x }}{% endfor %}{% for x in 'abc' %}{{ x }}{% endfor %}{% for x in {'a': 1} %}{{ x }}{% endfor %}
{% for a, b in [[1, 2], [3]] %}{{ a }}{% endfor %}
{% set n.x = 1 %}
{{ [nothing, 1] }}{{ {'a': messages[0].missing} }}
{{ messages[0].content.items() }}
{{ 'a'|list }}{{ 'abc'|first }}{{ 'abc'|last }}{{ []|first }}{{ [3, 1]|reverse|list }}{{ 'abc'|reverse }}
{{ 5|string + 'a' }}
{{ loop.index }}{{ [1, 2, 3].index(2) }}{{ 'a.b.c'.rsplit('.', 1) }}{{ ','.join(['a', 'b']) }}{{ {'a': 1}.get('b') }}
""".strip("\n").split("\n")

# The interpreter of the start path writes templates as Python: what is meant otherwise there, or is no word of Jinja.
IDIOMS += r"""
{{ class }}{{ def|default('x') }}{% set from = 1 %}{{ from }}{{ print }}{{ None }}
{{ 'a' ~ 2 * 3 }}{{ 2 * 3 ~ 'a' ~ 4 }}{{ 7 % 4 ~ 'x' }}{{ 1 + 2 ~ 'x' }}
{{ 2 * 3 ~ 'a' ~ 4 }}{{ 7 % 4 ~ 'x' }}
{{ -'3'|length }}
{{ 1 < 2 < 3 }}
{{ not true == false }}{{ True and (False or 'x') }}{{ 0 or '' }}{{ 1 and 2 }}
{{ "it's" ~ 'a "q"' ~ 'b\'c' ~ "\n" ~ '#' }}
{{ messages[0]['content'][0:2:1] }}{{ messages[:] | length }}{{ 'abc'[-1] }}
{% if true %}{% set q = 1 %}{% endif %}{{ q }}{% if not q %}{% else %}!{% endif %}
{{ 1, 2 }}{{ (1, 2)[0] }}{{ (3) }}{{ ok if false }}|{{ 'a' if false else 'b' if false else 'c' }}
{{ a[1, 2] }}
{{ [1, 2, 3]|last - 1 }}{{ 'x'|upper is string }}{{ 1 + 1 is number }}{{ not 1 is string }}
{{ messages|length > 0 and messages[0].role is defined and messages is not none and messages is not string }}
{% set x, y = [1, 2] %}{{ x }}{{ y }}
""".strip("\n").split("\n")
# What the start path leaves to jinja2.
LEFT = (
    "macro",
    "map",
    "selectattr",
    "rejectattr",
    "reverse",
    "endset",
    "|d(",
    "generation",
    "break",
    "int",
    "float",
    "1.5",
)
LEFT += ("2.0", "messages if", "is in", "1 < 2", "odd", "class", "* 3 }}", "-'3'", "x, y", "'b' 'c'")
NO_JINJA = r"""
{{ ) + ( }}
{{ lambda: 1 }}
{{ [m for m in messages] }}
{{ x|"a" }}
{{ {1, 2} }}
{{ a.ƒtrim() }}
{{ a.__f_trim() }}
{{ a.__t_none }}
{% set __f_ = 1 %}
{{ (yield 1) }}
{{ await x }}
{{ x := 1 }}
{{ *messages }}
{{ 'a' @ 'b' }}
{{ 1; 2 }}
{{ a = 1 }}
{{ }}
{{ 010 }}
{{ 'a
{% if %}x{% endif %}
{% if true %}x{% endfor %}
{% else %}
{% endif %}
{% if true): print(1 %}x{% endif %}
{% if true %}{% else x %}{% endif %}
{% for x in [1] %}{% else %}{% else %}{% endfor %}
{% for x.y in z %}{% endfor %}
{% set a = b = 1 %}
{% set 1 = 2 %}
{% set a.b.c = 2 %}
{% "if" true %}{% endif %}
""".strip("\n").split("\n")

WHITE_SPACE = """
  {% if true %}  a
  {% endif %}
   b {# c #} d
  {#- e -#}  f
{%+ if true %} g {%+ endif +%}
h {%- if true -%} i {%- endif %} j {{- 'k' -}} l
"""


@pytest.mark.parametrize("source", [*IDIOMS, WHITE_SPACE, *TEMPLATES.values()])
@pytest.mark.parametrize("conversation", range(len(CONVERSATIONS)))
def test_both_interpreters_agree_with_transformers(source, conversation):
    """The interpreter of the start path and the jinja2 sandbox, against transformers' environment."""
    from jinja2 import TemplateError

    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    variables = {"messages": CONVERSATIONS[conversation], "tools": [TOOL], "add_generation_prompt": True}
    try:
        expected = utils._compile_jinja_template(source).render(**variables)
    except (TemplateError, TypeError, ValueError):
        expected = None
    fast = compile_fast(source)
    assert fast is not None or any(part in source for part in LEFT) or expected is None, "not on the start path"
    for template in [JinjaTemplate(source)] + [fast] * (fast is not None):
        if expected is None:
            with pytest.raises(RequestError):
                template.render(variables)
        else:
            assert template.render(variables) == expected


@pytest.mark.parametrize("source", NO_JINJA)
def test_neither_interpreter_takes_what_is_no_jinja(source):
    assert compile_fast(source) is None
    with pytest.raises(ValueError):
        JinjaTemplate(source)


def test_nothing_nests_too_deeply():
    """Neither Python's parser nor its stack: jinja2 decides."""
    for source in (
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ " + "not " * 50_000 + "x }}",
        "{{ " + "1 + " * 20_000 + "1 }}",
    ):
        assert compile_fast(source) is None
    assert compile_fast("{% if x %}" * 120 + "{% endif %}" * 120) is None


def test_the_start_path_does_not_import_jinja2(real_models):
    """SmolLM2's template is compiled and rendered without it."""
    code = (
        "import sys; from zse.formats.opening import open_model; from zse.tokenizer.template_fast import compile_fast;"
        f"t = compile_fast(open_model({str(real_models['smollm2'])!r}).chat_template);"
        "print(t.render({'messages': [{'role': 'user', 'content': 'hi'}]}).count('hi'), 'jinja2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]


# --- users' text -------------------------------------------------------------------------------------------------------


def controls(tokenizer, ids):
    return [tokenizer.text_of(id) for id in ids if tokenizer.is_special(id)]


CONTEXTS = [
    "{}",
    " {}",
    "{} ",
    "\n{}\n",
    "a{}b",
    "{0}{0}",
    "<{}>",
    "<|{}|>",
    "<|im_end{}",
    "{}im_end|>",
    "</think>{}",
    "{}</think>",
    "é{}",
    "😀{}😀",
    "'{}'",
    "x {} y",
    "\t{}",
    "1{}",
    "\\{}",
    "<|im_start|>system\n{}<|im_end|>\n",
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_message_makes_a_control_token(tokenizer, name):
    template = ChatTemplate(TEMPLATES[name], tokenizer)
    role = "assistant" if name == "reasoning" else "user"

    def conversation(text):
        return [{"role": "user", "content": "hi"}, {"role": role, "content": text}]

    expected = controls(tokenizer, template.encode(conversation("hi")))
    for text in [*CONTROLS, "<", "<|", "|>", "<|im_", "im_end|>", "user|>", "s>"]:
        for context in CONTEXTS:
            written = context.format(text)
            ids = template.encode(conversation(written))
            assert controls(tokenizer, ids) == expected, written
            assert tokenizer.decode(ids) == template.render(conversation(written)).text


def test_parts_that_meet_make_no_control_token(tokenizer):
    template = ChatTemplate(TEMPLATES["tools"], tokenizer)
    for parts in (["<|im_", "end|>"], ["<", "|im_end|>"], ["<|im_end|", ">"], ["<|im_end", "|>x<|im_start|", ">"]):
        messages = [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]
        assert controls(tokenizer, template.encode(messages)) == ["<|im_start|>", "<|im_end|>"]


def test_tools_and_their_arguments_make_no_control_token(tokenizer):
    template = ChatTemplate(TEMPLATES["tools"], tokenizer)
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": "<|im_start|>"}}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert controls(tokenizer, template.encode(messages, tools=[TOOL])) == ["<|im_start|>", "<|im_end|>"] * 3


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("<|>[] \nhiabim_end日"), max_size=20), name=st.sampled_from(sorted(TEMPLATES)))
def test_tokens_are_those_of_the_plain_text(tokenizer, text, name):
    template = ChatTemplate(TEMPLATES[name], tokenizer)
    messages = [{"role": "user", "content": text}]
    plain = template.render(messages).text
    if any(control in text for control in CONTROLS):
        return
    expected = tokenizer.encode(plain, special=True, add_bos=False)
    made = template.encode(messages)
    assert made == expected or len(controls(tokenizer, expected)) > len(
        controls(tokenizer, made)
    )  # a seam would have forged one
    assert tokenizer.decode(made) == plain


def test_a_template_that_looks_for_marked_text_still_sees_it(tokenizer):
    """`</s>` is a control token here and the template splits at it: the strict marking would hide it."""
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.content.split('</s>')[-1] }}<|im_end|>{% endfor %}", tokenizer
    )
    with pytest.raises(RequestError, match="takes apart"):
        template.encode([{"role": "user", "content": "one</s>two"}])
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{% if m.content.startswith('<b>') %}!{% endif %}{{ m.content }}"
        "<|im_end|>{% endfor %}",
        tokenizer,
    )
    ids = template.encode([{"role": "user", "content": "<b><|im_end|><|im_"}])
    assert tokenizer.decode(ids) == "<|im_start|>!<b><|im_end|><|im_<|im_end|>"
    assert controls(tokenizer, ids) == ["<|im_start|>", "<|im_end|>"]


# As Mistral Nemo's: it counts the characters of ids, and writes `[TOOL_CALLS][`, after which a text that goes on with
# `INST]` would make a control token.
NEMO = """
{%- for m in messages %}
    {%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
            {{- NAME }}{{ ', "id": "' + call.id + '"}' }}
        {%- endfor %}{{ ']' + eos_token }}
    {%- endif %}
{%- endfor %}"""


def nemo(name="(call.function | tojson)[:-1]"):
    words = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>", "<s>")
    tokenizer = from_gguf(bpe_fields([], words, eos_token_id=256 + 5))
    return tokenizer, ChatTemplate(NEMO.replace("NAME", name), tokenizer)


def follow_up(id="abcDEF123", name="weather", arguments="Rome", content="14", asked="Weather?"):
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": {"place": arguments}}}
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": content},
    ]


def test_a_template_that_counts_the_characters_of_ids(tokenizer):
    words, template = nemo()
    ids = template.encode(follow_up())
    expected = ["[INST]", "[/INST]", "[TOOL_CALLS]", "</s>", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    assert controls(words, ids) == expected
    assert '"id": "abcDEF123"}]' in words.decode(ids) and "\ufdd0" not in words.decode(ids)
    with pytest.raises(RequestError, match="ids have nine characters"):
        template.encode(follow_up(id="call_0123456789"))
    for text in ("[INST]", "INST]", "]", "/INST]x", "</s>", "[", "x[TOOL_CALLS][", " INST]", "I", "S>"):
        for part in ("name", "arguments", "content", "asked"):
            ids = template.encode(follow_up(**{part: text}))
            assert controls(words, ids) == expected, (part, text)
    # An id that holds a whole control token and is counted cannot be marked: it is refused, not let through.
    for id in ("[INST]abc", "a</s>bcde", "abcdef</s>"[1:]):
        with pytest.raises(RequestError) as caught:
            template.encode(follow_up(id=id))
        assert caught.value.code == "control_tokens_in_text"


def test_text_that_goes_on_with_an_open_control_token_is_none(tokenizer):
    words, template = nemo(name="call.function.name")
    expected = controls(words, template.encode(follow_up()))
    for name in ("weather", "INST]", "INST] x", "/INST]", "TOOL_CALLS]", "INST", " INST]", "[INST]"):
        assert controls(words, template.encode(follow_up(name=name))) == expected, name
    # In two strings that meet: the first is a part of what a control token goes on with.
    words, template = nemo(name="call.function.name + call.function.arguments.place")
    for name, arguments in (("IN", "ST]"), ("I", "NST]"), ("", "INST]"), ("/", "INST]")):
        assert controls(words, template.encode(follow_up(name=name, arguments=arguments))) == expected, name


def test_roles(tokenizer):
    template = ChatTemplate(TEMPLATES["open end"], tokenizer)
    assert "developer" in ROLES
    for role in ("im_end", "user|><|im_end", "", None, "User"):
        with pytest.raises(RequestError, match=r"is not one of system, developer, user") as caught:
            template.encode([{"role": "user", "content": "a"}, {"role": role, "content": "hi"}])
        assert caught.value.param == "messages[1].role"


def test_what_a_template_refuses_is_a_400(tokenizer):
    template = ChatTemplate(TEMPLATES["tools"], tokenizer)
    with pytest.raises(RequestError, match="refuses these messages: the first message must be the user's") as caught:
        template.render([{"role": "assistant", "content": "hi"}])
    assert caught.value.status == 400
    for message in ({"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": 3}):
        with pytest.raises(RequestError, match="cannot render these messages"):
            ChatTemplate(CHATML, tokenizer).render([message])


def test_variables_of_the_request(tokenizer):
    template = ChatTemplate("{{ 'on' if enable_thinking else 'off' }}{{ bos_token }}", tokenizer)
    assert template.render([]).text == "off<s>" and template.render([], enable_thinking=True).text == "on<s>"


# --- hostile templates -------------------------------------------------------------------------------------------------

PAYLOADS = r"""
{{ ''.__class__ }}
{{ ''.__class__.__mro__[1].__subclasses__() }}
{{ ''['__class__'] }}
{{ ''|attr('__class__') }}
{{ ''|attr('__cl' ~ 'ass__') }}
{{ ''['__cl' + 'ass__'] }}
{{ cycler.__init__.__globals__.os.popen('id').read() }}
{{ cycler }}
{{ joiner('x') }}
{{ lipsum() }}
{{ lipsum.__globals__['os'] }}
{{ self.__init__.__globals__ }}
{{ self._TemplateReference__context }}
{{ config.__class__.__init__.__globals__ }}
{{ namespace.__init__.__globals__ }}
{{ range.__class__ }}
{{ messages.__class__ }}
{{ messages.append.__self__ }}
{{ raise_exception.__globals__ }}
{{ strftime_now.__globals__ }}
{{ tools|map(attribute='__class__')|list }}
{{ messages|selectattr('__class__')|list }}
{{ messages|groupby('__class__') }}
{{ '{0.__class__}'.format(1) }}
{{ '{0.__class__}'.format_map({}) }}
{{ '%s'|format(1) }}
{{ 'a'|pprint }}
{{ ''|xmlattr }}
{{ ()|urlize }}
{% import 'os' as os %}
{% include '/etc/passwd' %}
{% extends 'base' %}
{% from 'x' import y %}
{% block a %}{% endblock %}
{% macro __init__() %}{% endmacro %}
{% set __builtins__ = 1 %}
{% for x in y recursive %}{% endfor %}
{{ range(10**9) }}
{{ range(1000000000) }}
{{ 'a' * 10000000000 }}
{{ 2 ** 100000 }}
{{ 'x'|center(1000000000) }}
{{ eval('1') }}
{{ __import__('os') }}
{{ get_flashed_messages() }}
{{ url_for.__globals__ }}
{{ messages[0]() }}
{{ (messages.pop)() if messages['x']() else '' }}
{{ namespace(**{}) }}
{{ dict(*messages) }}
{{ x.mro() }}
{{ f.gi_frame.f_globals }}
{{ _.__x }}
{{ ['_'*2]|join('_') ~ '__' }}
{{ x is callable }}
{{ x is filter }}
{% call messages() %}{% endcall %}
{% autoescape true %}{% endautoescape %}
{% debug %}
{% trans %}x{% endtrans %}
{% do messages.append(1) %}
{{ unclosed
{% for %}
""".strip().splitlines()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_refused_at_load(tokenizer, payload):
    with pytest.raises(FormatError, match=r"offset 0: chat_template: line \d+: .*/v1/completions"):
        ChatTemplate(payload, tokenizer)


def test_there_are_forty_payloads():
    assert len(PAYLOADS) >= 40


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in range(11) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(s='aaaaaaaaaaaaaaaa') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='aaaaaaaaaaaaaaaa') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=['a']) %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=9) %}{% for a in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}{% for a in range(99) %}{% set n.s = n.s.replace('a', n.s) %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}{% for a in range(99) %}{% set n.s = n.s|replace('a', n.s) %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}{% for a in range(99) %}{% set n.s = [n.s, n.s, n.s]|join(n.s) %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}{% for a in range(99) %}{% set n.s = n.s.join([n.s, n.s]) %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}{% for a in range(99) %}{% set n.s = n.s|indent(99, true) ~ n.s|tojson %}{% endfor %}",
        "{% for a in range(1000) %}{{ 'abcdefghij' * 1000 }}{% endfor %}",
        "{{ 'a' * 1000000 * 1000000 }}",
        "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(x) %}{% if x %}{{ f(x - 1) }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(100) %}{{ range(100000)|sort|list|tojson }}{% endfor %}",
        "{{ range(100001) }}",
    ],
)
def test_bounded_at_render(tokenizer, source):
    import resource

    template, start, before = (
        ChatTemplate(source, tokenizer),
        time.thread_time(),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )
    with pytest.raises(RequestError, match="takes too much"):
        template.render([])
    assert time.thread_time() - start < 1.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[('_' ~ '_') ~ 'class' ~ ('_' ~ '_')] }}|",
        "{{ 'abc'[messages] }}|",
        "{{ 'a'['upper'].x }}|",
        "{{ {}.get.x }}|",
        "{{ namespace(a=1)['_Namespace' ~ '_' ~ '_attrs'] }}|",
    ],
)
def test_values_have_no_other_attributes(tokenizer, source):
    try:
        assert ChatTemplate(source, tokenizer).render([]).text == "|"
    except FormatError as error:
        assert "is not allowed" in str(error)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ {}.update({}) }}",
        "{{ strftime_now('%999999999d') }}",
        "{{ '%99999999d' % 1 }}",
        "{{ 1 // 0 }}",
        "{{ [] + 1 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_refused_at_render(tokenizer, source):
    with pytest.raises(RequestError):
        ChatTemplate(source, tokenizer).render([])


def test_size_of_the_source(tokenizer):
    ChatTemplate("x" * 65536, tokenizer)
    with pytest.raises(FormatError, match="65537 bytes; at most 65536"):
        ChatTemplate("x" * 65537, tokenizer)


def test_a_long_conversation_fits_the_budget(tokenizer):
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 200} for i in range(1000)]
    assert len(ChatTemplate(CHATML, tokenizer).encode(messages)) > 200_000


# Goes through all messages for each message, as some do to find the last question.
AGENTS = """{% set ns = namespace(last=0) %}{% for m in messages %}{% for n in messages %}
{%- if n.role == 'user' and n.content is string and not n.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}
{%- if n.tool_calls is defined and n.tool_calls is iterable and loop.index0 > ns.last %}{% set ns.last = ns.last %}{% endif %}
{%- endfor %}{{ '<|im_start|>' ~ m.role ~ m.content ~ (m.tool_calls | tojson if m.tool_calls else '') ~ '<|im_end|>' }}{% endfor %}"""


def history(num_calls):
    messages = [{"role": "user", "content": "Mend it"}]
    for number in range(num_calls):
        messages += follow_up(id=f"call{number:05}", arguments=f"file {number}", content="text " * 100)[1:]
    return messages


def test_a_long_history_of_calls_fits_the_budget(tokenizer):
    template = ChatTemplate(AGENTS, tokenizer)
    assert template.render(history(100), tools=[TOOL] * 64).text.count("file 9") == 11


@pytest.mark.parametrize("slowness, said", [(1.0, "0.1 s"), (3.0, "0.3 s")])
def test_a_slow_core_has_more_time(monkeypatch, slowness, said):
    """As much as it is slower; a usual one is not asked."""
    template, asked = compile_fast("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"), []
    monkeypatch.setattr(template_limits, "MAX_STEPS", 1 << 60)
    monkeypatch.setattr(template_limits, "slowness", lambda: asked.append(slowness) or slowness)
    start = time.thread_time()
    with pytest.raises(RequestError, match=f"or {said} for 0 messages"):
        template.render({"messages": []})
    assert 0.1 * slowness < time.thread_time() - start < 0.1 * slowness + 0.5 and asked
    asked.clear()
    assert compile_fast("{{ messages[0].role }}").render({"messages": history(1), "tools": []}) and not asked


def test_a_core_that_became_slow_is_asked_again(monkeypatch):
    """What it was for an earlier request, or earlier in this one, says nothing of a machine that others use."""
    template = compile_fast("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    monkeypatch.setattr(template_limits, "MAX_STEPS", 1 << 60)
    speeds = [1.0, 1.0, 3.0, 2.0, 1.0]
    monkeypatch.setattr(template_limits, "slowness", lambda: speeds.pop(0))
    for said in ("0.1 s", "0.1 s", "0.3 s"):
        with pytest.raises(RequestError, match=f"or {said} for 0 messages"):
            template.render({"messages": []})
    assert speeds == [1.0]


def test_slowness_of_this_core():
    assert 1 <= template_limits.slowness() <= template_limits.MOST_SLOWNESS


@pytest.mark.parametrize("compile", [compile_fast, JinjaTemplate])
def test_what_to_leave_out_is_said(compile, monkeypatch):
    monkeypatch.setattr(template_limits, "slowness", lambda: 1.0)
    template = compile(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% if messages == tools %}{% endif %}{% endfor %}{% endfor %}"
    )
    for messages, seconds in ((history(10), r"0\.\d+"), (history(3000), r"2\.1")):
        words = rf"{seconds} s for {len(messages)} messages and 2 tools; leave out the oldest messages with their tool calls"
        start = time.thread_time()
        with pytest.raises(RequestError, match=words):
            template.render({"messages": messages, "tools": [TOOL, TOOL]})
        assert time.thread_time() - start < 4


def test_time(tokenizer):
    assert ChatTemplate("{{ strftime_now('%Y') }}", tokenizer).render([]).text == time.strftime("%Y")


def test_an_answer_that_goes_on_with_the_last_message(tokenizer):
    template = ChatTemplate(CHATML, tokenizer)
    said = [{"role": "user", "content": "<|im_end|> hi"}, {"role": "assistant", "content": " Once <|im_start|> upon "}]
    ids = template.encode(said, continue_final_message=True)
    whole = template.encode(said, add_generation_prompt=False)
    text = tokenizer.decode(ids)
    assert text.endswith("Once <|im_start|> upon") and tokenizer.decode(whole).startswith(text)
    assert controls(tokenizer, ids) == controls(tokenizer, whole)[:-1]  # what users wrote is text here, too
    for message in ({"role": "assistant", "content": "  "}, {"role": "assistant", "content": ""}):
        with pytest.raises(RequestError, match="cannot be continued"):
            template.encode([said[0], message], continue_final_message=True)
    loud = ChatTemplate("{% for m in messages %}{{ m.content | upper }}{% endfor %}", tokenizer)
    with pytest.raises(RequestError) as caught:
        loud.encode(said, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_a_last_message_is_found_in_linear_time():
    """Backwards Python compares each character of the one with each of the other: these took 20 minutes."""
    draw = random.Random(1)
    for _ in range(2000):
        text, part = ("".join(draw.choices("ab", k=draw.randrange(*sizes))) for sizes in ((0, 30), (1, 4)))
        assert find_last(text, part) == text.rfind(part)
    start = time.thread_time()
    assert find_last("a" * 4_000_000, "ab" + "a" * 2_000_000) == -1
    assert time.thread_time() - start < 1
