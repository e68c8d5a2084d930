"""The order of a weight's columns where its groups are not ranges of columns: GPTQ's act-order (`desc_act`).

Such a checkpoint says of every input k its group g_idx[k] (GPTQModel's qlinear_torch.py; compressed-tensors'
weight_g_idx). Sorted by group, columns of a group stand together again: column j of the weight in memory is input
order[j] of the layer, and the layer's input is gathered by `order` before the product (zse.kernels.reorder). Sums have
the same terms in another order.

Where the layer's inputs are the outputs of gate and up, the rows of these are put in that order instead, and there is
nothing left to gather: act(gate) * up knows no neighbours."""

from array import array
from functools import lru_cache

from zse.formats.source import TensorInfo

G_IDX = "g_idx"  # layout of the group of each input; "rows": the order itself, as a `.zse` has it


def order_of(stored: TensorInfo, groups: int = 0) -> array:
    """i32 [K]: the input that stands at each column. stored: TensorInfo.order of a weight, or the group of each input.
    groups: how many there are, where that is known. FormatError for what is no order, or groups of different sizes."""
    data = stored.file.read(stored.offset, stored.nbytes, stored.name)
    try:
        return _by_group(data, groups) if stored.layout == G_IDX else _checked(data)
    except ValueError as error:
        raise stored.wrong(str(error)) from None


@lru_cache(maxsize=64)  # q, k and v have the same one, and who plans and who loads ask
def _by_group(data: bytes, groups: int) -> array:
    values = array("i", data)
    if min(values) < 0 or max(values) >= len(values):
        raise ValueError("names a group that there cannot be")
    members: list[list[int]] = [[] for _ in range(max(values) + 1)]
    for column, group in enumerate(values):
        members[group].append(column)
    if groups and len(members) != groups:
        raise ValueError(f"names {len(members)} groups, its scales have {groups}")
    for number, found in enumerate(members):
        if len(found) != len(members[0]):
            raise ValueError(
                f"group {number} has {len(found)} columns, the first has {len(members[0])}: they must be equal"
            )
    return array("i", [column for group in members for column in group])


@lru_cache(maxsize=64)
def _checked(data: bytes) -> array:
    values = array("i", data)
    if len(set(values)) != len(values) or min(values) != 0 or max(values) != len(values) - 1:
        raise ValueError("does not name every column once")
    return values


def is_trivial(stored: TensorInfo, group: int) -> bool:
    """Whether every group of `group` columns is a range of them, one after the other."""
    return stored.file.read(stored.offset, stored.nbytes, stored.name) == _ranges(stored.shape[0], group)


@lru_cache(maxsize=16)
def _ranges(columns: int, group: int) -> bytes:
    return array("i", [column // group for column in range(columns)]).tobytes()


def fold(tensors: dict[str, TensorInfo]) -> None:
    """Give the rows of gate and up the order that down's inputs need, wherever a checkpoint quantized all three."""
    for name, down in list(tensors.items()):
        stem, end = name.removesuffix("down_proj.weight"), "_proj.weight"
        makers = [f"{stem}gate{end}", f"{stem}up{end}"]
        if down.order is None or down.order.layout != G_IDX or stem == name:
            continue
        infos = [
            tensors[maker] for maker in makers if maker in tensors and maker.replace("weight", "bias") not in tensors
        ]
        if len(infos) < 2 or any("q" not in (info.parts or ()) or info.shape[0] != down.shape[1] for info in infos):
            continue
        for info in infos:
            tensors[info.name] = info._replace(parts=info.parts | {"rows": down.order})
        tensors[name] = down._replace(order=None)
