"""What multi-head latent attention makes keys and values of a latent with (DeepSeek-V2, arXiv 2405.04434): one matrix
in most files, two where llama.cpp has split it. Here it is two, always, one for each way: `k_b`, of every head [rank,
nope], brings queries into the space of the latents, `v_b`, of every head [value, rank], results out of it. In the same
way, turned, the experts are read that a file has with inputs and outputs exchanged (nomic-embed-text 2).

Qwen3-Next has in one matrix, for each head of keys, the rows of b and of a of its heads of values; they are taken apart
in the same way.

They are dense in memory: in f32 a product with them loses nothing before the softmax, and they are a few hundredths of
a model. What a file has in 16 bits stays as it is, what is quantized becomes f16."""

import re
from typing import NamedTuple

from zse.errors import FormatError
from zse.formats.source import ModelSource, TensorInfo

LATENT = "latent"  # layout of what is taken out of a stored matrix
_STORED = re.compile(r"(?P<before>.*\.)(?P<name>self_attn\.kv_b_proj|attn_kv_b|attn_k_b|attn_v_b)\.weight")
# What no policy quantizes: what split() gives, and b and a of Gated DeltaNet, which say how much of a state stays.
_DENSE = re.compile(r".*(?:attn_[kv]_b|self_attn\.[kv]_b_proj|linear_attn\.in_proj_[ba]|ssm_(?:alpha|beta))\.weight")
_PAIRS = {"linear_attn.in_proj_ba.weight": "linear_attn.in_proj_{}.weight", "ssm_ba.weight": "ssm_{}.weight"}
_PAIR_NAMES = {"linear_attn.in_proj_{}.weight": ("b", "a"), "ssm_{}.weight": ("beta", "alpha")}
# Of each file's matrix: what it is called in two.
_NAMES = {"self_attn.kv_b_proj": ("self_attn.k_b_proj", "self_attn.v_b_proj"), "attn_kv_b": ("attn_k_b", "attn_v_b")}


class Cut(NamedTuple):
    """What of every head is taken: rows begin .. end - 1 of `stored`, turned: as columns. rows: what it gives a
    head."""

    stored: int
    begin: int
    end: int
    turned: bool
    rows: int


def split(source: ModelSource) -> dict[str, TensorInfo]:
    """The tensors of an open model, in place of each stored matrix the two that are computed with. FormatError for one
    whose shape is not what the configuration says."""
    found: dict[str, TensorInfo] = {}
    sizes: tuple[int, int, int] | None = None
    for name, info in source.tensors.items():
        match = _STORED.fullmatch(name)
        if match is None or source.kind == "zse":
            found[name] = info
            continue
        heads, nope, value = sizes = sizes or _sizes(source, info)
        if match["name"] in _NAMES:
            rows, rank = info.shape if len(info.shape) == 2 else (0, 0)
            if rows != heads * (nope + value):
                raise info.wrong(f"has shape {list(info.shape)}, expected {heads} heads of {nope} + {value} rows")
            both = nope + value
            cuts = Cut(both, 0, nope, True, rank), Cut(both, nope, both, False, value)
            for called, cut in zip(_NAMES[match["name"]], cuts, strict=True):
                whole = f"{match['before']}{called}.weight"
                if whole in source.tensors:  # llama.cpp has written both forms for a while
                    continue
                shape = (heads * rank, nope) if cut.turned else (heads * value, rank)
                found[whole] = _taken(whole, info, shape, cut)
        else:
            if len(info.shape) != 3 or info.shape[0] != heads:
                raise info.wrong(f"has shape {list(info.shape)}, expected {heads} matrices")
            _, rows, columns = info.shape
            flat = info._replace(shape=(heads * rows, columns))
            found[name] = _taken(name, flat, flat.shape, Cut(rows, 0, rows, False, rows))
    return found


def turn_experts(source: ModelSource) -> dict[str, TensorInfo]:
    """The tensors of an open model, in place of each stack w2 of experts [experts * inner, hidden], as megablocks keeps
    the second product of an MLP, a matrix [hidden, inner] for each: "...experts.{e}.w2". FormatError for another
    shape."""
    found: dict[str, TensorInfo] = {}
    for name, info in source.tensors.items():
        before, ending, _ = name.rpartition("mlp.w2")
        if not before.endswith(".mlp.experts."):
            found[name] = info
            continue
        count = source.num_experts or 0
        if len(info.shape) != 2 or not info.is_dense or not count or info.shape[0] % count:
            raise info.wrong(f"is {info.type} {list(info.shape)}, expected the plain rows of {count} experts")
        inner, hidden = info.shape[0] // count, info.shape[1]
        for e in range(count):
            cut = Cut(inner, 0, inner, True, hidden)
            whole = f"{before}{e}.w2"
            found[whole] = _taken(whole, info.rows(e * inner, inner), (hidden, inner), cut)
    return found


def split_pairs(source: ModelSource) -> dict[str, TensorInfo]:
    """The tensors of an open model of Qwen3-Next, in place of each that holds b and a those two. FormatError for another
    shape."""
    found: dict[str, TensorInfo] = {}
    for name, info in source.tensors.items():
        ending = next((each for each in _PAIRS if name.endswith(each)), None)
        if ending is None:
            found[name] = info
            continue
        heads, groups = _delta_heads(source, info)
        each = heads // groups
        if len(info.shape) != 2 or info.shape[0] != 2 * heads:
            raise info.wrong(f"has shape {list(info.shape)}, expected {2 * heads} rows")
        for place, called in enumerate(_PAIR_NAMES[_PAIRS[ending]]):
            whole = name.removesuffix(ending) + _PAIRS[ending].format(called)
            cut = Cut(2 * each, place * each, (place + 1) * each, False, each)
            found[whole] = _taken(whole, info, (heads, info.shape[1]), cut)
    return found


def stays_dense(name: str) -> bool:
    """Whether the tensor of that name is one that no policy quantizes."""
    return _DENSE.fullmatch(name) is not None


def _taken(name: str, info: TensorInfo, shape: tuple[int, int], cut: Cut) -> TensorInfo:
    kind = info.type if info.is_dense else "F16"
    return TensorInfo(name, kind, shape, info.file, info.offset, info.nbytes, LATENT, None, cut, {"stored": info})


def _delta_heads(source: ModelSource, info: TensorInfo) -> tuple[int, int]:
    """Heads of values and of keys of the model's configuration."""
    if source.naming == "hf":
        settings, names = source.hf_config or {}, ("linear_num_value_heads", "linear_num_key_heads")
    else:
        arch, settings = source.architecture, source.metadata
        names = (f"{arch}.ssm.time_step_rank", f"{arch}.ssm.group_count")
    heads, groups = (settings.get(name) for name in names)
    if type(heads) is not int or type(groups) is not int or not 0 < groups <= heads <= 1 << 20 or heads % groups:
        raise FormatError(source.path, 0, names[0], f"is {heads!r} of {groups!r}: {info.name} cannot be split")
    return heads, groups


def _sizes(source: ModelSource, info: TensorInfo) -> tuple[int, int, int]:
    """(heads, nope, value) of the model's configuration."""
    if source.naming == "hf":
        config = source.hf_config or {}
        config = config.get("text_config") or config
        names: tuple[str, ...] = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
        found = [config.get(name) for name in names]
    else:
        arch, meta = source.architecture, source.metadata
        names = tuple(
            f"{arch}.{name}" for name in ("attention.head_count", "attention.key_length", "attention.value_length")
        )
        # Files for llama.cpp's latent cache say of keys and values what it has in it, and of the heads' own apart.
        dims = [meta.get(f"{name}_mla", meta.get(name)) for name in names[1:]]
        rotary = meta.get(f"{arch}.rope.dimension_count")
        key = dims[0] - rotary if isinstance(dims[0], int) and isinstance(rotary, int) else None
        heads, hidden = meta.get(names[0]), meta.get(f"{arch}.embedding_length")
        if dims[1] is None and type(heads) is int and type(hidden) is int and heads > 0:
            dims[1] = hidden // heads
        found = [heads, key, dims[1]]
    for name, size in zip(names, found, strict=True):
        if type(size) is not int or not 0 < size <= 1 << 20:
            raise FormatError(source.path, 0, name, f"is {size!r}: {info.name} cannot be split into heads")
    return found[0], found[1], found[2]  # type: ignore[return-value]
