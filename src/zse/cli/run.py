"""zse run: one prompt, one reply, streamed. The engine runs in this process: the fastest way from exec to the first
token."""

import sys

from zse.bench import process
from zse.cli.options import ADAPTER, ENGINE_OPTIONS, add_sampling_options, open_adapted, sampling_params, text_of
from zse.cli.parser import CONFIG, FLAG, Group, arg, option
from zse.cli.terminal import reply_writer
from zse.engine.metrics import since_exec_clock
from zse.errors import ConfigError
from zse.structured import options

_clock = since_exec_clock()  # when this module is imported: the earlier, the truer

EPILOG = """examples:
  zse run smollm2 "Why is the sky blue?"
  cat notes.txt | zse run smollm2 "Summarize in one sentence:" -
  zse run smollm2 "Name a colour" --choice red --choice green
  zse run gemma3-270m --raw "The capital of France is" --temperature 0 --max-tokens 8

Without a PROMPT, or where PROMPT has the word -, standard input is read. The reply goes to standard output,
everything else to standard error."""

DEFAULT_MAX_TOKENS = 512


ARGUMENTS = (
    arg("model", metavar="MODEL", help="a name, hf:ORG/NAME, or a path; a missing catalog model is fetched"),
    arg("prompt", metavar="PROMPT", nargs="*", help="the words of the prompt; - stands for standard input"),
    option("--system", "TEXT", "system message (default: the model's own, if its template has one)"),
    ADAPTER,
    option("--raw", FLAG, "continue the text as it is: no chat template (base models always do)"),
    option("--stats", FLAG, "print speed, memory and the start-up phases to standard error at the end"),
    Group(
        "structure",
        (
            option("--json-schema", "FILE", "the reply is JSON of this schema; - for any JSON object"),
            option("--regex", "PATTERN", "the reply is text that the whole pattern matches"),
            option("--choice", "TEXT", "the reply is one of these texts (give several)", action="append"),
            option("--grammar", "FILE", "the reply is text of a grammar in GBNF or Lark"),
        ),
        is_exclusive=True,
    ),
    lambda parser: add_sampling_options(parser, DEFAULT_MAX_TOKENS),
    ENGINE_OPTIONS,
    CONFIG,
)


def run(args) -> int:
    sampling_params(args)  # what it refuses, it refuses before the model is read
    structure = _structure(args)
    llm, adapter = open_adapted(args, max_rows=1, prepare_chat=not args.raw)
    try:
        if structure is not None:
            llm.prepare_structure()  # while the prompt is read
        params = sampling_params(args, llm.recommended)
        prompt = _prompt(args.prompt)
        if not prompt:
            raise ConfigError('the prompt is empty: zse run MODEL "your question"')
        raw = args.raw or not llm.has_chat_template
        if raw and args.system:
            raise ConfigError(
                "--system needs a chat template: this is a base model"
                if not args.raw
                else "--system and --raw exclude each other"
            )
        if raw:
            deltas = llm.stream(prompt, params, structure=structure, **adapter)
        else:
            system = [{"role": "system", "content": args.system}] if args.system else []
            messages = [*system, {"role": "user", "content": prompt}]
            deltas = llm.stream_chat(messages, params, structure=structure, **adapter)
        times = _print_stream(deltas)
        if args.stats:
            sys.stderr.write(_stats(llm, *times))
    finally:
        llm.close()
    return 0


def _structure(args):
    """The Structure that the options ask for, or None. Raises RequestError or ConfigError."""
    fields = {"regex": args.regex, "choice": args.choice}
    if args.json_schema is not None:
        fields["json"] = True if args.json_schema == "-" else text_of(args.json_schema)
    if args.grammar is not None:
        fields["grammar"] = text_of(args.grammar)
    if all(value is None for value in fields.values()):
        return None
    return options.read_structure(fields)


def _prompt(words: list[str]) -> str:
    """The prompt's words joined by spaces, with standard input in the place of `-` or of no words at all."""
    if words and "-" not in words:
        return " ".join(words)
    if sys.stdin.isatty():
        sys.stderr.write("type the prompt, end it with Ctrl-D on an empty line\n")
    text = sys.stdin.buffer.read().decode("utf-8", errors="replace").rstrip("\n")
    if not words:
        return text
    head, tail = words[: words.index("-")], words[words.index("-") + 1 :]
    return "\n\n".join(part for part in (" ".join(head), text, " ".join(tail)) if part)


def _print_stream(deltas) -> tuple[float, float, int]:
    """Print the reply as it comes. Returns seconds since exec at the first and last token, and the number of tokens."""
    write = reply_writer(sys.stdout)
    first = last = 0.0
    num_tokens = 0
    end = ""
    try:
        for delta in deltas:
            last = _clock()
            first = first or last
            num_tokens += len(delta.token_ids)
            if delta.text:
                write(delta.text)
                end = delta.text[-1]
    finally:
        if end != "\n":
            write("\n")
    return first, last, num_tokens


def _stats(llm, first: float, last: float, num_tokens: int) -> str:
    """Times since exec, speed, memory. first, last: seconds since exec at the first and last token; llm.phases_ms: name
    → milliseconds since exec."""
    lines = [("tokens", str(num_tokens))]
    if num_tokens:
        lines.append(("exec to first token", f"{1000 * first:.0f} ms"))
    if num_tokens > 1 and last > first:
        lines.append(("decode", f"{(num_tokens - 1) / (last - first):.1f} tok/s"))
    lines.append(("peak memory", f"{process.peak_memory_bytes() / 2**20:.0f} MiB"))
    lines += [(f"  {name}", f"{ms:.0f} ms") for name, ms in llm.phases_ms.items()]
    return "".join(f"{name:<32}{value}\n" for name, value in lines)
