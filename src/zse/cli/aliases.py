"""Options by the names that vLLM, llama.cpp and infer give them: what each is here, or why it is refused. docs/cli.md
lists them. Read only when a command line has an option that its command does not know."""

from typing import NamedTuple

from zse.errors import ConfigError


class Alias(NamedTuple):
    """names: as they are typed; by: whose. becomes: our words, {} standing for the value ("" for none); words that do
    not begin with - go to the front, where MODEL stands. values: those of which something else becomes, or which alone
    are taken where `becomes` is None; "" among them: the value may be left out. is_flag: no value follows. why: all
    else is refused, or nothing needs to be done."""

    names: str
    by: str
    becomes: str | None = None
    values: dict[str, str] = {}
    is_flag: bool = False
    why: str = ""


_VLLM, _LLAMA = "vLLM", "llama.cpp"
_ON = "on by default"
_KV = {"auto": "", "bfloat16": "--kv-dtype bf16", "float16": "--kv-dtype f16", "fp8_e4m3": "--kv-dtype fp8",
       "q8_0": "--kv-dtype int8"}  # fmt: skip
_LAYERS = {"0": "--device cpu", "-1": "", "99": "", "100": "", "999": "", "all": "", "auto": ""}
_FOUND = dict.fromkeys(("awq", "gptq", "gptq_marlin", "awq_marlin", "compressed-tensors", "gguf"), "")

# fmt: off
ALIASES = (
    Alias("--model -m", f"{_VLLM}, {_LLAMA}", "{}"),
    Alias("-hf -hfr --hf-repo", _LLAMA, "hf:{}"),
    Alias("--served-model-name -a --alias", f"{_VLLM}, {_LLAMA}", "--model-name {}"),
    Alias("--max-num-seqs -np --parallel --max-batch-size", f"{_VLLM}, {_LLAMA}, infer", "--max-rows {}"),
    Alias("--max-num-batched-tokens -b --batch-size", f"{_VLLM}, {_LLAMA}", "--max-tokens-per-step {}"),
    Alias("-c --ctx-size", _LLAMA, "--max-context {}", {"0": ""}),
    Alias("-t", _LLAMA, "--threads {}"),
    Alias("--dtype", _VLLM, values={"auto": "", "bfloat16": "--activations bf16", "float32": "--activations f32"},
          why="weights keep the file's type; what is computed in is --activations int8, bf16 or f32"),
    Alias("--quantization -q", _VLLM, values={**_FOUND, "fp8": "--quantize fp8"},
          why="a checkpoint's quantization is found in the checkpoint; --quantize int4, int8 or fp8 makes one"),
    Alias("--kv-cache-dtype -ctk --cache-type-k -ctv --cache-type-v", f"{_VLLM}, {_LLAMA}", "--kv-dtype {}", _KV),
    Alias("--kv-cache-backend", "infer", "--kv-layout {}"),
    Alias("--block-size", f"{_VLLM}, infer", "--page-size {}"),
    Alias("--swap-space", _VLLM, "--cache-host-memory {}G"),
    Alias("--no-enable-prefix-caching", _VLLM, "--no-prefix-cache", is_flag=True),
    Alias("--no-enable-chunked-prefill", _VLLM, "--no-chunked-prefill", is_flag=True),
    Alias("--enable-prefix-caching --enable-chunked-prefill --enable-auto-tool-choice", _VLLM, "", is_flag=True, why=_ON),
    Alias("-cb --cont-batching --jinja", _LLAMA, "", is_flag=True, why=_ON),
    Alias("-fa --flash-attn", _LLAMA, values={"": "", "on": "", "auto": "", "1": ""}, why="attention is always so"),
    Alias("--enforce-eager", _VLLM, "--no-graphs", is_flag=True),
    Alias("--num-speculative-tokens --spec-length", f"{_VLLM}, infer", "--draft-tokens {}"),
    Alias("--speculative-model", _VLLM, "--draft-model {}"),
    Alias("--speculative-config", _VLLM, why="give --speculation (eagle3 and mtp are its methods' names here too), --draft-model and --draft-tokens"),
    Alias("--tool-call-parser", _VLLM, "--tool-parser {}", {"deepseek_v3": "--tool-parser deepseek"}),
    Alias("-tp", _VLLM, "--tensor-parallel-size {}"),
    Alias("-pp", _VLLM, "--pipeline-parallel-size {}"),
    Alias("--dist-init-addr --rdzv-endpoint", "SGLang, torchrun", "--rendezvous {}"),
    Alias("--master-addr --master-port", _VLLM, why="give --rendezvous HOST:PORT"),
    Alias("--headless", _VLLM, "", is_flag=True, why="--node-rank 1 and up have no HTTP"),
    Alias("--data-parallel-size -dp", _VLLM, values={"1": ""}, why="a server has one engine a model: start one for each device"),
    Alias("--cpu-offload-gb", _VLLM, values={"0": ""}, why="weights lie whole on one device; --quantize shrinks them"),
    Alias("-ngl --gpu-layers --n-gpu-layers", _LLAMA, values=_LAYERS,
          why="layers are not divided between GPU and CPU: 0 (--device cpu) or all"),
    Alias("--seed -s", f"{_VLLM}, {_LLAMA}", "--seed {}", why="a server keeps none: each request has its own `seed`"),
    Alias("--trust-remote-code", _VLLM, is_flag=True, why="code from a model is never run"),
    Alias("--tokenizer --chat-template", f"{_VLLM}, {_LLAMA}", why="a model's own tokenizer and template are used"),
    Alias("--ssl-keyfile --ssl-certfile", _VLLM, why="the server speaks plain HTTP: put a proxy with TLS before it"),
    Alias("--disable-log-requests --disable-log-stats", _VLLM, "", is_flag=True, why="neither is logged"),
    Alias("--uvicorn-log-level", _VLLM, "--log-level {}"),
    Alias("--no-mmap", _LLAMA, "", is_flag=True, why="files are read, never mapped"),
    Alias("--mlock", _LLAMA, is_flag=True, why="forbid swapping by the service or `ulimit`"),
    Alias("-n --n-predict --predict", _LLAMA, "--max-tokens {}"),
    Alias("--temp", _LLAMA, "--temperature {}"),
    Alias("--repeat-penalty", _LLAMA, "--repetition-penalty {}"),
    Alias("-sys --system-prompt", _LLAMA, "--system {}"),
)
# fmt: on
# Options that mean the same here as there.
SAME = "--tensor-parallel-size --pipeline-parallel-size --nnodes --node-rank --host --port --api-key --max-model-len --gpu-memory-utilization --generation-config --threads --otlp-traces-endpoint".split()
_BY_NAME = {name: alias for alias in ALIASES for name in alias.names.split()}


def names(known: set[str]) -> list[str]:
    """The names that something becomes of in a command with the options `known`."""
    return [name for name, alias in _BY_NAME.items() if _fits(alias, known)]


def translate(argv: list[str], known: set[str]) -> list[str]:
    """`argv` in the words of a command that has the options `known`. ConfigError for a name or a value that is
    refused."""
    front: list[str] = []
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        alias = _BY_NAME.get(name)
        if word == "--":
            return [*front, *rest, word, *words]
        # A refusal is for the commands that load a model.
        if name in known or alias is None or not (_fits(alias, known) or (alias.why and "--quantize" in known)):
            rest.append(word)
            continue
        may_be_left_out = "" in alias.values and words[:1] and words[0] not in alias.values
        if words and not (equals or alias.is_flag or may_be_left_out):
            value = words.pop(0)
        ours = _ours(alias, name, value, known)
        (rest if ours[:1] and ours[0].startswith("-") else front).extend(ours)
    return front + rest


def _ours(alias: Alias, name: str, value: str, known: set[str]) -> list[str]:
    if value in alias.values:
        return alias.values[value].split()
    if alias.becomes is None or not _fits(alias, known):
        raise ConfigError(f"{name}{f' {value}' if alias.values else ''} ({alias.by}) is not taken: {alias.why}")
    if not alias.is_flag and not value:
        raise ConfigError(f"{name}: expected one argument")
    return [part.format(value) for part in alias.becomes.split()]


def _fits(alias: Alias, known: set[str]) -> bool:
    """Whether a command that loads a model has the options that the alias becomes."""
    ours = " ".join([alias.becomes or "", *alias.values.values()]).split()
    is_refusal = alias.becomes is None and not alias.values
    return "--quantize" in known and not is_refusal and known.issuperset(word for word in ours if word[0] == "-")


def table() -> str:
    """The rows for docs/cli.md."""
    rows = ((", ".join(f"`{name}`" for name in alias.names.split()), alias.by, _told(alias)) for alias in ALIASES)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _told(alias: Alias) -> str:
    value = "VALUE" if (alias.becomes or "").startswith("-") else "MODEL"
    said = [f"`{alias.becomes.format(value)}`"] if alias.becomes else []
    for ours in dict.fromkeys(alias.values.values()):
        theirs = ", ".join(f"`{value}`" for value, words in alias.values.items() if value and words == ours)
        said.append(f"{theirs}: {f'`{ours}`' if ours else 'nothing to do'}")
    if alias.why:
        where = "where there is no such option, " if alias.becomes else "else " if said else ""
        said.append(f"nothing to do: {alias.why}" if alias.becomes == "" else f"{where}refused: {alias.why}")
    return "; ".join(said)
