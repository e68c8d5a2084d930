"""Where the tensors of roles are in a file, those of experts above all, and the matrices of single experts in what is
stored together.

A role of a stack has a name with one or more ways to find it (zse.models.names.EXPERTS): a tensor for each expert, or
one [E, rows, columns] for all, whose rows may be gate and up behind one another. A `.zse` has such a stack as one
matrix [E * rows, columns]."""

from zse.errors import FormatError, UnsupportedError
from zse.formats.source import FP4_LAYOUTS, IN_TURN, ModelSource, TensorInfo
from zse.models import shares, spans
from zse.models.names import Role


def stored_experts(source: ModelSource, role: Role, name: str) -> list[tuple[TensorInfo, None]]:
    """The tensor [rows, columns] of each expert of the role, each whole. FormatError names the tensor that is missing, has another
    shape, or is of more or fewer experts than the configuration says."""
    ways = [way.partition("#") for way in name.split("|")]
    found = next((way for way in ways if way[0].format(e=0) in source.tensors), ways[0])
    stored, _, part = found
    rows, columns = role.shape[0] // role.experts, role.shape[1] if len(role.shape) > 1 else 1
    if "{e}" in stored:
        if stored.format(e=role.experts) in source.tensors:
            what = f"there are more than the {role.experts} experts that the configuration says"
            raise source.tensors[stored.format(e=role.experts)].wrong(what)
        infos = [source.matrix(stored.format(e=e), (rows, role.shape[1])) for e in range(role.experts)]
    else:
        index, parts = (int(number) for number in (part or "0/1").split("/"))
        info = source.tensors.get(stored)
        if info is None:
            raise FormatError(source.path, 0, stored, "the tensor is missing")
        if len(role.shape) == 1:
            info = info._replace(shape=(*info.shape, 1))
        infos = _slices(info, role.experts, rows, columns, index, parts)
        if len(role.shape) == 1:
            infos = [each._replace(shape=(rows,)) for each in infos]
    types = {(info.layout, info.type) for info in infos}
    if len(types) > 1:
        names = sorted({kind for _, kind in types})
        raise UnsupportedError(
            f"{source.path}: types of the experts of {stored}", ", ".join(names), ["one type for all"]
        )
    return [(info, None) for info in infos]


def _slices(info: TensorInfo, experts: int, rows: int, columns: int, index: int, parts: int) -> list[TensorInfo]:
    """Part `index` of `parts` of each expert's rows in a tensor [experts, parts * rows, columns]."""
    whole = experts, parts * rows, columns
    if tuple(info.shape) not in (whole, (whole[0] * whole[1], columns)):
        count = f"{info.shape[0]} experts, the configuration says {experts}: " if len(info.shape) == 3 else ""
        count = count if info.shape[0] != experts else ""
        raise info.wrong(f"{count}has shape {list(info.shape)}, expected {list(whole)}")
    if info.layout not in FP4_LAYOUTS and (
        info.layout not in ("rows", "ggml", "r16", IN_TURN) or info.parts is not None
    ):
        raise UnsupportedError(f"{info.name}: storage of a stack of experts", info.layout, ["plain, GGUF's or .zse's"])
    flat = info._replace(shape=(experts * parts * rows, columns))
    suffix = f" part {index}" if parts > 1 else ""
    starts = (((e * parts + index) * rows, f"{info.name}[{e}]{suffix}") for e in range(experts))
    return flat.slices(starts, rows)


def stored_rows(source: ModelSource, role: Role, name: str) -> "list[tuple[TensorInfo, shares.ShareCut | None]]":
    """The tensor of a role of no experts, or those rows or columns of one that are its own (Role.runs, columns): as tensors where they can be
    read apart, else as cuts. name: "A|B" under one or the other. FormatError."""
    ways = name.split("|")
    name = next((way for way in ways if way in source.tensors), ways[0])
    if role.columns is not None:
        first, count = role.columns[0], role.shape[1]
        whole = source.matrix(name, (role.shape[0], role.columns[1]))
        # Of a name of its own: that of the whole has a checksum.
        return [shares.columns_of(whole._replace(name=f"{name} columns {first} to {first + count}"), first, count)]
    info = source.tensors.get(name)
    if info is not None and role.kind in ("vector", "decay") and info.num_elements == role.size:
        # GGUF has columns of one number, safetensors' convolutions are [C, 1, K].
        return [(info._replace(shape=role.shape), None)]
    if info is None or not role.runs or info.shape[0] != role.stored:
        return [(source.matrix(name, role.shape), None)]
    info, found = source.matrix(name, (role.stored, role.shape[1])), []
    for first, count in role.runs:
        apart = spans.reads_rows(info, first, first + count)
        part = info.rows(first, count)._replace(name=f"{name} rows {first} to {first + count}") if apart else info
        found.append((part, None if apart else shares.ShareCut((first, first + count), (0, info.shape[1]))))
    return found
