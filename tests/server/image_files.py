"""Files of images, sound and hostile."""

import base64
import functools
import io
import random
import struct
import zlib

from PIL import Image


def file_of(height: int = 60, width: int = 60, kind: str = "PNG", colour=(255, 0, 0), noise: bool = False, **options):
    """An image of one colour, or of noise, as a file."""
    shown = Image.new("RGB", (width, height), colour)
    if noise:
        shown = Image.frombytes("RGB", (width, height), random.Random(0).randbytes(3 * width * height))
    return saved(shown, kind, **options)


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def uri(data: bytes | None = None, media: str = "image/png") -> str:
    return f"data:{media};base64,{base64.b64encode(file_of() if data is None else data).decode()}"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 0) -> bytes:
    """A PNG with this header, whatever the chunks behind it are."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@functools.cache
def hostile() -> dict[str, tuple[bytes, str]]:
    """name → (file, words of what is said of it)."""
    noise = {kind: file_of(200, 200, kind, noise=True) for kind in ("PNG", "JPEG", "WEBP")}
    zeros = chunk(b"IDAT", zlib.compress(bytes(30 << 20), 9))
    frames = [Image.frombytes("L", (9, 9), random.Random(seed).randbytes(81)) for seed in range(3)]
    moving = dict(save_all=True, append_images=frames[1:])
    vp8x = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff" * 6 + bytes(8)
    found = {
        "a bomb by its header": (png(60000, 60000, zeros), "60000 x 60000 pixels; at most"),
        "the largest header": (png(2**31 - 1, 2**31 - 1, zeros), "pixels; at most"),
        "a long row": (png(100_000, 2, zeros), "in a row or column"),
        "no pixels": (png(0, 5, zeros), "is damaged"),
        "a depth that is none": (png(9, 9, zeros, depth=7), "is damaged"),
        "less data than pixels": (png(4000, 4000, chunk(b"IDAT", zlib.compress(b"\0" * 9))), "is cut off"),
        "no data": (png(40, 40), "is "),
        "a text that unpacks to 30 MiB": (
            png(9, 9, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(30 << 20))), zeros),
            "is ",
        ),
        "a WebP of 2^48 pixels": (b"RIFF" + struct.pack("<I", len(vp8x)) + vp8x, "16777216 x 16777216 pixels"),
        "a header with a wrong sum": (flipped(noise["PNG"], 20), "is damaged"),
        "PNG's first bytes before a JPEG": (noise["PNG"][:8] + noise["JPEG"], "is damaged"),
        "a GIF": (saved(frames[0], "GIF"), "neither a PNG, nor a JPEG, nor a WebP"),
        "a TIFF": (saved(frames[0], "TIFF"), "neither a PNG"),
        "words": (b"hello " * 99, "neither a PNG"),
        "RIFF alone": (b"RIFF", "is cut off"),
        "an animated PNG": (saved(frames[0], "PNG", **moving), "an animation of 3 pictures"),
        "an animated WebP": (saved(frames[0].convert("RGB"), "WEBP", lossless=True, **moving), "an animation of"),
        "a thread": (saved(Image.new("L", (1, 900))), "over 200 times"),
    }
    for kind, data in noise.items():
        found[f"half a {kind}"] = data[: len(data) // 2], "is "
        found[f"thirty bytes of a {kind}"] = data[:30], "is "
    return found
