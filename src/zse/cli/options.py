"""Options that several commands share: the engine's and the sampler's."""

from argparse import Action, BooleanOptionalAction

from zse import lazy
from zse.cli import parser as parsers
from zse.cli import terminal
from zse.cli.parser import FLAG, SIZE, SWITCH, Amount, Group, ReadBy, arg, option
from zse.engine import llm
from zse.errors import ConfigError, ModelNotFoundError, RequestError
from zse.formats import adapter, catalog, hub, store
from zse.models import registry
from zse.sampling import fields, params

# Where a model recommends nothing. Chosen for chat with small models: a little randomness, no far tail. The API's own
# defaults (temperature 1) are OpenAI's.
DEFAULTS = {"temperature": 0.7, "top_p": 0.95}


class _Joined(Action):
    """Repeated values as one, with commas between."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


ENGINE = (
    option(
        "--device",
        "auto|cpu|cuda|hip|metal",
        "where to compute; cuda:1 is the second GPU (default: the first usable NVIDIA GPU, else the CPU); hip, an AMD GPU, and metal, an Apple GPU, have never run on hardware",
        "auto",
    ),
    option(
        "--tensor-parallel-size --tp",
        Amount(int, 1, 64, shown="N"),
        "compute each layer on N devices, a process each: N GPUs from --device on, or N shares of the CPU's threads (default: 1)",
        1,
    ),
    option(
        "--expert-parallel --enable-expert-parallel",
        FLAG,
        "with --tensor-parallel-size, experts of a mixture are whole on one of the devices each, not cut into a part for every one",
    ),
    option(
        "--data-parallel-attention --enable-dp-attention",
        FLAG,
        "with --tensor-parallel-size, of models with latent attention (DeepSeek): each rank has the attention, and the KV pages, of requests of its own",
    ),
    option(
        "--pipeline-parallel-size --pp",
        Amount(int, 1, 64, shown="N"),
        "compute the layers on N devices one behind the other, a process each; devices as of --tensor-parallel-size (default: 1)",
        1,
    ),
    option("--threads", Amount(int, 1, 1024), "CPU threads (default: ZSE_THREADS, else physical cores)"),
    option(
        "--activations",
        ("auto", "int8", "f32", "bf16", "fp8"),
        "activations of products; a CPU: int8 (default) is faster, f32 closest; a GPU: fp8 (default) from 9 tokens on, bf16 closest",
        "auto",
    ),
    option(
        "--kv-dtype",
        ("auto", "f16", "f32", "bf16", "int8", "fp8"),
        "element type of the KV cache (default: f16, on a GPU bf16); int8 and fp8 take half the memory",
        "auto",
    ),
    option(
        "--max-context --max-model-len",
        Amount(int, 16, shown="TOKENS"),
        "longest prompt + reply (default: the model's)",
    ),
    option(
        "--max-memory", SIZE, "most memory for weights, KV and scratch, for example 6G or 800M (default: what is there)"
    ),
    option(
        "--gpu-memory-utilization",
        Amount(float, 0.01, 1.0, shown="SHARE"),
        "of the memory that is free on a GPU, the share that they may take together (default: 0.95)",
    ),
    option(
        "--resident-layers",
        ReadBy(parsers.resident_layers, "LAYERS"),
        "layers whose weights stay on a GPU, or auto: as many as fit; the others' stay in host memory and are copied in every step, "
        "one ahead (default: all layers)",
    ),
    option(
        "--expert-memory",
        SIZE,
        "memory of a GPU for the experts of a mixture, for example 8G: those that tokens choose stay there, all are in host memory, "
        "from where a step copies what it misses (default: all experts on the GPU)",
    ),
    option(
        "--lazy-experts",
        FLAG,
        "on a CPU, read the experts of a mixture when a token first chooses them: what none chooses never takes memory, and the start "
        "reads the rest only; first tokens wait for their experts",
    ),
    option(
        "--quantize",
        ("int4", "int4-g32", "int4-g128", "int8", "fp8"),
        "quantize 16- and 32-bit weights while loading (`zse convert` does it once for all; fp8 is for GPUs), integers in groups "
        "of 32 columns on a CPU and 128 on a GPU, or of so many: small groups are more accurate",
    ),
    option(
        "--verify",
        SWITCH,
        "compare the checksums of all weights of a .zse before the first token, on every device; one that differs ends "
        "the start (default: on a CPU those that are stored as they are computed with, which costs no time; on a GPU none)",
        dest="verify_weights",
    ),
)
SERVING = (
    option(
        "--max-tokens-per-step",
        Amount(int, 1, 65536, shown="TOKENS"),
        "tokens of one step, replies first, the rest for chunks of prompts (default: 256, on a GPU 512 to 2048)",
    ),
    option(
        "--num-pages",
        Amount(int, 1, 1 << 22),
        "size of the KV cache in pages of 16 tokens, whatever --page-size is, of one group of layers where some see a "
        "window only (default: what memory holds, at most a context for each request)",
    ),
    option(
        "--page-size",
        ReadBy(parsers.page_size, "auto|16|32|64|128"),
        "tokens of a KV page: small pages waste less and share prefixes more finely, large ones cost less time in long "
        "contexts (default: auto, 16 up to a context of 8192 tokens, then more where the cache has many pages a request)",
        0,
    ),
    option(
        "--kv-layout",
        ("paged", "contiguous"),
        "contiguous: each request reserves the KV memory of a whole context in a row and shares nothing, so without "
        "a prefix cache; for comparison",
        "paged",
    ),
    option(
        "--graphs", SWITCH, "on a GPU, replay steps as captured graphs; without, launch by launch (default: on)", True
    ),
    option(
        "--warm-grammars",
        SWITCH,
        "start the process of structured output when the server has been idle for a second, and keep it: 50 MB for "
        "49,000 tokens, 150 MB for 262,000; without, the first such request waits 0.4 to 2 s for it (default: on beside "
        "weights of a GiB or more)",
    ),
    option(
        "--lazy-masks",
        SWITCH,
        "structured output: draw a token first and compute the mask of the vocabulary only where the grammar refuses "
        "it; the distribution is the same, and so are greedy replies (default: on, on a GPU off)",
    ),
    arg(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="compute every prompt from its beginning, instead of keeping KV pages for requests that begin alike",
    ),
    option(
        "--cache-policy",
        ("lru", "lfu", "smart"),
        "which cached pages go first: the least recently or least frequently used, or those that were worth the least",
        "lru",
    ),
    option(
        "--cache-host-memory",
        SIZE,
        "host memory for KV pages that leave the device, cold prefixes and preempted requests; for a GPU it is taken from the start on (default: none)",
        0,
    ),
    option(
        "--cache-idle-memory",
        SIZE,
        "cached KV pages that an engine on a CPU keeps when it has been idle for 10 s; the rest goes back to the "
        "system (default: twice the weights, at least 256M)",
    ),
    option(
        "--cache-disk",
        "FOLDER",
        "keep cold prefixes in files of this private folder, where the next start of the model finds them; whoever "
        "reads it can learn what users said",
    ),
    option("--cache-disk-size", SIZE, "most bytes of such files for each model (default: 4G)", 4 << 30),
    option(
        "--state-memory",
        SIZE,
        "of models with recurrent layers, memory of the device for their states beside cached prefixes, from which prompts that begin alike go on (default: an eighth of what the KV cache may take, at least one state a request, and 4 with drafts)",
    ),
    option(
        "--state-interval",
        ReadBy(int, "N"),
        "of such models, keep the state every N tokens, beside the beginnings of the last messages (default: as many tokens as have the bytes of a state in the KV cache, at least 512 and a step's)",
    ),
    option(
        "--role",
        ("both", "prefill", "decode"),
        "prefill computes prompts for other engines alone, decode asks others for the KV pages of its long prompts (default: both, which listens and asks where it is told to)",
        "both",
    ),
    option(
        "--kv-listen",
        "ADDRESS",
        "compute prompts of other engines that ask at HOST:PORT or unix:/PATH; what is sent is signed, not encrypted",
    ),
    option(
        "--kv-peers",
        "ADDRESSES",
        "engines that are asked for KV pages of long prompts, separated by commas; the one that knows the most of a prompt first",
    ),
    option(
        "--kv-secret", "FILE", "a private file of 16 random bytes and more, the same for engines that listen and ask"
    ),
    option(
        "--nnodes --nodes",
        Amount(int, 1, 64, shown="N"),
        "hosts that the ranks of --tensor-parallel-size or --pipeline-parallel-size are divided among, as many on each; the same command on each but for --node-rank (default: 1)",
        1,
    ),
    option(
        "--node-rank",
        Amount(int, 0, 63, shown="R"),
        "number of this host; 0 answers requests, the others have no HTTP, join it, and join again when the group has ended (default: 0)",
        0,
    ),
    option(
        "--rendezvous",
        "HOST:PORT",
        "where node 0 listens for the others; what is sent is signed, not encrypted, and hosts connect to each other",
    ),
    option("--group-secret", "FILE", "a private file of 16 random bytes and more, the same on all hosts"),
    option(
        "--join-timeout",
        Amount(int, 1, 86400, shown="SECONDS"),
        "how long node 0 waits for the others at a start, and they for it (default: 300)",
        300,
    ),
    option(
        "--deterministic",
        FLAG,
        "on a GPU, the same bits alone and in any batch, at the price of speed (a CPU: always, but in recurrent layers)",
    ),
    option(
        "--speculation",
        ("none", "ngram", "draft", "mtp", "eagle3"),
        "verify several drafts of a reply in one step, where that pays: ngram takes what followed the same tokens "
        "before, draft a --draft-model, mtp the model's own next-token block, eagle3 an EAGLE-3 head, which --draft-model "
        "names; the replies are the same (default: ngram, draft with a draft model)",
    ),
    option(
        "--draft-model",
        "MODEL",
        "a smaller model with the same vocabulary, or with --speculation eagle3 a head made for this model, a stored name or a "
        "path, whose drafts are verified",
    ),
    option(
        "--draft-tokens",
        Amount(int, 1, 31, shown="K"),
        "most drafts of a request in a step; fewer where they do not pay (default: 7, of a draft model 4, of mtp and eagle3 3)",
    ),
    option(
        "--draft-vocabulary",
        ReadBy(parsers.draft_vocabulary, "auto|all|IDS"),
        "of --speculation mtp: a draft is one of the first so many token ids where that pays, so that less of the head is read; "
        "what a reply holds besides decides (default: auto, 65536 of vocabularies of 98304 and more)",
    ),
    option(
        "--mmproj",
        "FILE",
        "what a GGUF model sees with, a stored name or a path (default: the mmproj-*.gguf beside the model)",
    ),
    option("--image-cache", SIZE, "host memory for embeddings of images that may come again (default: 256M)"),
    option(
        "--batching", ("continuous", "static"), "static: a batch runs to its end before the next begins", "continuous"
    ),
    option(
        "--chunked-prefill",
        SWITCH,
        "prompts are computed in chunks beside running replies; without it replies wait for them (default: on)",
        True,
    ),
    option(
        "--mixed-ratio",
        ReadBy(parsers.mixed_ratio, "X"),
        "a step with a prompt's chunk may take so many times a step without; 0: a fixed number of tokens (default: "
        "3, on a GPU 0)",
    ),
    option(
        "--preemption",
        ("recompute", "swap", "auto"),
        "when the KV cache is full, the last request in order is computed again later, or goes to host memory, or "
        "what is quicker (default: auto); at most three times",
        "auto",
    ),
    option(
        "--fair-share",
        SWITCH,
        "API keys get the engine in proportion to their weights, however much each asks (default: on)",
        True,
    ),
    option(
        "--tenant-weight",
        ReadBy(parsers.tenant_weight, "NAME=W"),
        "weight of an API key's share, by its name; others have 1; may be repeated",
        dest="tenant_weights",
        action=_Joined,
    ),
    option(
        "--ageing-ms",
        Amount(int, 0, 3_600_000, shown="MS"),
        "a request goes ahead of those that came up to so much earlier for each level of priority above theirs "
        "(default: 10000)",
        10_000,
    ),
    option(
        "--reserve-output",
        SWITCH,
        "admit a request only when the KV cache has room for the reply that is expected too (default: on)",
        True,
    ),
    option(
        "--adapter-slots",
        Amount(int, 0, 1024),
        "LoRA adapters that may be in the device's memory at once, all that running requests have (default: 16 with --adapter, else 0: "
        "none can be loaded)",
    ),
    option(
        "--adapter-rank",
        Amount(int, 1, 1024),
        "the largest rank that a slot holds (default: 16, or what --adapter needs)",
    ),
)
ENGINE_OPTIONS = Group("engine", ENGINE)


# How requests are scheduled and what is cached: every policy can be chosen and switched off, for comparison.
def quota(name: str, gib: int, of: str):
    """The row of an option that bounds bytes. of: what they are of."""
    return option(name, SIZE, f"bytes {of} (default: {gib}G)", gib << 30)


# Of `zse serve`, about documents.
DOCUMENT_OPTIONS = (
    option(
        "--documents",
        "PATH|none",
        "a SQLite file with documents that answers may cite, made with the first one (default: documents.db beside the "
        "database, else in ZSE_HOME)",
    ),
    quota("--document-quota", 4, "that the documents of a tenant may take"),
    option(
        "--ann-from",
        Amount(int, 0, shown="VECTORS"),
        "vectors of a tenant's documents from which an approximate index answers, which needs the extra ann (default: 0, never: exact)",
        0,
    ),
    option(
        "--ocr-command",
        "COMMAND",
        "reads pages of documents that are images, such as 'tesseract {image} stdout' (default: such pages have no text)",
    ),
)
# Of `zse serve`, about images in requests.
IMAGE_OPTIONS = (
    option("--max-images", Amount(int, 1, 256), "images of one request (default: 32)", 32),
    option("--max-image-bytes", SIZE, "of one (default: 20M)", 20 << 20),
    option("--max-image-pixels", Amount(int, 1, 1 << 28), "of one (default: 36000000)", 36_000_000),
)
SERVING_OPTIONS = Group("scheduling and cache", SERVING)


def values_of(args, group: Group) -> dict:
    """The parsed values of a group by the names of EngineConfig's fields that they are for."""
    names = (settings.get("dest", flags[0][2:].replace("-", "_")) for flags, settings in group.arguments)
    return {name: getattr(args, name) for name in names}


def words_of(values: dict) -> list[str]:
    """Values as words of an engine process's command line; what is None is left to it."""
    told = ((f"--{name.replace('_', '-')}", str(value)) for name, value in values.items() if value is not None)
    return [word for words in told for word in words]


def options_again(args, group: Group) -> list[str]:
    """The options of a group as they would be typed to another `zse`; what is None is left to it."""
    words: list[str] = []
    for (flags, settings), value in zip(group.arguments, values_of(args, group).values(), strict=True):
        action = settings.get("action")
        if action is BooleanOptionalAction and value is not None:
            words.append(flags[0] if value else f"--no-{flags[0][2:]}")
        elif action in ("store_true", "store_false"):
            words += [flags[0]] * (value == (action == "store_true"))
        elif value is not None:
            words += [flags[0], str(value)]
    return words


def sampling_fields() -> dict:
    """The fields of SamplingParams that have an option."""
    lazy.import_lean("msgspec")
    return {name: field for name, field in fields.fields_of(params.SamplingParams).items() if field.option}


def add_sampling_options(parser, max_tokens: int) -> None:
    """An option for each of sampling_fields(), with its range and meaning. max_tokens: its default here."""
    group = parser.add_argument_group("sampling")
    own = {"max_tokens": max_tokens, **DEFAULTS}
    for name, field in sampling_fields().items():
        default, action = own.get(name, field.default), {}
        told = "" if default in (None, ()) else f" (default: {default})"
        if name in params.RECOMMENDED:
            default, told = None, f" (default: the model's, else {default})"
        if isinstance(default, tuple):
            default, action, told = [], {"action": "append"}, "; may be repeated"
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=_parser_of(field.kind),
            default=default,
            metavar=field.option,
            help=field.doc[:1].lower() + field.doc[1:].rstrip(".").replace("%", "%%") + told,
            **action,
        )


def _parser_of(kind):
    """The argparse type of a field's values: numbers within its range; texts are checked with the rest."""
    if isinstance(kind, fields.Integer):
        return Amount(int, kind.low, kind.high)
    if isinstance(kind, fields.Number):
        return Amount(float, None if kind.above_low else kind.low, kind.high, kind.low if kind.above_low else None)
    return str


def sampling_params(values, recommended: "dict[str, float] | None" = None):
    """SamplingParams from an object that has the attributes sampling_fields(). recommended: what the model's authors
    set, for what is None there; else DEFAULTS. Raises ConfigError."""
    given = {name: value for name in sampling_fields() if (value := getattr(values, name)) is not None}
    given = (recommended or DEFAULTS) | given
    try:
        return fields.checked(params.SamplingParams(**given))
    except RequestError as error:
        raise ConfigError(str(error)) from None


def text_of(path: str) -> str:
    """A file's text. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}") from None


def locate(model: str, quantize: str | None = None, device: str = "auto") -> str:
    """The path of a model, fetched first if need be: the file that fits `device`, or the original weights to quantize."""
    if quantize and not store.is_path(model) and model in catalog.HUB_MODELS:
        model = f"{model}:{catalog.ORIGINAL}"
    try:
        return store.locate(model)
    except ModelNotFoundError:
        if not store.can_be_pulled(model):
            raise
        with terminal.ProgressBar(model) as bar:
            pulled = hub.pull(model, progress=bar, notice=terminal.notice, device=device, check=registry.name_of)
            return str(pulled)


ADAPTER = option(
    "--adapter",
    "FOLDER",
    "reply with this LoRA adapter of the model, a folder as PEFT writes it (adapter_config.json, adapter_model.safetensors)",
)
ADAPTER_RANK = 16  # of slots, at least


def rank_of(folders: list[str]) -> int:
    """The rank that slots for these adapters need. Raises FormatError or UnsupportedError for a folder that is none."""
    return max([ADAPTER_RANK, *(adapter.largest_rank(folder) for folder in folders)])


def open_llm(args, **extra):
    """The LLM of args.model, fetched first if need be."""
    path = locate(args.model, args.quantize, args.device)
    lazy.import_lean("msgspec")
    return llm.LLM(path, **values_of(args, ENGINE_OPTIONS), **extra)


def open_adapted(args, **extra):
    """(open_llm(), what its replies name args.adapter by: nothing, or {"adapter": ...})."""
    if args.adapter is None:
        return open_llm(args, **extra), {}
    opened = open_llm(args, **extra, adapter_slots=1, adapter_rank=rank_of([args.adapter]))
    try:
        return opened, {"adapter": opened.load_adapter(args.adapter)}
    except BaseException:
        opened.close()
        raise
