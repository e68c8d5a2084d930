"""What an engine is started with: frozen, validated once; resolve() replaces every "auto" by the value that is used."""

from collections.abc import Callable
from typing import Any, get_args

import msgspec

from zse.cache.eviction import POLICIES as CACHE_POLICIES
from zse.cache.groups import PageGeometry
from zse.cache.pages import BLOCK, PAGE_SIZES
from zse.engine.page_size import choose_pool
from zse.engine.rank_options import check_ranks, check_role, page_pools
from zse.errors import ConfigError
from zse.scheduler.options import SchedulingPolicy, parse_weights

AUTO = "auto"
AUTO_LAYERS = -1  # of resident_layers: as many as fit
DEVICES = ("auto", "cpu", "cuda", "hip", "metal")
# What each family of devices computes with; the first is what "auto" means.
ACTIVATIONS: dict[str, tuple[str, ...]] = {"cpu": ("int8", "f32"), "gpu": ("fp8", "bf16")}
KV_DTYPES = {"cpu": ("f16", "f32", "int8", "fp8"), "gpu": ("bf16", "int8", "fp8")}
# Requests at once: the fewest, and the most where their logits (ROW_BYTES a token of the vocabulary: the f32 and what
# the sampler keeps of them) take no more than ROWS_SHARE of the memory. Qwen2.5's 152,064 tokens: 311 MB for 256 rows.
MAX_ROWS = {"cpu": (64, 64), "gpu": (64, 256)}
ROW_BYTES, ROWS_SHARE = 8, 0.01
# Prompt tokens that may wait before it is known how fast they drain: what a CPU computes in minutes, a GPU in one.
QUEUE_TOKENS = {"cpu": 1 << 18, "gpu": 1 << 22}
# Whether a token may be drawn again when its step is over: a GPU runs the next one by then.
LAZY_MASKS = {"cpu": True, "gpu": False}

# The KV cache may take this share of a computer's memory when nobody says how much. It is address space: a page
# costs memory when its first token is written, so a short chat with a long-context model stays small.
KV_MEMORY_SHARE = 0.25
# Of a GPU's free memory: what the plan does not know of (graphs, another process) needs the rest.
GPU_MEMORY_SHARE = 0.95
# Tokens of one step. A CPU's step takes as long as its tokens; a GPU wants many at once to read the weights seldom, as
# far as their scratch memory stays small beside the weights. More than 2,048 gain nothing: 7,000 tokens of a 7B model
# take an H200 182 ms in steps of 8,192 and 188 ms in steps of 2,048.
STEP_TOKENS = {"cpu": (256, 256), "gpu": (512, 2048)}
# Of a GPU's step that also decodes: running replies wait 28 ms (7B, H200) for a prompt's part, not 50; a prompt token
# costs the same.
GPU_MIXED_TOKENS = 1024
# Of KV pages between a device and host memory; a guess for "auto" that errs towards computing.
HOST_BYTES_PER_S = 8e9
LEAST_IDLE_BYTES = 256 << 20  # of cached KV pages that an idle engine keeps, beside small weights
WARM_GRAMMARS_FROM = 1 << 30  # bytes of weights
# What a step with prompts may take, in decode steps (0: no bound; a GPU's time hardly depends on fewer tokens).
MIXED_RATIO = {"cpu": 3.0, "gpu": 0.0}
SCRATCH_SHARE = 0.04
# What goes to files and comes from there passes slots of the host; on a CPU it comes to pages at once.
LEAST_HOST_TOKENS = 2048
LEAST_PEER_CONTEXTS = 2  # of prompts whose pages come from other engines
# "auto" is a draft model where one is named, else prompt lookup.
SPECULATION = (AUTO, "none", "ngram", "draft", "mtp", "eagle3")
BLOCK_DRAFTS = "mtp", "eagle3"  # made of what steps of the model leave
DRAFTERS = {"draft": "the path of a smaller model", "eagle3": "the folder of an EAGLE-3 head made for this model"}
# Drafts of one request: a CPU's kernels take eight tokens in little more time than two.
DRAFT_TOKENS = {"ngram": 7, "draft": 4, "mtp": 3, "eagle3": 3}
MAX_DRAFT_TOKENS = 31
# Ids that a block drafts with where the vocabulary is half as large again: 98 % of English and code, 93 % of French (LOG).
DRAFT_VOCABULARY = 65_536
# Drafts of all requests in one step: each is a line of logits, and beyond this many a step is bound by arithmetic.
STEP_DRAFTS = {"cpu": 24, "gpu": 128}
# What an EngineConfig may have: whole numbers, from and to; words.
RANGES = {
    "threads": (1, 1024),
    "max_context": (2, 1 << 24),
    "max_rows": (1, 1024),
    "max_tokens_per_step": (1, 65536),
    "num_pages": (1, 1 << 22),
    "max_memory": (1, 1 << 50),
    "resident_layers": (-1, 1 << 16),
    "expert_memory": (1, 1 << 50),
    "max_waiting": (1, 1 << 20),
    "max_waiting_tokens": (1, 1 << 30),
    "ageing_ms": (0, 3_600_000),
    "cache_host_memory": (0, 1 << 50),
    "cache_idle_memory": (0, 1 << 50),
    "cache_disk_size": (1, 1 << 60),
    "state_memory": (0, 1 << 50),
    "state_interval": (1, 1 << 24),
    "draft_tokens": (1, MAX_DRAFT_TOKENS),
    "draft_vocabulary": (0, 1 << 24),
    "image_cache": (0, 1 << 50),
    "adapter_slots": (0, 1024),
    "adapter_rank": (1, 1024),
    "tensor_parallel_size": (1, 64),
    "pipeline_parallel_size": (1, 64),
    "nnodes": (1, 64),
    "node_rank": (0, 63),
    "join_timeout": (1, 86400),
}
CHOICES = {
    "preemption": ("recompute", "swap", "auto"),
    "batching": ("continuous", "static"),
    "activations": (AUTO, *ACTIVATIONS["cpu"], *ACTIVATIONS["gpu"]),
    "kv_dtype": (AUTO, *dict.fromkeys(KV_DTYPES["cpu"] + KV_DTYPES["gpu"])),
    "cache_policy": CACHE_POLICIES,
    "kv_layout": ("paged", "contiguous"),
    "speculation": SPECULATION,
    "role": ("both", "prefill", "decode"),
}
# What a ResolvedConfig has as the EngineConfig does.
UNCHANGED = "model max_waiting kv_layout graphs cache_policy cache_disk cache_disk_size deterministic image_cache adapter_slots adapter_rank role kv_listen kv_peers kv_secret".split()


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of `zse serve` by their names: docs/cli.md says what each means (sizes are bytes here, page_size 0
    and resident_layers -1 are auto). None and "auto" mean auto: see settle() and resolve().

    model, draft_model, mmproj: paths of a file or directory. max_waiting, max_waiting_tokens: requests, and tokens of their
    prompts, that may queue behind the running ones. tenant_weights: "name=2,other=0.5" (others: 1)."""

    model: str
    device: str = AUTO
    threads: int | None = None
    max_context: int | None = None
    max_rows: int | None = None
    max_tokens_per_step: int | None = None
    num_pages: int | None = None
    page_size: int = 0
    activations: str = AUTO
    kv_dtype: str = AUTO
    quantize: str | None = None
    verify_weights: bool | None = None
    max_memory: int | None = None
    gpu_memory_utilization: float | None = None
    resident_layers: int | None = None
    expert_memory: int | None = None
    lazy_experts: bool = False
    max_waiting: int = 1024
    warm_grammars: bool | None = None
    lazy_masks: bool | None = None
    kv_layout: str = "paged"
    graphs: bool = True
    prefix_cache: bool = True
    cache_policy: str = "lru"
    cache_host_memory: int = 0
    cache_idle_memory: int | None = None
    cache_disk: str | None = None
    cache_disk_size: int = 4 << 30
    state_memory: int | None = None
    state_interval: int | None = None
    deterministic: bool = False
    speculation: str = AUTO
    draft_model: str | None = None
    draft_tokens: int | None = None
    draft_vocabulary: int | None = None
    mmproj: str | None = None
    image_cache: int = 256 << 20
    max_waiting_tokens: int = 1 << 22
    batching: str = "continuous"
    chunked_prefill: bool = True
    fair_share: bool = True
    tenant_weights: str = ""
    ageing_ms: int = 10_000
    reserve_output: bool = True
    mixed_ratio: float | None = None
    preemption: str = "auto"
    adapter_slots: int = 0
    adapter_rank: int = 16
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    data_parallel_attention: bool = False
    pipeline_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None
    group_secret: str | None = None
    join_timeout: int = 300
    role: str = "both"
    kv_listen: str | None = None
    kv_peers: str | None = None
    kv_secret: str | None = None

    def __post_init__(self):
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not low <= value <= high):
                raise ConfigError(f"{name} {value!r} is not a whole number from {low} to {high}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} {getattr(self, name)!r} is not one of {', '.join(choices)}")
        if isinstance(self.page_size, bool) or self.page_size not in (0, *PAGE_SIZES):
            raise ConfigError(
                f"page_size {self.page_size!r} is neither 0 (auto) nor one of {', '.join(map(str, PAGE_SIZES))}"
            )
        share, ratio = self.gpu_memory_utilization, self.mixed_ratio
        if share is not None and (isinstance(share, bool) or not 0.01 <= share <= 1.0):
            raise ConfigError(f"gpu_memory_utilization {share!r} is not a number from 0.01 to 1")
        if ratio is not None and ratio != 0.0 and not 1.1 <= ratio <= 1000.0:
            raise ConfigError(f"mixed_ratio {ratio!r} is neither 0 nor a number from 1.1 to 1000")
        parse_weights(self.tenant_weights)
        if self.cache_disk is not None and not self.keeps_prefixes:
            raise ConfigError("cache_disk keeps the prefix cache, which is switched off")
        check_role(self)
        if self.speculation in DRAFTERS and self.draft_model is None:
            raise ConfigError(f"speculation {self.speculation} needs a draft_model: {DRAFTERS[self.speculation]}")
        if self.speculation in ("none", "ngram", "mtp") and self.draft_model is not None:
            raise ConfigError(f"draft_model is not used with speculation {self.speculation}: leave one of them out")
        if self.draft_vocabulary is not None and self.speculation != "mtp":
            raise ConfigError("draft_vocabulary is for speculation mtp: leave one of them out")
        name, _, number = self.device.partition(":")
        if name not in DEVICES or (number and not number.isdecimal()):
            raise ConfigError(f"device {self.device!r} is not one of {', '.join(DEVICES)} (or cuda:1, the second GPU)")
        if self.max_tokens_per_step is not None and self.max_rows is not None:
            _rows_fit(self.max_tokens_per_step, self.max_rows)
        check_ranks(self)

    @property
    def keeps_prefixes(self) -> bool:
        """Whether there is a prefix cache."""
        return self.prefix_cache and self.kv_layout == "paged"

    def to_arguments(self) -> list[str]:
        """As from_arguments() reads them."""
        told = msgspec.structs.asdict(self).items()
        defaults = {field.name: field.default for field in msgspec.structs.fields(type(self))}
        words = [(f"--{name.replace('_', '-')}", str(value)) for name, value in told if value != defaults[name]]
        return [word for pair in words for word in pair]

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> "EngineConfig":
        """Of a worker's command line: `--model PATH --max-rows 8 ...`. Raises ConfigError."""
        values: dict[str, Any] = {}
        if len(arguments) % 2:
            raise ConfigError(f"{arguments[-1]} needs a value")
        for option, text in zip(arguments[::2], arguments[1::2], strict=True):
            name = option.removeprefix("--").replace("-", "_")
            if not option.startswith("--") or name not in cls.__struct_fields__:
                known = ", ".join("--" + field.replace("_", "-") for field in cls.__struct_fields__)
                raise ConfigError(f"unknown engine option {option}; known: {known}")
            values[name] = _value(option, text, cls.__annotations__[name])
        if "model" not in values:
            raise ConfigError("--model is missing")
        return cls(**values)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What depends on the kind of device alone, settled before any memory is counted.

    draft_tokens: of a request in one step; max_drafts: of all requests together; both 0 without speculation. draft_vocabulary:
    ids that a next-token block may draft with alone, 0: all."""

    max_rows: int
    max_tokens_per_step: int
    activations: str
    kv_dtype: str
    mixed_ratio: float = 0.0
    speculation: str = "none"
    draft_tokens: int = 0
    draft_vocabulary: int = 0
    max_drafts: int = 0
    warm_grammars: bool = False
    lazy_masks: bool = False
    cache_idle_memory: int = 0


class ResolvedConfig(Settings, frozen=True, kw_only=True):
    """An EngineConfig whose every value is the one in use; num_pages: of page_size tokens; kv_bytes: the address space
    of them all. Of models with a state: state_slots on the device, state_bytes of them all, host_states in host memory,
    state_interval between snapshots, in tokens. page_pools: ranks that have num_pages of their own each."""

    model: str
    device: str
    threads: int
    max_context: int
    num_pages: int
    page_size: int
    max_waiting: int
    kv_bytes: int
    deterministic: bool
    kv_layout: str
    graphs: bool
    prefix_cache: bool
    cache_policy: str
    host_slots: int
    cache_disk: str | None
    cache_disk_size: int
    role: str
    kv_listen: str | None
    kv_peers: str | None
    kv_secret: str | None
    image_cache: int = 0
    adapter_slots: int = 0
    adapter_rank: int = 16
    state_slots: int = 0
    state_bytes: int = 0
    state_interval: int = 0
    host_states: int = 0
    page_pools: int = 1
    policy: SchedulingPolicy = SchedulingPolicy()

    all_pages = property(lambda self: self.page_pools * self.num_pages, doc="Of all ranks together.")

    @property
    def cache_bytes(self) -> int:
        """What sequences take: KV pages and states."""
        return self.kv_bytes + self.state_bytes

    @property
    def max_lines(self) -> int:
        """Lines of logits that a step samples from at most."""
        return self.max_rows + self.max_drafts

    def describe(self) -> str:
        """One line for logs and `--verbose`."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.__struct_fields__ if name != "model")


# Tokens of an encoder's step, at least: enough texts for a product's tiles.
ENCODER_TOKENS = {"cpu": 1024, "gpu": 8192}


def for_encoder(config: EngineConfig, model_context: int, family: str) -> EngineConfig:
    """The configuration of a model that only embeds: a text in one step, nothing kept between steps, nothing sampled.
    ConfigError for what needs a decoder."""
    if config.draft_model is not None or config.speculation not in (AUTO, "none"):
        raise ConfigError("an encoder writes no text: drafts have no use (leave --draft-model and --speculation out)")
    if config.adapter_slots:
        raise ConfigError(
            "an encoder writes no text: adapters are for models that do (leave --adapter and --adapter-slots out)"
        )
    tokens = config.max_tokens_per_step or max(config.max_context or model_context, ENCODER_TOKENS[family])
    return msgspec.structs.replace(
        config,
        max_rows=1,
        max_tokens_per_step=tokens,
        # Twice a step's, and what is left over in the last page of each text.
        num_pages=config.num_pages or 2 * -(-tokens // BLOCK) + 64,
        page_size=config.page_size or BLOCK,
        speculation="none",
        prefix_cache=False,
        warm_grammars=False,
        lazy_masks=False,
        kv_layout="paged",
    )


def settle(
    config: EngineConfig,
    family: str,
    *,
    weight_bytes: int = 0,
    token_bytes: Callable[[], int] = lambda: 1,
    vocab_size: int = 0,
    memory_bytes: int = 0,
) -> Settings:
    """The settings for a device of `family`.

    Args:
        weight_bytes: of the model.
        token_bytes: scratch that one token of a step takes; asked for when it matters.
        vocab_size: of the model.
        memory_bytes: what the engine may take.

    Raises ConfigError for a type that the device does not compute with."""
    fewest, most_rows = MAX_ROWS[family]
    fitting = int(ROWS_SHARE * memory_bytes / (ROW_BYTES * max(vocab_size, 1)))
    max_rows = config.max_rows or next((rows for rows in (256, 128) if rows <= min(fitting, most_rows)), fewest)
    tokens = config.max_tokens_per_step
    if tokens is None:
        tokens, most = STEP_TOKENS[family]
        each = token_bytes() if tokens < most else 0
        while tokens < most and 2 * tokens * each <= SCRATCH_SHARE * weight_bytes:
            tokens *= 2
        tokens = max(tokens, max_rows)
    if config.max_rows is None:
        max_rows = min(max_rows, tokens)
    _rows_fit(tokens, max_rows)
    if config.lazy_masks and not LAZY_MASKS[family]:
        raise ConfigError(
            "lazy_masks draws a token again when its step is over; a GPU runs the next one by then "
            "(--no-lazy-masks, --device cpu)"
        )
    speculation = config.speculation
    if speculation == AUTO:
        speculation = "ngram" if config.draft_model is None else "draft"
    drafts = 0 if speculation == "none" else config.draft_tokens or DRAFT_TOKENS[speculation]
    vocabulary = DRAFT_VOCABULARY if speculation == "mtp" and 2 * vocab_size >= 3 * DRAFT_VOCABULARY else 0
    return Settings(
        max_rows=max_rows,
        max_tokens_per_step=tokens,
        speculation=speculation,
        draft_tokens=drafts,
        draft_vocabulary=vocabulary if config.draft_vocabulary is None else config.draft_vocabulary,
        max_drafts=min(max_rows * drafts, STEP_DRAFTS[family], tokens - max_rows),
        activations=_auto("activations", config.activations, ACTIVATIONS, family),
        kv_dtype=_auto("kv_dtype", config.kv_dtype, KV_DTYPES, family),
        mixed_ratio=MIXED_RATIO[family] if config.mixed_ratio is None else config.mixed_ratio,
        warm_grammars=weight_bytes >= WARM_GRAMMARS_FROM if config.warm_grammars is None else config.warm_grammars,
        lazy_masks=LAZY_MASKS[family] if config.lazy_masks is None else config.lazy_masks,
        cache_idle_memory=(
            max(LEAST_IDLE_BYTES, 2 * weight_bytes) if config.cache_idle_memory is None else config.cache_idle_memory
        ),
    )


def _auto(name: str, value: str, choices: dict[str, tuple[str, ...]], family: str) -> str:
    if value == AUTO:
        return choices[family][0]
    if value not in choices[family]:
        raise ConfigError(
            f"{name} {value} is not for this device; it computes with {', '.join(choices[family])} "
            f"(--{name.replace('_', '-')}, --device)"
        )
    return value


def resolve(
    config: EngineConfig,
    settings: Settings,
    *,
    device: str,
    model_context: int,
    block_bytes: int,
    threads: int,
    memory_bytes: int,
    room_bytes: int | None = None,
    geometry: Callable[[int], PageGeometry] = lambda page_size: PageGeometry(page_size=page_size),
) -> ResolvedConfig:
    """Fill in what is auto. device: its name. model_context: tokens that the model was made for. block_bytes: of 16 tokens of one group of
    layers. geometry: what pages of so many tokens a sequence takes. threads: what the device runs with. memory_bytes: of the machine.
    room_bytes: what is left for KV pages (of max_memory, or of a GPU's free memory), None: a quarter of the memory.

    max_context: the model's, less where the room does not hold one such sequence. num_pages: max_rows whole contexts, within the room.
    Raises ConfigError for a max_context beyond the model's, or one that num_pages or the memory cannot hold.
    """
    memory = memory_bytes
    if config.max_context is not None and config.max_context > model_context:
        raise ConfigError(
            f"max_context {config.max_context} is more than this model's context of {model_context} tokens"
        )
    pool = choose_pool(
        config,
        settings.max_rows,
        model_context=model_context,
        block_bytes=block_bytes,
        geometry=geometry,
        room_bytes=int(memory * KV_MEMORY_SHARE) if room_bytes is None else room_bytes,
    )
    page_size, num_pages, max_context, kv_bytes = pool
    page_bytes = block_bytes * (page_size // BLOCK)
    if kv_bytes > memory:
        raise ConfigError(
            f"a KV cache of {num_pages} pages takes {kv_bytes >> 20} MiB, this machine has "
            f"{memory >> 20} MiB; lower max_context or num_pages"
        )
    slots = config.cache_host_memory // page_bytes
    least = 0 if config.cache_disk is None else LEAST_HOST_TOKENS if device == "cpu" else max_context
    if config.kv_peers is not None:
        least = max(least, LEAST_PEER_CONTEXTS * max_context)
    return ResolvedConfig(
        **msgspec.structs.asdict(settings),
        **{name: getattr(config, name) for name in UNCHANGED},
        device=device,
        threads=threads,
        max_context=max_context,
        num_pages=num_pages,
        page_size=page_size,
        kv_bytes=kv_bytes,
        prefix_cache=config.keeps_prefixes,
        host_slots=max(slots, least // page_size),
        page_pools=page_pools(config),
        policy=SchedulingPolicy(
            batching=config.batching,
            chunked_prefill=config.chunked_prefill,
            fair_share=config.fair_share,
            tenant_weights=parse_weights(config.tenant_weights),
            ageing_s=config.ageing_ms / 1000,
            max_waiting_tokens=config.max_waiting_tokens,
            reserve_output=config.reserve_output and config.kv_layout == "paged",  # else it has its pages
            mixed_ratio=settings.mixed_ratio,
            preemption=config.preemption,
            page_transfer_s=page_bytes / HOST_BYTES_PER_S,
        ),
    )


def _rows_fit(max_tokens_per_step: int, max_rows: int) -> None:
    if max_tokens_per_step < max_rows:
        raise ConfigError(
            f"max_tokens_per_step {max_tokens_per_step} is below max_rows {max_rows}: "
            "one token of each running request must fit a step"
        )


def _value(name: str, text: str, kind) -> Any:
    """`text` as a field of type `kind` has it. Booleans are True and False."""
    kinds = get_args(kind) or (kind,)
    try:
        if bool in kinds:
            return {"True": True, "False": False}[text]
        if int in kinds:
            return int(text)
        return float(text) if float in kinds else text
    except (KeyError, ValueError):
        what = "True or False" if bool in kinds else "a whole number" if int in kinds else "a number"
        raise ConfigError(f"{name} {text!r} is not {what}") from None
