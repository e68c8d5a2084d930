"""`zse convert`: a GGUF, safetensors or `.zse` model -> a `.zse` file, quantized anew or kept as it is."""

import os
import re
from collections import namedtuple
from collections.abc import Callable, Iterator

from zse.errors import FormatError, ZSEError
from zse.formats.arrays import ScalarArray, StringArray
from zse.formats.gguf import rope_row_order
from zse.formats.source import ModelSource, TensorInfo, open_model
from zse.formats.zse_writer import PlannedTensor, ZseWriter, place_blobs, to_json
from zse.quant.policy import Policy
from zse.quant.scheme import TILE_ROWS, AffineScheme, DenseScheme, placed_planes

Progress = Callable[[int, int, str], None]
_CHUNK_ELEMENTS = 1 << 20       # rows are taken so many elements at a time: about 30 MB with all temporaries

# The order in which a step reads a layer, as parts of the names in use; only locality depends on it.
_STEPS = ("attn_norm", "input_layernorm", "attn_q", "q_proj", "attn_k", "k_proj", "attn_v", "v_proj", "q_norm",
          "k_norm", "attn_output", "o_proj", "post_attention", "ffn_norm", "pre_feedforward", "gate", "up", "down",
          "post_f")


class ConvertReport(namedtuple("ConvertReport", "path source_bytes nbytes num_tensors schemes resumed_bytes "
                                                "perplexity_before perplexity_after")):
    """What a conversion did. source_bytes, nbytes: file sizes; schemes: scheme -> bytes; resumed_bytes: weights that an
    earlier, interrupted run had written; the perplexities are None unless `evaluate` was given."""

    __slots__ = ()


def convert(source: str | os.PathLike, out: str | os.PathLike, quant: str | None = None, group_size: int | None = None,
            *, head: str | None = None, clip_search: bool = True, progress: Progress | None = None,
            evaluate: Callable[[str], float] | None = None) -> ConvertReport:
    """Writes the model `source` as the `.zse` file `out`.

    quant: int4, int5, int6, int8, f16, bf16 or f32 for the matrices (zse.quant.policy has the rule), None to keep what
    is there: GGUF's blocks become affine groups (exactly, except the scales of K types, which are rounded to f16).
    group_size: columns per scale (16 ... 256, 0 for a row; 32 by default). head: what the embedding and the LM head
    become. progress(done_bytes, total_bytes, tensor) is called after every piece. evaluate(path) -> perplexity is
    called for both files. An interrupted run is continued by the same call; `out` appears only when it is complete.
    Raises FormatError, UnsupportedError, ConfigError, and ZSEError when the disk is full.
    """
    out = os.fspath(out)
    if os.path.isdir(out):
        raise ZSEError(f"{out}: is a directory; name the .zse file to write")
    if not os.path.isdir(os.path.dirname(out) or "."):
        raise ZSEError(f"{os.path.dirname(out)}: no such directory")
    policy = Policy(quant, group_size, head) if quant else None
    if policy is None and (group_size is not None or head is not None):
        raise ZSEError("a group size or a type for the head needs --quant")
    with open_model(source) as model:
        jobs = [_Job(model, info, policy) for info in _execution_order(model)]
        small, vocabulary = _describe(model, quant, policy)
        writer = ZseWriter(out, [job.planned for job in jobs], small, vocabulary, _identity(model, clip_search))
        total = sum(job.planned.nbytes for job in jobs)
        with writer:
            done = writer.resumed_bytes
            for number, planned in writer.pending():
                for_piece = _Counter(progress, done, total, planned.name)
                writer.write(number, for_piece(jobs[number].pieces(clip_search)))
                done += planned.nbytes
                if progress:
                    progress(done, total, planned.name)
            model.check_unchanged()
            writer.finish()
        source_bytes = model.nbytes
    schemes: dict[str, int] = {}
    for job in jobs:
        schemes[job.planned.type] = schemes.get(job.planned.type, 0) + job.planned.nbytes
    return ConvertReport(out, source_bytes, writer.file_bytes, len(jobs), schemes, writer.resumed_bytes,
                         evaluate(os.fspath(source)) if evaluate else None, evaluate(out) if evaluate else None)


class _Counter:
    """Passes pieces through and reports the bytes of each."""

    def __init__(self, progress: Progress | None, done: int, total: int, name: str):
        self.progress, self.done, self.total, self.name = progress, done, total, name

    def __call__(self, pieces: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        for offset, data in pieces:
            yield offset, data
            self.done += len(data)
            if self.progress:
                self.progress(self.done, self.total, self.name)


class _Job:
    """One tensor: what it is, what it becomes (`planned`), and the pieces of that."""

    def __init__(self, model: ModelSource, info: TensorInfo, policy: Policy | None):
        self.model, self.info = model, info
        self.order, self.order_span = _row_order(model, info)
        self.scheme = self._scheme(policy)
        if self.scheme is not None:
            self.planned = PlannedTensor(info.name, "r16", self.scheme.name, info.shape)
        else:
            # What stays as rows is small; blocks of a 1-D tensor have no scheme and become f32.
            type = info.type if info.layout == "rows" else "F32"
            self.planned = PlannedTensor(info.name, "rows", type, info.shape)

    def _scheme(self, policy: Policy | None) -> AffineScheme | DenseScheme | None:
        info = self.info
        is_weight = info.layout != "rows" or info.type in ("F32", "F16", "BF16")
        if not is_weight or len(info.shape) != 2:
            return None
        wanted = policy.scheme(info.shape, self.model.vocab_size) if policy else info.scheme
        if wanted is None and info.layout != "rows":
            return info.scheme          # tiny, and already in a scheme
        return wanted if wanted is not None and wanted.fits(info.shape[1]) else None

    def pieces(self, clip_search: bool) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of the stored tensor."""
        info, chunk = self.info, self._chunk_rows()
        if self.scheme is None:
            yield from self._row_pieces(chunk)
            return
        n, k = info.shape
        placed = placed_planes(self.scheme, n, k)[0]
        for start in range(0, n, chunk):
            stop = min(start + chunk, n)
            planes = self._planes(start, stop, clip_search)
            for plane, offset in placed:
                tile_bytes = plane.nbytes // plane.shape[0]
                yield offset + start // TILE_ROWS * tile_bytes, planes[plane.name].tobytes()

    def _row_pieces(self, chunk: int) -> Iterator[tuple[int, bytes]]:
        from zse.formats.gguf_blocks import dequantize
        from zse.formats.matrix import read_raw_rows, row_bytes, rows_f32
        info = self.info
        if not info.shape:
            yield 0, self.model.read(info)
            return
        if info.layout == "ggml" and len(info.shape) == 1:      # a vector of blocks has no rows to go by
            yield 0, dequantize(info.type, self.model.read(info), info.shape).tobytes()
            return
        out_row_bytes = self.planned.nbytes // info.shape[0]
        for start in range(0, info.shape[0], chunk):
            stop = min(start + chunk, info.shape[0])
            if info.layout == "rows":
                assert row_bytes(info) == out_row_bytes
                data = read_raw_rows(self.model, info, start, stop, self.order, self.order_span)
            else:
                data = rows_f32(self.model, info, start, stop).tobytes()
            yield start * out_row_bytes, data

    def _planes(self, start: int, stop: int, clip_search: bool):
        from zse.formats import matrix
        from zse.quant.pack import pack, pack_dense
        from zse.quant.quantize import quantize
        info, scheme = self.info, self.scheme
        assert scheme is not None
        where = (self.model, info, start, stop, self.order, self.order_span)
        if info.layout == "r16" and info.scheme == scheme:
            return matrix.read_planes(self.model, info, start // TILE_ROWS, -(-stop // TILE_ROWS))
        if info.layout == "ggml" and info.scheme == scheme:
            return pack(matrix.rows_affine(*where))
        if isinstance(scheme, DenseScheme) and info.type == scheme.dtype.upper():
            return pack_dense(scheme, matrix.rows_dense(*where))
        values = matrix.rows_f32(*where)
        try:
            if isinstance(scheme, DenseScheme):
                return pack_dense(scheme, matrix.narrow(values, scheme))
            return pack(quantize(values, scheme, search=clip_search))
        except ValueError as error:
            raise FormatError(info.file.path, info.offset, info.name, f"cannot become {scheme}: {error}") from None

    def _chunk_rows(self) -> int:
        shape = self.info.shape
        per_row = max(1, self.info.num_elements // shape[0]) if shape else 1
        rows = max(1, _CHUNK_ELEMENTS // per_row)
        return max(TILE_ROWS, rows // TILE_ROWS * TILE_ROWS)


def _execution_order(model: ModelSource) -> list[TensorInfo]:
    def key(item: tuple[int, TensorInfo]):
        position, info = item
        layer = re.search(r"\.(\d{1,6})\.", info.name)
        if layer:
            step = next((rank for rank, part in enumerate(_STEPS) if part in info.name), len(_STEPS))
            return 1, int(layer[1]), step, position
        return (0 if "emb" in info.name else 2), 0, 0, position

    return [info for _, info in sorted(enumerate(model.tensors.values()), key=key)]


def _row_order(model: ModelSource, info: TensorInfo) -> tuple[list[int] | None, int]:
    """For Q and K of an interleaved GGUF: the order of rows that undoes it, and the rows of a head."""
    if not model.interleaved_rope or not info.shape:
        return None, 1
    match = re.fullmatch(r"blk\.(\d+)\.attn_([qk])\.(weight|bias)", info.name)
    if not match:
        return None, 1
    arch = model.architecture
    heads = model.metadata.get(f"{arch}.attention.head_count")
    if match[2] == "k":
        heads = model.metadata.get(f"{arch}.attention.head_count_kv", heads)
    if isinstance(heads, list):
        layer = int(match[1])
        heads = heads[layer] if layer < len(heads) else None
    if type(heads) is not int or heads <= 0 or info.shape[0] % (2 * heads):
        raise FormatError(model.path, info.offset, info.name,
                          f"{info.shape[0]} rows are not {heads!r} heads of even size")
    head_dim = info.shape[0] // heads
    return rope_row_order(heads, head_dim), head_dim


def _identity(model: ModelSource, clip_search: bool) -> bytes:
    """What a .part must have been made from to be continued."""
    stamps = []
    for file in model.files:
        status = os.fstat(file.fd)
        stamps.append([os.path.abspath(file.path), status.st_size, status.st_mtime_ns])
    return to_json([stamps, clip_search])


def _describe(model: ModelSource, quant: str | None, policy: Policy | None) -> tuple[dict[str, bytes], list[bytes]]:
    """The sections whose content is known before the weights, and the blobs of the vocabulary."""
    from zse import __version__
    config: dict[str, object] = {"naming": model.naming}
    if model.naming == "gguf":
        config["metadata"] = {key: _plain(model, key, value) for key, value in model.metadata.items()
                              if not key.startswith("tokenizer.") and key != "general.alignment"}
    else:
        config |= {"metadata": dict(model.metadata), "hf_config": model.hf_config,
                   "generation_config": model.generation_config}
    provenance = model.provenance if model.kind == "zse" and policy is None else {
        "made_by": f"zse {__version__}",
        "source": {"kind": model.kind, "files": [{"name": os.path.basename(file.path), "nbytes": file.size}
                                                 for file in model.files]},
        "quantization": {"quant": quant, "group_size": policy.group, "head": policy.head} if policy else None,
        "source_provenance": model.provenance or None,
    }
    tokenizer, vocabulary = _describe_tokenizer(model)
    sections = {"config": config, "tokenizer": tokenizer, "provenance": provenance}
    small = {name: _section(model, name, value) for name, value in sections.items() if value is not None}
    if model.chat_template is not None:
        small["template"] = model.chat_template.encode()
    return small, vocabulary


def _describe_tokenizer(model: ModelSource) -> tuple[dict | None, list[bytes]]:
    source = model.tokenizer
    if source is None:
        return None, []
    if source.kind == "hf":
        items: list[tuple[str, str, int, bytes]] = [("tokenizer.json", "bytes", -1, source.json)]
        value: dict[str, object] = {"kind": "hf", "config": source.config, "special_tokens": source.special_tokens}
    else:
        items = [(key, array.type, array.count, bytes(array.raw)) for key, array in source.fields.items()
                 if isinstance(array, StringArray | ScalarArray)]
        value = {"kind": "gguf", "fields": {key: _plain(model, key, field) for key, field in source.fields.items()
                                            if not isinstance(field, StringArray | ScalarArray)}}
    blobs = [data for *_, data in items]
    import zlib
    value["arrays"] = {
        key: {"type": type, "count": len(data) if count < 0 else count, "offset": offset, "nbytes": len(data),
              "crc32": zlib.crc32(data)}
        for (key, type, count, data), offset in zip(items, place_blobs(blobs)[0], strict=True)}
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
