"""The seeded mutator of model files: python mutate.py FORMAT COUNT SEED FOLDER. test_hostile.py runs it as a process
of its own, so that its memory and a crash can be seen. Prints one JSON object; a failing mutant stays in FOLDER.

A mutant is a small valid file with a few changes: bits, extreme numbers at random places or in real fields, pieces cut
out, doubled or moved, texts changed for other texts. Half the `.zse` mutants get their checksums repaired, as an
author could. An accepted mutant must hold what an independent look at its tensors says it must.
"""

import json
import os
import random
import re
import resource
import struct
import sys
import time
import zlib

from formats_build import BLOCKS, small_gguf, small_safetensors

from zse.errors import FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.formats.verify import verify
from zse.quant.scheme import parse_scheme

EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
DENSE = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
WORDS = [
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"[]",
    b"{}",
    b'"x"',
    b"9" * 25,
    b"NaN",
    b"[[[[",
    b"0.5",
    b'"\\ud800"',
    b'"r16"',
    b'"F32"',
    b'"int4-g32"',
    b'"lut4-fp4-g32-e8m0"',
    b"18446744073709551616",
    b"9223372036854775807",
    b"4096",
    b'"gguf"',
    b'"hf"',
]
LIMIT_S = 0.2


def seeds(format: str, folder: str) -> bytes:
    if format == "gguf":
        return bytes(small_gguf())
    if format == "safetensors":
        return small_safetensors()
    path, out = os.path.join(folder, "seed.gguf"), os.path.join(folder, "seed.zse")
    with open(path, "wb") as file:
        file.write(small_gguf())
    convert(path, out)
    with open(out, "rb") as file:
        return file.read()


def repair(data: bytearray) -> None:
    """Makes the checksums of a damaged .zse right again: sections first, then the header."""
    if len(data) < 64:
        return
    count = min(struct.unpack_from("<I", data, 12)[0], (min(len(data), 4096) - 64) // 64)
    for number in range(count):
        offset, nbytes, _, flags = struct.unpack_from("<QQII", data, 64 + 64 * number + 24)
        if offset + nbytes <= len(data) and not flags:
            struct.pack_into("<I", data, 64 + 64 * number + 40, zlib.crc32(data[offset : offset + nbytes]))
    head = bytearray(data[: 64 + 64 * count])
    head[24:28] = bytes(4)
    struct.pack_into("<I", data, 24, zlib.crc32(head))


def mutate(rng: random.Random, seed: bytes, format: str) -> bytes:
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        # Headers hold the numbers: most changes go there, not into weights and padding.
        places = [match.start() for match in re.finditer(rb"[^\0]", bytes(data[:40_000]))] or [0]
        at = min(rng.choice(places), max(len(data) - 1, 0))
        kind = rng.randrange(8)
        if not data:
            break
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind in (2, 3):
            size = rng.choice((4, 8))
            value = rng.choice((*EXTREMES, len(seed) - 1, len(seed), len(seed) + 1, rng.getrandbits(16)))
            at -= at % 4 if kind == 2 else 0
            data[at : at + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        elif kind == 4:
            del data[at : at + rng.choice((1, 4, 8, 100))]
        elif kind == 5:
            data[at:at] = data[at : at + rng.choice((1, 8, 64))]
        elif kind == 6:
            del data[at:]
        else:
            numbers = list(re.finditer(rb"-?\d+|\"[a-zA-Z0-9_.-]+\"", bytes(data)))
            if numbers:
                match, other = rng.choice(numbers), rng.choice(numbers)
                new = rng.choice((*WORDS, other.group(), str(rng.choice(EXTREMES)).encode()))
                # The length is kept where it can be, so that the rest of the file stays in its place.
                data[match.start() : match.end()] = new.ljust(len(match.group())) if rng.random() < 0.8 else new
    if format == "zse" and rng.random() < 0.5:
        if rng.random() < 0.8 and len(data) >= 24:
            struct.pack_into("<Q", data, 16, len(data))
        repair(data)
    return bytes(data)


def independent_check(source, size: int) -> None:
    """What any accepted file must hold, from the shapes alone."""
    spans = []
    for name, info in source.tensors.items():
        assert name == info.name and name and info.shape is not None and len(info.shape) <= 8
        elements = 1
        for length in info.shape:
            assert length > 0
            elements *= length
        if info.type.startswith("fp8"):
            assert info.nbytes > elements
        elif info.layout == "r16":
            scheme = parse_scheme(info.type)
            rows, columns = -(-info.shape[0] // 16) * 16, info.shape[1]
            bits = {"f32": 32, "f16": 16, "bf16": 16}.get(info.type) or scheme.bits
            assert info.nbytes >= rows * columns * bits // 8
        elif info.type in BLOCKS:
            per_block, block_bytes = BLOCKS[info.type]
            assert info.shape == () or info.shape[-1] % per_block == 0
            assert info.nbytes == elements // per_block * block_bytes
        else:
            assert info.nbytes == elements * DENSE[info.type]
        for _, offset, nbytes in info.ranges():
            spans.append((offset, offset + nbytes))
            assert 0 <= offset and offset + nbytes <= size
    spans.sort()
    assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False)), "tensors overlap"


def run(format: str, count: int, seed: int, folder: str) -> dict:
    good = seeds(format, folder)
    rng = random.Random(seed)
    path = os.path.join(folder, f"mutant.{format}")
    report = {"accepted": 0, "refused": 0, "unsupported": 0, "slowest_ms": 0.0, "failures": []}
    base_kib = 0
    for number in range(count):
        data = mutate(rng, good, format) if number else good
        with open(path, "wb") as file:
            file.write(data)
        start = time.process_time()
        problem = None
        try:
            with open_model(path) as source:
                independent_check(source, len(data))
            verify(path)
            report["accepted"] += 1
        except FormatError as error:
            report["refused"] += 1
            if "\n" in str(error) or not error.field or not 0 <= error.offset < 2**64:
                problem = f"message {error!s}"
        except UnsupportedError as error:
            report["unsupported"] += 1
            problem = f"message {error!s}" if "\n" in str(error) else None
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        took_ms = 1000 * (time.process_time() - start)  # of this process: the machine may be busy with others
        if took_ms > 1000 * LIMIT_S and number > 5:
            problem = problem or f"took {took_ms:.0f} ms"
        report["slowest_ms"] = max(report["slowest_ms"], took_ms if number > 5 else 0)
        if problem:
            kept = os.path.join(folder, f"{format}-{seed}-{number}")
            os.replace(path, kept)
            report["failures"].append([number, problem, kept])
        if number == 5:
            base_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report["grown_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base_kib) / 1024
    return report


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
