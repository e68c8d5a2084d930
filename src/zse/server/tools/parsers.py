"""The tool formats of model families, one table: how each writes its calls, and by what a chat template shows it."""

from functools import partial

import msgspec

from zse.server.tools import gemma4, harmony
from zse.server.tools.blocks import Block
from zse.server.tools.readers import JsonCalls, KeyedCalls, PythonCalls, PythonLines
from zse.server.tools.reasoning import KIMI_K3, SOLAR, k3_mark
from zse.server.tools.recipients import ALL, RECIPIENT, RecipientCalls
from zse.server.tools.xml_calls import XmlStyle, reader

NONE = "none"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KIMI = tuple(
    f"<|tool_{word}|>"
    for word in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
)

_WORD = r"(?P<name>[A-Za-z0-9_.-]{1,64})"
_MISTRAL = rf"\s*{_WORD}\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*"
_DEEPSEEK = rf"\s*{CALL_BEGIN}\s*(?:function{SEPARATOR})?{_WORD}(?:{SEPARATOR}|\n```json)\s*"
_KIMI = r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[A-Za-z0-9_-]{1,64})(?::[0-9]+)?)\s*<\|tool_call_argument_begin\|>\s*"
_FUNCTION, _PARAMETER = r"<function=([^<>\s]{1,64})>", r"<parameter=(?P<key>[^<>\n]{1,128})>"
_QWEN = XmlStyle(_FUNCTION, _PARAMETER, "</parameter>", "</function>", newline=True)
_GLM = XmlStyle(
    r"([A-Za-z0-9_.-]{1,64})\s*(?=<arg_key>|</tool_call>)",
    r"<arg_key>(?P<key>[^<>\n]{1,128})</arg_key>\s*<arg_value>",
    "</arg_value>",
    "</tool_call>",
    nests=False,
)
_INVOKE = XmlStyle(
    r'<invoke name="([^"<>]{1,64})">', r'<parameter name="(?P<key>[^"<>]{1,128})">', "</parameter>", "</invoke>"
)
_MINICPM = XmlStyle(
    r'<function name="([^"<>]{1,64})">', r'<param name="(?P<key>[^"<>]{1,128})">', "</param>", "</function>", cdata=True
)
MINICPM = "<function", "</function>", "<param", "</param>"
DSML = "｜DSML｜"  # in each mark; a control token of some vocabularies
DSML_BLOCKS = "function_calls", "tool_calls"  # of V3.2; of V4
_DSML = XmlStyle(
    rf'<{DSML}invoke name="([^"<>]{{1,64}})">',
    rf'<{DSML}parameter name="(?P<key>[^"<>]{{1,128}})"(?: string="(?P<string>true|false)")?>',
    f"</{DSML}parameter>",
    f"</{DSML}invoke>",
)
GIGACHAT = "<|function_call|>", "<|message_sep|>", "<|role_sep|>"
_SOLAR = (
    r"\s*<\|tool_call:begin\|>(?P<id>[A-Za-z0-9_-]{1,64})<\|tool_call:name\|>(?P<name>[A-Za-z0-9_.-]{1,64})"
    r"<\|tool_call:args\|>\s*"
)
APERTUS = "<|tools_prefix|>", "<|tools_suffix|>"
_KIMI_K3 = XmlStyle(
    r'<\|open\|>call tool="([^"<>]{1,64})"(?: index="[0-9]{1,4}")?<\|sep\|>',
    r'<\|open\|>argument key="(?P<key>[^"<>]{1,128})"(?: type="(?P<string>[a-z]{1,16})")?<\|sep\|>',
    k3_mark("argument", is_end=True),
    k3_mark("call", is_end=True),
)


class ToolFormat(msgspec.Struct, frozen=True):
    """How a family of models writes calls.

    Args:
        markers: a chat template whose text holds one may be of this format; those formats are tried first.
        blocks: what calls stand in; of two that begin at one place the first counts.
        controls: control tokens of some vocabularies that have to be seen in the text.
        separators: characters that may stand between calls.
    """

    markers: tuple[str, ...]
    blocks: tuple[Block, ...]
    controls: tuple[str, ...] = ()
    separators: str = ""


def _json(opening: str, closing: str = "", *markers: str) -> ToolFormat:
    """Calls as JSON between two marks."""
    return ToolFormat(
        markers or (opening,),
        (Block(opening, partial(JsonCalls, closing=closing)),),
        (opening, closing) if closing else (opening,),
    )


def _xml(style: XmlStyle, opening: str, closing: str, *more: Block, markers: tuple[str, ...] = ()) -> ToolFormat:
    """Calls as XML between two marks."""
    block = Block(opening, reader(style, opening=opening, closing="" if closing == style.call_end else closing))
    return ToolFormat(markers or (opening,), (block, *more), (opening, closing))


_KNOWN_JSON = partial(JsonCalls, known=True)
# In the order in which they are tried (choosing.py).
FORMATS: dict[str, ToolFormat] = {
    # Qwen3-Coder, Qwen3.5, Nemotron 3:
    # <tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>. They forget <tool_call> and
    # </parameter> at times.
    "qwen3_coder": _xml(
        _QWEN,
        "<tool_call>",
        "</tool_call>",
        Block("<function=", reader(_QWEN, known=True), keeps=True),
        markers=("<function=",),
    ),
    # Hermes 2/3, Qwen 2.5 and 3, Granite 4: <tool_call>{"name": …, "arguments": {…}}</tool_call>
    "hermes": _json("<tool_call>", "</tool_call>"),
    # GLM 4.5 to 4.7: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>…</tool_call>
    "glm4": _xml(_GLM, "<tool_call>", "</tool_call>", markers=("<arg_key>",)),
    # Seed-OSS: as Qwen3-Coder, with marks of its own.
    "seed_oss": _xml(_QWEN, "<seed:tool_call>", "</seed:tool_call>"),
    # MiniMax M2: <minimax:tool_call><invoke name="NAME"><parameter
    # name="KEY">value</parameter>…</invoke></minimax:tool_call>
    "minimax_m2": _xml(_INVOKE, "<minimax:tool_call>", "</minimax:tool_call>"),
    # MiniCPM5: <function name="NAME"><param name="KEY">value</param>…</function>, texts perhaps in <![CDATA[…]]>.
    "minicpm": ToolFormat(
        ('<function name="',), (Block('<function name="', reader(_MINICPM, known=True), keeps=True),), MINICPM
    ),
    # DeepSeek V3, R1 (a JSON code block behind the name) and V3.1 (plain JSON).
    "deepseek": ToolFormat(
        (CALLS_BEGIN,),
        (
            Block(
                CALLS_BEGIN, partial(JsonCalls, closing=CALLS_END, head=_DEEPSEEK, tail=("```", CALL_END), lists=False)
            ),
        ),
        (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
    ),
    # DeepSeek V3.2 and V4: <｜DSML｜function_calls><｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY"
    # string="true">value </｜DSML｜parameter>…</｜DSML｜invoke></｜DSML｜function_calls>; V4 says tool_calls. string: whether
    # the value is text, or JSON.
    "dsml": ToolFormat(
        (DSML,),
        tuple(
            Block(f"<{DSML}{word}>", reader(_DSML, opening=f"<{DSML}{word}>", closing=f"</{DSML}{word}>"))
            for word in DSML_BLOCKS
        ),
        (DSML,),
    ),
    # GigaChat 3.1: <|function_call|>{"name": …, "arguments": {…}}<|message_sep|>; 3 writes it as a message of its own.
    "gigachat": ToolFormat(
        (GIGACHAT[0], GIGACHAT[2]),
        tuple(
            Block(opening, partial(JsonCalls, closing=GIGACHAT[1]))
            for opening in (GIGACHAT[0], f"{GIGACHAT[1]}\n\nfunction call{GIGACHAT[2]}\n")
        ),
        GIGACHAT,
    ),
    # Kimi K2: a section of calls, each with its id, functions.NAME:INDEX, before its arguments.
    "kimi_k2": ToolFormat(
        (KIMI[0],),
        (Block(KIMI[0], partial(JsonCalls, closing=KIMI[4], head=_KIMI, tail=(KIMI[3],), lists=False)),),
        KIMI,
    ),
    # Kimi K3: <|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="KEY"
    # type="string"<|sep|>value<|close|>argument<|sep|>…<|close|>call<|sep|><|close|>tools<|sep|>. type: whether the
    # value is text, or JSON.
    "kimi_k3": ToolFormat(KIMI_K3[:1], _xml(_KIMI_K3, k3_mark("tools"), k3_mark("tools", is_end=True)).blocks, KIMI_K3),
    # Solar Open: <|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{…}<|tool_call:end|>…
    "solar_open": ToolFormat(
        SOLAR[1:2],
        (Block(SOLAR[0], partial(JsonCalls, closing=SOLAR[5], head=_SOLAR, tail=SOLAR[4:5], lists=False)),),
        SOLAR,
    ),
    # Apertus: <|tools_prefix|>[{"NAME": {…}}, …]<|tools_suffix|>
    "apertus": ToolFormat(APERTUS[:1], (Block(APERTUS[0], partial(KeyedCalls, closing=APERTUS[1])),), APERTUS),
    # Firefunction: functools[{"name": …, "arguments": {…}}, …]
    "firefunction": _json("functools", "", "functools["),
    # Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], and since v11 [TOOL_CALLS]NAME[ARGS]{…}
    "mistral": ToolFormat(
        ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
        (Block("[TOOL_CALLS]", partial(JsonCalls, head=_MISTRAL)),),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    # Granite 3 and Phi-4-mini: <|tool_call|>[{"name": …, "arguments": {…}}, …]<|/tool_call|>, which Granite leaves
    # away.
    "granite": _json("<|tool_call|>", "<|/tool_call|>"),
    # Llama-Nemotron: <TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>
    "nemotron": _json("<TOOLCALL>", "</TOOLCALL>"),
    # Hunyuan and Jamba: <tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>
    "tool_calls": _json("<tool_calls>", "</tool_calls>"),
    # Command R7B and A: <|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>
    "command_r": _json("<|START_ACTION|>", "<|END_ACTION|>"),
    # LFM2 and 2.5: <|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>, which their templates do not show.
    "lfm2": ToolFormat(
        ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
        (Block("<|tool_call_start|>", partial(PythonCalls, closing="<|tool_call_end|>", json=True)),),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    # Gemma: ```tool_code with Python calls, ```json with {"name": …, "parameters": {…}}, or either as the answer.
    "gemma": ToolFormat(
        ("```tool_code", "<start_of_turn>"),
        (
            Block("```tool_code\n", partial(PythonLines, closing="```")),
            Block("```json\n", partial(JsonCalls, closing="```", known=True)),
            Block("{", _KNOWN_JSON, keeps=True, bare=True),
            Block("[", partial(PythonCalls, known=True, json=True), keeps=True, bare=True),
        ),
    ),
    # gpt-oss: <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>; its template writes the
    # recipient before the channel.
    "harmony": ToolFormat(
        ("<|channel|>commentary",),
        (
            Block(
                f"{harmony.CHANNEL}commentary to=functions.",
                partial(JsonCalls, closing=harmony.CALL, head=harmony.HEAD_AFTER, lists=False),
            ),
            Block(" to=functions.", partial(JsonCalls, closing=harmony.CALL, head=harmony.HEAD_BEFORE, lists=False)),
        ),
        harmony.MARKS,
    ),
    # Gemma 4: <|tool_call>call:NAME{KEY:<|"|>text<|"|>,…}<tool_call|>
    "gemma4": ToolFormat(
        (gemma4.OPENING,), (Block(gemma4.OPENING, gemma4.Gemma4Calls),), (gemma4.OPENING, gemma4.CLOSING, gemma4.QUOTE)
    ),
    # Llama 3.2 and 4: the answer is [f(a=1), g(b="x")], which <|python_start|> and <|python_end|> may enclose.
    "pythonic": ToolFormat(
        ("<|python_start|>", "[func_name1("),
        (
            Block("<|python_start|>", partial(PythonCalls, closing="<|python_end|>")),
            Block("[", partial(PythonCalls, known=True), keeps=True, bare=True),
        ),
        ("<|python_start|>", "<|python_end|>"),
    ),
    # Llama 3.1 to 3.3: the answer is {"name": …, "parameters": {…}}, several with `;` between them; <|python_tag|> may
    # stand before. Llama 4's template writes it behind an empty block of Python.
    "llama3_json": ToolFormat(
        ('"parameters": dictionary', "<|python_tag|>"),
        (
            Block("<|python_tag|>", JsonCalls),
            Block("<|python_start|><|python_end|>", JsonCalls),
            Block("{", _KNOWN_JSON, keeps=True, bare=True),
        ),
        ("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        separators=";,",
    ),
    # Functionary 3.2: NAME and a line with {…}, behind >>> but for the first, whose >>> ends the prompt
    # (recipients.py).
    "functionary_v3": ToolFormat((ALL,), (Block(RECIPIENT, RecipientCalls), Block("", RecipientCalls, bare=True))),
    # Functionary 3.1: <function=NAME>{…}</function>
    "functionary": ToolFormat(
        ("<function=",),
        (
            Block(
                "<function=",
                partial(
                    JsonCalls, closing="</function>", head=r"(?P<name>[^<>\s{}]{1,64})>\s*", known=True, lists=False
                ),
            ),
        ),
    ),
}
