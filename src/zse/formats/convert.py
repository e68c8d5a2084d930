"""`zse convert`: a GGUF, safetensors or `.zse` model -> a `.zse` file, quantized anew or kept as it is."""

import ctypes
import os
import re
import threading
import zlib
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import zse
from zse.errors import ConfigError, FormatError, ZSEError
from zse.formats.arrays import ScalarArray, StringArray
from zse.formats.column_order import order_of
from zse.formats.gguf_blocks import dequantize
from zse.formats.latent import stays_dense
from zse.formats.matrix import Rows, planes_of_rows, prepare, rows_at_once
from zse.formats.opening import open_model
from zse.formats.recommended import recommended
from zse.formats.sentence import stays_plain
from zse.formats.source import DENSE_TYPES, INTERLEAVED_ROPE, ModelSource, TensorInfo, rope_row_order
from zse.formats.zse import OFFSET_ALIGN, ORDERED, PLANE_TYPES, TOKENIZER_IMAGE
from zse.formats.zse_writer import PlannedTensor, ZseWriter, place_blobs, to_json
from zse.quant.affine import AffineScheme
from zse.quant.policy import Policy
from zse.quant.scheme import LAYOUT, ROWS, TILE_ROWS, Scheme, parse_scheme, rows_per_line

Progress = Callable[[int, int, str], None]
_CHUNK_ELEMENTS = 1 << 20  # rows are taken so many elements at a time: about 30 MB with all temporaries
_GROUPS = {"qkv": 3, "gate_up": 2}
_MEMBER = re.compile(
    r"(?P<before>.*?)(?:self_attn\.|mlp\.|attn_|ffn_)(?P<member>q|k|v|gate|up)(?:_proj)?"
    r"(?P<after>\.(?:weight|bias))"
)

# The order in which a step reads a layer, as parts of the names in use; only locality depends on it.
_STEPS = """attn_norm input_layernorm attn_q q_proj attn_k k_proj attn_v v_proj q_norm k_norm attn_output o_proj
    post_attention ffn_norm pre_feedforward gate up down post_f""".split()


class ConvertReport(
    namedtuple(
        "ConvertReport",
        "path source_bytes nbytes num_tensors schemes resumed_bytes perplexity_before perplexity_after calibration",
    )
):
    """What a conversion did. source_bytes, nbytes: file sizes; schemes: scheme -> bytes; resumed_bytes: weights that an
    earlier, interrupted run had written; the perplexities are None unless `evaluate` was given, and so is what
    `calibrate` made."""

    __slots__ = ()


def convert(
    source: str | os.PathLike,
    out: str | os.PathLike,
    quant: str | None = None,
    group_size: int | None = None,
    *,
    head: str | None = None,
    clip_search: bool = True,
    layout: str = LAYOUT,
    threads: int | None = None,
    progress: Progress | None = None,
    evaluate: Callable[[str], float] | None = None,
    max_change: float | None = None,
    tokenizer_image: Callable[[ModelSource], bytes | None] | None = None,
    calibrate: Callable[[ModelSource, set[str]], Any] | None = None,
) -> ConvertReport:
    """Writes the model `source` as the `.zse` file `out`.

    quant: int4, int5, int6, int8, fp8, f16, bf16 or f32 for the matrices (zse.quant.policy has the rule), None to keep
    what is there: GGUF's blocks become the groups that they are (exactly, except the scales of Q2_K, which are rounded to f16).
    group_size: columns per scale (16 ... 256, 0 for a row; 32 by default). head: what the embedding and the LM head
    become (without quant: only these, where they are not quantized yet). layout: of floating-point matrices, "r16" for
    the CPU's kernels or "rows" for a GPU's. threads: of NumPy (default: the processors). progress(done_bytes,
    total_bytes, tensor) is called after every piece. evaluate(path) -> perplexity is called for both files. max_change:
    ZSEError when that of the result is higher than the source's by more than this part of it; then `out` is not made.
    tokenizer_image(source): the tokenizer's tables to be stored ready-made, or None. calibrate(source, names) ->
    zse.engine.calibrate.Calibration: the tensors `names`, matrices that are quantized to integers, are rounded by what
    it says of their inputs. An interrupted run is continued by the same call, but not one that calibrates: what it
    knows is lost; `out` appears only when it is complete. Raises FormatError, UnsupportedError, ConfigError, and
    ZSEError when the disk is full."""
    out = os.fspath(out)
    if os.path.isdir(out):
        raise ZSEError(f"{out}: is a directory; name the .zse file to write")
    if not os.path.isdir(os.path.dirname(out) or "."):
        raise ZSEError(f"{os.path.dirname(out)}: no such directory")
    policy = Policy(quant, group_size, head) if quant else None
    if policy is None and group_size is not None and not (head or "").startswith("int"):
        raise ZSEError("a group size needs --quant")
    # A checkpoint that is quantized already mostly has left its embedding and head in 16 bits.
    head_policy = Policy(head, group_size) if head is not None and policy is None else None
    with open_model(source) as model, ExitStack() as opened:
        jobs = [
            _Job(model, info, _policy_for(model, info, policy, head_policy), layout) for info in _execution_order(model)
        ]
        _set_groups(jobs)
        image = tokenizer_image(model) if tokenizer_image is not None else None
        before = evaluate(os.fspath(source)) if evaluate else None
        after: float | None = None
        calibration = None
        if calibrate is not None:
            calibration = opened.enter_context(closing(calibrate(model, _rounded_names(jobs))))
        small, vocabulary = _describe(model, quant, policy, image, calibration)
        identity = _identity(model, clip_search) if calibration is None else os.urandom(16)
        writer = ZseWriter(out, [job.planned for job in jobs], small, vocabulary, identity)
        with writer:
            _write(writer, jobs, clip_search, threads or os.cpu_count() or 1, progress, calibration)
            opened.close()  # its memory is wanted for the perplexity
            model.check_unchanged()

            def accept(part: str) -> None:
                nonlocal after
                after = evaluate(part) if evaluate else None
                if after is None or before is None or max_change is None or after <= before * (1 + max_change):
                    return
                raise ZSEError(
                    f"{out} was not written: its perplexity is {after:.4g}, {after / before - 1:+.2%} from the source's "
                    f"{before:.4g}, and {max_change:.2%} were allowed"
                )

            writer.finish(accept if evaluate else None)
        source_bytes = model.nbytes
    schemes: dict[str, int] = {}
    for job in jobs:
        schemes[job.planned.type] = schemes.get(job.planned.type, 0) + job.planned.nbytes
    sizes = source_bytes, writer.file_bytes
    return ConvertReport(out, *sizes, len(jobs), schemes, writer.resumed_bytes, before, after, calibration)


def _policy_for(model: ModelSource, info: TensorInfo, policy: Policy | None, head: Policy | None) -> Policy | None:
    """head: what only dense matrices with one row per vocabulary entry get."""
    is_head = head is not None and info.is_dense and len(info.shape) == 2 and info.shape[0] == model.vocab_size
    return head if is_head else policy


def _rounded_names(jobs: list["_Job"]) -> set[str]:
    """Tensors that become integers of another scheme than they have."""
    found = {job.info.name for job in jobs if isinstance(job.scheme, AffineScheme) and job.scheme != job.info.scheme}
    if not found:
        raise ConfigError("no matrix becomes integers of another scheme than it has, so there is nothing to calibrate")
    return found


def _write(
    writer: ZseWriter,
    jobs: list["_Job"],
    clip_search: bool,
    threads: int,
    progress: Progress | None,
    calibration: Any = None,
) -> None:
    """Every pending tensor, chunk by chunk on `threads` threads: NumPy computes without the interpreter's lock.
    calibration: as of convert(); it goes from layer to layer, each of which is complete before the next one begins."""
    total, done = sum(job.planned.nbytes for job in jobs), writer.resumed_bytes
    lock, running = threading.Lock(), deque[tuple[Future, str]]()
    _keep_freed_memory()

    def run(number: int, start: int, stop: int) -> int:
        job, written = jobs[number], 0
        for plane, offset, data in job.pieces(start, stop, clip_search, threads, calibration):
            writer.write_piece(number, plane, offset, data)
            written += memoryview(data).nbytes
        with lock:
            job.chunks_left -= 1
            is_last = job.chunks_left == 0
        if is_last:
            job.prepared = None
            if job.info.crc32 is not None:
                job.model.check_sum(job.info)  # before the writer gives damaged weights a checksum that fits
            writer.end_tensor(number)
        return written

    def finish_one() -> None:
        nonlocal done
        future, name = running.popleft()
        done += future.result()
        if progress:
            progress(done, total, name)

    with ThreadPoolExecutor(threads) as pool:
        try:
            for number, planned in writer.pending():
                if calibration is not None and calibration.comes_next(planned.name):
                    while running:
                        finish_one()
                    calibration.enter(planned.name)
                span = calibration.rows_of_one(planned.name) if calibration is not None else None
                chunks = jobs[number].chunks(span)
                jobs[number].chunks_left = len(chunks)
                for start, stop in chunks:
                    running.append((pool.submit(run, number, start, stop), planned.name))
                    if len(running) > 2 * threads:  # bounds the memory that chunks take
                        finish_one()
            while running:
                finish_one()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _keep_freed_memory() -> None:
    """Have glibc keep what NumPy frees: giving every temporary back to the system and faulting it in again costs a
    fifth of the time with two threads."""
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    for option, value in ((mmap_threshold, 1 << 30), (trim_threshold, 1 << 30), (top_pad, 64 << 20)):
        mallopt(option, value)


class _Job:
    """One tensor: what it is, what it becomes (`planned`), and the pieces of that."""

    def __init__(self, model: ModelSource, info: TensorInfo, policy: Policy | None, layout: str):
        if len(info.shape) == 3 and info.is_plain:  # experts: one matrix of all their rows
            info = info._replace(shape=(info.shape[0] * info.shape[1], info.shape[2]))
        if len(info.shape) == 2 and info.name.endswith(("_exps.bias", "_proj_bias")):  # of experts: one vector
            info = info._replace(shape=(info.num_elements,))
        self.model, self.info = model, info
        self.order, self.order_span = _row_order(model, info)
        self.scheme = self._scheme(policy, layout)
        self.chunks_left = 0
        self.prepared: Any = None  # CheckpointRows, or False when there is nothing to prepare
        self._lock = threading.Lock()
        stored, name = ROWS, info.type
        if self.scheme is not None:
            stored = layout if layout in self.scheme.layouts else self.scheme.layouts[0]
            name = self.scheme.type_name(stored)
            if info.order is not None and self.scheme == info.scheme:
                name += ORDERED
        elif info.layout != "rows" or (len(info.shape) == 1 and info.type in DENSE_TYPES):
            name = "F32"  # norms and biases: kernels read f32, so that a loader has nothing to do
        self.planned = PlannedTensor(info.name, stored, name, info.shape)

    def _scheme(self, policy: Policy | None, layout: str) -> Scheme | None:
        info = self.info
        is_weight = info.layout != "rows" or info.is_dense or info.type in PLANE_TYPES[ROWS]
        if not is_weight or len(info.shape) != 2 or stays_plain(info.name):
            return None
        stored = parse_scheme("fp8-row") if info.type == "fp8-tensor" else info.scheme
        if layout == ROWS:  # for a GPU
            stored = stored.loaded("gpu")
        experts = self.model.num_experts
        wanted = (
            policy.scheme(info.shape, self.model.vocab_size, experts)
            if policy and not stays_dense(info.name)
            else stored
        )
        if wanted is None and not info.is_dense:
            return stored  # tiny, and already in a scheme
        return wanted if wanted is not None and wanted.fits(info.shape[1]) else None

    def chunks(self, span: int | None = None) -> list[tuple[int, int]]:
        """Ranges of rows that are made at once. span: rows at whose multiples a range has to end."""
        shape = self.info.shape
        if not shape or (len(shape) == 1 and self.info.layout == "ggml"):  # blocks of a vector have no rows to go by
            return [(0, 1)]
        rows = rows_at_once(self.info, _CHUNK_ELEMENTS)
        whole = range(0, shape[0], span or shape[0])
        ends = [min(first + whole.step, shape[0]) for first in whole]
        pairs = zip(whole, ends, strict=True)
        return [(start, min(start + rows, end)) for first, end in pairs for start in range(first, end, rows)]

    def pieces(
        self, start: int, stop: int, clip_search: bool, threads: int, calibration: Any = None
    ) -> Iterator[tuple[int, int, bytes]]:
        """(plane number, offset in it, bytes) of rows [start, stop) of the stored tensor."""
        if self.scheme is None:
            yield self._row_piece(start, stop)
            return
        with self._lock:
            if self.prepared is None:
                self.prepared = prepare(self.model, self.info) or False
        info, scheme, layout = self.info, self.scheme, self.planned.layout
        rows, prepared, options = self._rows(start, stop), self.prepared or None, {}
        try:
            inputs = calibration.inputs(info.name, start) if calibration is not None else None
            if inputs is not None:
                options["inputs"] = inputs
            arrays = planes_of_rows(
                rows, scheme, layout, search=clip_search, prepared=prepared, threads=threads, **options
            )
        except ValueError as error:
            raise info.wrong(f"cannot become {scheme}: {error}") from None
        if calibration is not None and info.name in calibration.names:
            calibration.rounded(info.name, start, scheme.dequantize(arrays, stop - start, info.shape[1], layout))
        for number, plane in enumerate(scheme.planes(*info.shape, layout)):
            line = start // rows_per_line(plane, layout, info.shape[0])
            yield number, line * (plane.nbytes // plane.shape[0]), arrays[plane.name].tobytes()
        if start == 0 and self.planned.type.endswith(ORDERED):
            yield number + 1, 0, order_of(info.order).tobytes()

    def _rows(self, start: int, stop: int) -> Rows:
        return Rows(self.model, self.info, start, stop, self.order, self.order_span)

    def _row_piece(self, start: int, stop: int) -> tuple[int, int, bytes]:
        info = self.info
        if not info.shape:
            return 0, 0, self.model.read(info)
        if info.layout == "ggml" and len(info.shape) == 1:
            return 0, 0, dequantize(info.type, self.model.read(info), info.shape).tobytes()
        if info.type == self.planned.type:
            data = self._rows(start, stop).raw()
        else:
            data = self._rows(start, stop).f32().tobytes()
        return 0, start * (self.planned.nbytes // info.shape[0]), data


def _set_groups(jobs: list[_Job]) -> None:
    """Joins what kernels read as one matrix: q, k, v and gate, up, where they have one type and whole tiles."""
    first = 0
    while first < len(jobs):
        key, last = _group_key(jobs[first].info.name), first + 1
        while key is not None and last < len(jobs) and _group_key(jobs[last].info.name) == key:
            last += 1
        members = [job.planned for job in jobs[first:last]]
        whole = all(member.shape and member.shape[0] % TILE_ROWS == 0 for member in members)
        whole = whole and all(size % OFFSET_ALIGN == 0 for member in members for size in member.sizes)
        same = len({(member.layout, member.type, member.shape[1:]) for member in members}) == 1
        is_complete = len(members) == _GROUPS.get((key or "").rpartition(":")[2])
        if is_complete and whole and same and "block" not in members[0].type:
            for member in members:
                member.group = key
        first = last


def _group_key(name: str) -> str | None:
    """ "...self_attn.q_proj.weight" → "...self_attn.weight:qkv"; None for a tensor that stays alone."""
    match = _MEMBER.fullmatch(name)
    if match is None:
        return None
    kind = "gate_up" if match["member"] in ("gate", "up") else "qkv"
    return f"{match['before']}{match['after']}:{kind}"


def _execution_order(model: ModelSource) -> list[TensorInfo]:
    """Norms, biases and other small things first, then the matrices as a step reads them: embedding, layers, head."""

    def key(item: tuple[int, TensorInfo]):
        position, info = item
        is_matrix = len(info.shape) >= 2
        layer = re.search(r"\.(\d{1,6})\.", info.name)
        if layer:
            step = next((rank for rank, part in enumerate(_STEPS) if part in info.name), len(_STEPS))
            is_bias = info.name.endswith(".bias")  # q's, k's and v's stand together
            return is_matrix, 1, int(layer[1]), is_bias, step, position
        return is_matrix, 0 if "emb" in info.name else 2, 0, False, 0, position

    return [info for _, info in sorted(enumerate(model.tensors.values()), key=key)]


def _row_order(model: ModelSource, info: TensorInfo) -> tuple[list[int] | None, int]:
    """For q and k of an interleaved file: the order of rows that undoes it, and the rows of a head."""
    match = re.fullmatch(
        r"(?:blk|model\.layers)\.(\d+)\.(?:attn_|self_attn\.)([qk])(?:_proj)?\.(weight|bias)", info.name
    )
    if not model.interleaved_rope or not info.shape or not match:
        return None, 1
    arch, settings = model.architecture, model.metadata
    keys = f"{arch}.attention.head_count", f"{arch}.attention.head_count_kv"
    if model.naming == "hf":
        settings, keys = model.hf_config or {}, ("num_attention_heads", "num_key_value_heads")
    heads = settings.get(keys[0])
    if match[2] == "k":
        heads = settings.get(keys[1], heads)
    if isinstance(heads, list):
        layer = int(match[1])
        heads = heads[layer] if layer < len(heads) else None
    if type(heads) is not int or heads <= 0 or info.shape[0] % (2 * heads):
        raise info.wrong(f"{info.shape[0]} rows are not {heads!r} heads of even size")
    head_dim = info.shape[0] // heads
    if model.naming == "hf":
        rope = settings.get("rope_parameters") or settings
        part = INTERLEAVED_ROPE["hf"][arch]
        part = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", part))
        turn = int(head_dim * part)
    else:
        turn = settings.get(f"{arch}.rope.dimension_count", head_dim)
    if type(turn) is not int or turn % 2 or not 0 < turn <= head_dim:
        raise info.wrong(f"{turn!r} of {head_dim} dimensions cannot turn in pairs")
    return rope_row_order(heads, head_dim, turn), head_dim


def _as_text(path: str) -> str:
    """A path as JSON can have it, also one that is not UTF-8."""
    return path.encode("utf-8", "backslashreplace").decode()


def _identity(model: ModelSource, clip_search: bool) -> bytes:
    """What a .part must have been made from to be continued."""
    stamps = []
    for file in model.files:
        status = os.fstat(file.fd)
        stamps.append([_as_text(os.path.abspath(file.path)), status.st_size, status.st_mtime_ns])
    return to_json([stamps, clip_search])


def _describe(
    model: ModelSource, quant: str | None, policy: Policy | None, image: bytes | None, calibration: Any = None
) -> tuple[dict[str, bytes], list[bytes]]:
    """The sections whose content is known before the weights, and the blobs of the vocabulary."""
    config: dict[str, object] = {"naming": model.naming}
    if model.naming == "gguf":
        config["metadata"] = {
            key: _plain(model, key, value)
            for key, value in model.metadata.items()
            if not key.startswith("tokenizer.") and key != "general.alignment"
        }
    else:
        generation = model.generation_config or recommended(model)[0] or None
        config |= {"metadata": model.metadata, "hf_config": model.hf_config, "generation_config": generation}
    files = [{"name": _as_text(os.path.basename(file.path)), "nbytes": file.size} for file in model.files]
    provenance = {
        "made_by": f"zse {zse.__version__}",
        "source": {"kind": model.kind, "files": files},
        "quantization": {"quant": quant, "group_size": policy.group, "head": policy.head} if policy else None,
        "source_provenance": model.provenance or None,
    }
    if calibration is not None:
        provenance["calibration"] = calibration.provenance
    if model.kind == "zse" and policy is None:
        provenance = model.provenance
    tokenizer, vocabulary = _describe_tokenizer(model, image)
    sections = {"config": config, "tokenizer": tokenizer, "provenance": provenance}
    small = {name: _section(model, name, value) for name, value in sections.items() if value is not None}
    if model.chat_template is not None:
        small["template"] = model.chat_template.encode()
    return small, vocabulary


def _describe_tokenizer(model: ModelSource, image: bytes | None) -> tuple[dict | None, list[bytes]]:
    source = model.tokenizer
    if source is None:
        return None, []
    items: list[tuple[str, str, int, bytes]] = []  # key, type, count, bytes
    if source.kind == "hf":
        items.append(("tokenizer.json", "bytes", len(source.json), source.json))
        value: dict[str, object] = {"kind": "hf", "config": source.config, "special_tokens": source.special_tokens}
    else:
        arrays = {key: field for key, field in source.fields.items() if isinstance(field, StringArray | ScalarArray)}
        items += [(key, array.type, array.count, bytes(array.raw)) for key, array in arrays.items()]
        fields = {key: field for key, field in source.fields.items() if key not in arrays}
        value = {"kind": "gguf", "fields": fields}
    if image is not None:
        items.append((TOKENIZER_IMAGE, "bytes", len(image), image))
    blobs = [data for *_, data in items]
    value["arrays"] = {
        key: {"type": type, "count": count, "offset": offset, "nbytes": len(data), "crc32": zlib.crc32(data)}
        for (key, type, count, data), offset in zip(items, place_blobs(blobs)[0], strict=True)
    }
    return value, blobs


def _plain(model: ModelSource, key: str, value: object) -> object:
    """A metadata value as JSON can say it."""
    if isinstance(value, StringArray):
        try:
            return [text.decode() for text in value]
        except UnicodeDecodeError:
            raise FormatError(model.path, value.offset, key, "is not UTF-8") from None
    return value.tolist() if isinstance(value, ScalarArray) else value


def _section(model: ModelSource, name: str, value: object) -> bytes:
    try:
        return to_json(value)
    except ValueError as error:
        raise FormatError(model.path, 0, name, f"cannot be written as JSON: {error}") from None
