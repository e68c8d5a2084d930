"""`.zse` files: the container and its reader. docs/zse-format.md is the specification; zse_writer.py writes them.

One file: a header with a section table, then page-aligned sections. Numbers are little endian. Checksums are CRC-32:
they find damage (a bad disk, a torn copy), which is all that they are for; whoever can change the file can change them
too, so every number is checked as if there were none. CRC-32 is in the standard library's zlib, which imports in
0.4 ms (hashlib: 4 ms with OpenSSL) and runs at more than 1 GB/s, faster than blake2b.
"""

import math
import struct
import zlib
from collections import namedtuple

from zse.errors import FormatError, UnsupportedError
from zse.formats.arrays import SCALARS, ScalarArray, StringArray, read_checked
from zse.formats.file import INCOMPLETE, ModelFile, parse_object
from zse.formats.source import ELEMENT_BYTES, ModelSource, TensorInfo, TokenizerSource
from zse.quant.scheme import LAYOUT, PLANE_ALIGN, ROWS, SCHEMES, Plane, parse_scheme, placed_planes

MAGIC = b"\x89ZSE\r\n\x1a\n"  # as PNG's: shows transfers that changed line ends or dropped the eighth bit
VERSION = 2
VERSIONS = (1, 2)  # 1: the planes of a tensor follow one another, no tokenizer image
PAGE = 4096
HEADER = struct.Struct("<8sIIQI36x")  # magic, version, sections, file bytes, CRC-32 of header and table
ENTRY = struct.Struct("<24sQQII16x")  # name, offset, bytes, CRC-32, flags
COVERED = 1  # flag: the section's parts have their own checksums in another section
MAX_SECTIONS = (PAGE - HEADER.size) // ENTRY.size
MAX_SMALL_BYTES = 1 << 25  # a section that is read as a whole: an index of 130,000 tensors
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1024
MAX_RANK = 8
DENSE_BYTES = {name: nbytes for name, nbytes in ELEMENT_BYTES.items() if not name.startswith("F8")}
OFFSET_ALIGN = 16  # bytes; of planes that continue those of another tensor
# name -> flags it must have. Other sections are left alone: a later version may add some.
SECTIONS = {
    "config": 0,
    "tokenizer": 0,
    "template": 0,
    "index": 0,
    "provenance": 0,
    "vocabulary": COVERED,
    "weights": COVERED,
}
TOKENIZER_IMAGE = "image"  # the tokenizer's tables as its C library uses them, among the tokenizer's arrays
REQUIRED = ("config", "index", "provenance", "weights")

Section = namedtuple("Section", "name offset nbytes crc32 flags")


def pages(offset: int) -> int:
    """The next multiple of the page size."""
    return offset + -offset % PAGE


ORDERED = "-order"  # ends the type of an integer weight with a plane "order" behind its scheme's
# Names of the types that are stored as planes, by layout.
PLANE_TYPES = {
    LAYOUT: tuple(scheme.name for scheme in SCHEMES if LAYOUT in scheme.layouts)
    + tuple(scheme.name + ORDERED for scheme in SCHEMES if scheme.kind == "affine"),
    ROWS: tuple(scheme.name for scheme in SCHEMES if scheme.layouts == (ROWS,)),
}


def tensor_planes(layout: str, type: str, shape: tuple[int, ...]) -> tuple[Plane, ...]:
    """The planes of a stored matrix, () for a tensor that is plain dense numbers. ValueError if the type cannot hold
    the shape."""
    if type not in PLANE_TYPES[layout]:
        return ()
    if len(shape) != 2:
        raise ValueError(f"rank {len(shape)} as {type}")
    planes = parse_scheme(type.removesuffix(ORDERED)).planes(*shape, layout)
    return (*planes, Plane("order", "i32", shape[1:], 4 * shape[1])) if type.endswith(ORDERED) else planes


def tensor_bytes(layout: str, type: str, shape: tuple[int, ...]) -> int:
    """Bytes of a stored tensor: of its planes, or of its elements. ValueError if the type cannot hold the shape;
    KeyError for a dense type not known."""
    planes = tensor_planes(layout, type, shape)
    if planes:
        return sum(plane.nbytes for plane in planes)
    return math.prod(shape, start=DENSE_BYTES[type])


def read_sections(file: ModelFile) -> dict[str, Section]:
    """The section table, checked: each section inside the file, page-aligned, in order, without overlap."""
    head = file.read(0, min(PAGE, file.size), "header")
    if len(head) < HEADER.size:
        raise file.wrong(0, "header", f"needs {HEADER.size} bytes, but the file ends at {file.size}{INCOMPLETE}")
    magic, version, count, file_bytes, crc32 = HEADER.unpack_from(head)
    if magic != MAGIC:
        raise file.wrong(0, "magic", "is not that of a .zse file (changed by a text-mode transfer?)")
    if version not in VERSIONS:
        raise UnsupportedError(".zse version", version, VERSIONS)
    if file_bytes != file.size:
        raise file.wrong(16, "file bytes", f"the header says {file_bytes}, the file has {file.size}{INCOMPLETE}")
    if not 0 < count <= MAX_SECTIONS or HEADER.size + count * ENTRY.size > len(head):
        raise file.wrong(12, "section count", f"{count}; 1 to {MAX_SECTIONS} are read")
    if table_crc32(head[: HEADER.size + count * ENTRY.size]) != crc32:
        raise file.wrong(24, "header checksum", "does not match: the header is damaged")
    sections: dict[str, Section] = {}
    end = HEADER.size + count * ENTRY.size
    for number in range(count):
        place = HEADER.size + number * ENTRY.size
        raw_name, offset, nbytes, section_crc32, flags = ENTRY.unpack_from(head, place)
        name = raw_name.rstrip(b"\0").decode("ascii", "replace")
        if not name.isidentifier() or name in sections:
            raise file.wrong(place, "section name", f"{name!r} is not a new name")
        if offset % PAGE or offset < end or offset > file.size or nbytes > file.size - offset:
            reason = f"are not a page-aligned range between {end} and the file's end at {file.size}"
            raise file.wrong(place + 24, f"section {name}", f"bytes [{offset}, {offset + nbytes}) {reason}")
        if flags != SECTIONS.get(name, flags):
            raise file.wrong(place + 44, f"section {name}", f"flags {flags:#x} are not {SECTIONS[name]:#x}")
        end = offset + nbytes
        sections[name] = Section(name, offset, nbytes, section_crc32, flags)
    for name in REQUIRED:
        if name not in sections:
            raise file.wrong(HEADER.size, "section table", f"section {name} is missing")
    return sections


def table_crc32(head: bytes) -> int:
    """CRC-32 of header and section table, with the checksum's own field as zeros."""
    return zlib.crc32(head[28:], zlib.crc32(bytes(4), zlib.crc32(head[:24])))


def read_small(file: ModelFile, section: Section) -> bytes:
    """The bytes of a section that has its own checksum, checked."""
    if section.nbytes > MAX_SMALL_BYTES:
        reason = f"{section.nbytes} bytes; at most {MAX_SMALL_BYTES} are read"
        raise file.wrong(section.offset, f"section {section.name}", reason)
    return read_checked(file, section.offset, section.nbytes, section.crc32, f"section {section.name}")


def _read_object(file: ModelFile, section: Section) -> dict:
    return parse_object(read_small(file, section), file.path, section.offset, f"section {section.name}")


def open_zse(file: ModelFile) -> ModelSource:
    """Reads everything but the vocabulary and the weights of an open `.zse` file, and checks it."""
    sections = read_sections(file)
    section = sections["config"]
    config = _read_object(file, section)
    naming = config.get("naming")
    if naming not in ("gguf", "hf"):
        raise file.wrong(section.offset, "naming", f"{str(naming)[:40]!r} is neither gguf nor hf")
    for key in ("metadata", "hf_config", "generation_config"):
        if not isinstance(config.get(key), dict | None):
            raise file.wrong(section.offset, key, "is not an object")
    provenance = _read_object(file, sections["provenance"])
    version = int.from_bytes(file.read(len(MAGIC), 4), "little")
    tensors = _read_index(file, sections["index"], sections["weights"], version)
    tokenizer = None
    if "tokenizer" in sections:
        tokenizer = _read_tokenizer(file, sections["tokenizer"], sections.get("vocabulary"))
    template = None
    if "template" in sections:
        try:
            template = read_small(file, sections["template"]).decode()
        except UnicodeDecodeError:
            raise file.wrong(sections["template"].offset, "section template", "is not UTF-8") from None
    metadata = config.get("metadata") or {}
    if naming == "gguf" and tokenizer is not None:
        metadata = metadata | tokenizer.fields
    return ModelSource(
        "zse",
        file.path,
        naming,
        [file],
        tensors,
        metadata=metadata,
        hf_config=config.get("hf_config"),
        generation_config=config.get("generation_config"),
        tokenizer=tokenizer,
        chat_template=template,
        provenance=provenance,
    )


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63  # type(): True is no number


def _read_index(file: ModelFile, section: Section, weights: Section, version: int) -> dict[str, TensorInfo]:
    entries = _read_object(file, section).get("tensors")
    if not isinstance(entries, list) or len(entries) > MAX_TENSORS:
        raise file.wrong(section.offset, "tensors", f"is not a list of at most {MAX_TENSORS}")
    tensors: dict[str, TensorInfo] = {}
    taken: list[tuple[int, int, str]] = []
    for number, entry in enumerate(entries):
        info = _index_entry(file, section, weights, number, entry, version)
        if info.name in tensors:
            raise file.wrong(section.offset, info.name, "stands twice in the tensor index")
        tensors[info.name] = info
        taken += [(offset, nbytes, info.name) for _, offset, nbytes in info.ranges()]
    end = 0
    for offset, nbytes, name in sorted(taken):
        if offset < end:
            raise file.wrong(offset, name, "overlaps the tensor before it")
        end = offset + nbytes
    return tensors


def _index_entry(
    file: ModelFile, section: Section, weights: Section, number: int, entry: object, version: int
) -> TensorInfo:
    def wrong(reason: str) -> FormatError:
        return file.wrong(section.offset, f"tensor {number}", reason)

    if not isinstance(entry, dict):
        raise wrong("is not an object")
    name, layout, type, shape, offset, nbytes, crc32, places = (
        entry.get(key) for key in ("name", "layout", "type", "shape", "offset", "nbytes", "crc32", "planes")
    )
    if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES:
        raise wrong(f"name is not text of 1 to {MAX_NAME_BYTES} bytes")
    if not isinstance(layout, str) or layout not in PLANE_TYPES:
        raise UnsupportedError(f"tensor {name}: layout", layout if isinstance(layout, str) else "?", PLANE_TYPES)
    types = PLANE_TYPES[layout] + (tuple(DENSE_BYTES) if layout == ROWS else ())
    if type not in types:
        raise UnsupportedError(f"tensor {name}: type", type if isinstance(type, str) else "?", types)
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_whole(size) and size for size in shape):
        raise wrong(f"{name}: shape {str(shape)[:80]} is not a list of at most {MAX_RANK} positive sizes")
    if not isinstance(offset, int) or not _whole(offset) or not _whole(nbytes) or len(str(crc32)) != 8:
        raise wrong(f"{name}: offset, nbytes or crc32 is not what it should be")
    try:
        planes, checksum = tensor_planes(layout, type, tuple(shape)), int(str(crc32), 16)
        expected = tensor_bytes(layout, type, tuple(shape))
        if planes and version == 1:  # one piece, and the padding between planes belongs to it
            n, k = shape
            expected = placed_planes(parse_scheme(type), n, k, layout)[1]
    except ValueError as error:
        raise wrong(f"{name}: {error}") from None
    if nbytes != expected:
        raise wrong(f"{name}: {type} {shape} takes {expected} bytes, the index says {nbytes}")

    def check_inside(at: int, size: int, align: int, what: str = "") -> None:
        if at % align or at > weights.nbytes or size > weights.nbytes - at:
            reason = f"are not an aligned range within the {weights.nbytes} bytes of weights"
            raise wrong(f"{name}: bytes [{at}, {at + size}){what} {reason}")

    if (places is not None) != bool(planes and version > 1):
        raise wrong(f"{name}: planes is {'missing' if places is None else 'not expected'}")
    if places is None:
        check_inside(offset, nbytes, OFFSET_ALIGN if layout == ROWS else PLANE_ALIGN)
        return TensorInfo(name, type, tuple(shape), file, weights.offset + offset, nbytes, layout, checksum)
    if not isinstance(places, list) or len(places) != len(planes) or not all(map(_whole, places)):
        raise wrong(f"{name}: planes is not a list of {len(planes)} offsets")
    for plane, at in zip(planes, places, strict=True):
        check_inside(at, plane.nbytes, OFFSET_ALIGN, f" of plane {plane.name}")
    if offset != places[0]:
        raise wrong(f"{name}: offset {offset} is not that of its first plane, {places[0]}")
    starts, order = [weights.offset + at for at in places], None
    if type.endswith(ORDERED):
        order = TensorInfo(f"{name}{ORDERED}", "I32", (shape[1],), file, starts.pop(), planes[-1].nbytes)
        type = type.removesuffix(ORDERED)
    where = file, starts[0], nbytes, layout, checksum, tuple(starts)
    return TensorInfo(name, type, tuple(shape), *where, order=order)


def _read_tokenizer(file: ModelFile, section: Section, vocabulary: Section | None) -> TokenizerSource:
    value = _read_object(file, section)

    def wrong(field: str, reason: str) -> FormatError:
        return file.wrong(section.offset, field, reason)

    kind = value.get("kind")
    if kind not in ("gguf", "hf"):
        raise wrong("kind", f"{str(kind)[:40]!r} is neither gguf nor hf")
    for key in ("fields", "config", "special_tokens", "arrays"):
        if not isinstance(value.get(key), dict | None):
            raise wrong(key, "is not an object")
    fields: dict[str, object] = dict(value.get("fields") or {})
    blobs: dict[str, tuple[int, int, int]] = {}
    for key, entry in (value.get("arrays") or {}).items():
        if key in fields or not isinstance(entry, dict) or vocabulary is None:
            raise wrong(key, "is not a described array, or stands twice, or has no vocabulary section")
        type = entry.get("type")
        described = (entry.get(name) for name in ("count", "offset", "nbytes", "crc32"))
        numbers = [number for number in described if isinstance(number, int) and _whole(number)]
        if len(numbers) != 4:
            raise wrong(key, "count, offset, nbytes or crc32 is not a whole number")
        count, offset, nbytes, crc32 = numbers
        if offset > vocabulary.nbytes or nbytes > vocabulary.nbytes - offset:
            raise wrong(key, f"bytes [{offset}, {offset + nbytes}) lie outside {vocabulary.nbytes} bytes of vocabulary")
        at = vocabulary.offset + offset
        if type == "string" and count * 8 <= nbytes:
            fields[key] = StringArray(file, at, count, nbytes, crc32)
        elif isinstance(type, str) and type in SCALARS and count * SCALARS[type][1] == nbytes:
            fields[key] = ScalarArray(file, at, type, count, crc32)
        elif type == "bytes" and count == nbytes:
            blobs[key] = (at, nbytes, crc32)
        else:
            raise wrong(key, f"{count} of {str(type)[:40]!r} do not take {nbytes} bytes")

    def reader(key: str):
        return (lambda: read_checked(file, *blobs[key], key)) if key in blobs else None

    image = reader(TOKENIZER_IMAGE)
    if kind == "gguf":
        return TokenizerSource("gguf", fields, image=image)
    if "tokenizer.json" not in blobs:
        raise wrong("tokenizer.json", "is missing")
    return TokenizerSource(
        "hf",
        read_json=reader("tokenizer.json"),
        config=value.get("config"),
        special_tokens=value.get("special_tokens"),
        image=image,
    )
