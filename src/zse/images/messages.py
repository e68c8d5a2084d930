"""What the server and the process that decodes an image say to each other.

Each message is the length of its msgpack in four bytes, big-endian, and the msgpack. The server sends an ImageJob and the file's bytes;
the process answers ImageSize; the server sends the ResizeTo that the model asks for; the process answers Decoded, and the pixels. Instead of either
answer Refused may come. At the end stands the process's status in four bytes."""

import struct
from typing import Literal, NamedTuple

import msgspec

LENGTH = struct.Struct(">I")
STATUS = struct.Struct(">i")  # as waitpid(2) gives it
NO_PILLOW = 3  # exit code of the process that starts the others
CPU_S, WALL_S = 10, 20.0  # that one image may take


class ImageLimits(msgspec.Struct, array_like=True, frozen=True):
    """max_bytes: of one image's file. max_pixels: of one image, width × height by its header. max_images: of a request. cpu_s, wall_s:
    that one image may take, at most WALL_S. max_memory_bytes: of addresses that its process may take more; 0: what max_pixels need."""

    max_bytes: int
    max_pixels: int
    max_images: int = 1
    cpu_s: int = CPU_S
    wall_s: float = WALL_S
    max_memory_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Pillow has four bytes a pixel of each image that stands at once: with transparency it is decoded, turned, as RGB
        with alpha, mask and result. Beside them the file, twice, and tables."""
        return self.max_memory_bytes or (64 << 20) + 4 * self.max_bytes + 20 * self.max_pixels


class ImageJob(msgspec.Struct, array_like=True):
    """server → process. num_bytes: of the file, which follows."""

    num_bytes: int
    limits: ImageLimits


class ImageSize(msgspec.Struct, array_like=True, tag=0):
    """process → server: pixels by the header, as the image stands upright."""

    height: int
    width: int


class ResizeTo(msgspec.Struct, array_like=True):
    """server → process. In pixels. overview: side of a square in which the image comes first; 0: none does. fill: the colour
    around it, which keeps its proportions; None: it is stretched."""

    height: int
    width: int
    resample: Literal["bilinear", "bicubic"]
    overview: int = 0
    fill: tuple[int, int, int] | None = None


class Decoded(msgspec.Struct, array_like=True, tag=1):
    """process → server: so many bytes of pixels follow, rows from the top, red, green, blue."""

    num_bytes: int


class Refused(msgspec.Struct, array_like=True, tag=2):
    """process → server: why the image is not taken, behind "the image"."""

    reason: str


class DecodedImage(NamedTuple):
    """height, width: after resizing. pixels: u8 [height, width, 3], behind those of an overview; empty where only the size was asked for."""

    height: int
    width: int
    pixels: bytes


Answer = ImageSize | Decoded | Refused


def encode(message: ImageJob | ResizeTo | Answer) -> bytes:
    """A message as it is sent."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
