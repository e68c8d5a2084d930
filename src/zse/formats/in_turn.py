"""Stacks of experts as Hugging Face folders of gpt-oss and of Qwen3-VL store them: in 16 bits every matrix turned, a line
of numbers for each of its columns; gpt-oss' rows of gate and up of an expert in turn (gate 0, up 0, gate 1, ...).

Here they are tensors of their own, `gate_proj`, `up_proj` and `down_proj`, whose rows are taken out of what is stored
while they are read: bit for bit, blocks of MXFP4 with their scales."""

from typing import NamedTuple

from zse.errors import UnsupportedError
from zse.formats.source import FP4_LAYOUTS, IN_TURN, ModelSource, TensorInfo

STORED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Turn(NamedTuple):
    """Rows first, first + step, ... of those that are stored. matrix: rows that each of the matrices gives whose
    columns are stored as lines; 0: rows are. in_blocks: of such, the rows of block `first` of `step`."""

    first: int
    step: int
    matrix: int = 0
    in_blocks: bool = False


def split(source: ModelSource) -> dict[str, TensorInfo]:
    """The tensors of an open folder of gpt-oss, in place of each stack of experts those that are computed with.
    FormatError, UnsupportedError for one that is stored in no such way."""
    return _members(source, in_blocks=False)


def split_blocks(source: ModelSource) -> dict[str, TensorInfo]:
    """The tensors of an open folder of Qwen3-VL with experts, likewise, but for stacks whose matrices are not turned, as
    transformers 5 has them in memory. FormatError, UnsupportedError."""
    return _members(source, in_blocks=True)


def _members(source: ModelSource, in_blocks: bool) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    hidden = ((source.hf_config or {}).get("text_config") or {}).get("hidden_size")
    for name, info in source.tensors.items():
        before, _, stored = name.rpartition(".mlp.experts.")
        stem = stored.removesuffix("_bias")
        is_turned = not in_blocks or len(info.shape) != 3 or info.shape[2 if stem == "gate_up_proj" else 1] != hidden
        if not before or stem not in STORED or not is_turned:
            found[name] = info
            continue
        members = STORED[stem]
        for first, member in enumerate(members):
            called = f"{before}.mlp.experts.{member}" + stored.removeprefix(stem)
            found[called] = _member(called, info, Turn(first, len(members), 0, in_blocks), stored != stem)
    return found


def _member(name: str, info: TensorInfo, turn: Turn, is_bias: bool) -> TensorInfo:
    first, step = turn[:2]
    if info.layout in FP4_LAYOUTS:
        parts = {role: _every(part.name, part, first, step) for role, part in info.parts.items()}
        return info._replace(name=name, shape=(info.shape[0] // step, info.shape[1]), parts=parts)
    if not info.is_dense:
        raise UnsupportedError(f"{info.name}: storage of experts", info.layout, ["MXFP4 blocks", "BF16, F16, F32"])
    if len(info.shape) != (2 if is_bias else 3) or info.shape[-1] % step:
        raise info.wrong(f"has shape {list(info.shape)}, expected experts with {step} times as many rows as each is of")
    experts, rows = info.shape[0], info.shape[-1] // step
    if is_bias:
        return _every(name, info._replace(shape=(experts * info.shape[1],)), first, step)
    shape = experts * rows, info.shape[1]
    return info._replace(name=name, shape=shape, layout=IN_TURN, turn=turn._replace(matrix=rows))


def _every(name: str, info: TensorInfo, first: int, step: int) -> TensorInfo:
    """Each step-th line of a tensor. Its bytes are those of all of them: a line has `step` of the stored ones."""
    if step == 1:
        return info._replace(name=name)
    if info.shape[0] % step:
        raise info.wrong(f"has {info.shape[0]} rows, which are not gate and up in turn")
    return info._replace(
        name=name, shape=(info.shape[0] // step, *info.shape[1:]), layout=IN_TURN, turn=Turn(first, step)
    )
