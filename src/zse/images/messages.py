"""What the server and the process that decodes an image say to each other.

A job is the length of an ImageJob in four bytes, big-endian, the ImageJob in msgpack and the file's bytes. What comes back is an
answer in the same form (Decoded with the pixels behind it, or Refused), where there is one, and the process's status in four bytes."""

import struct
from typing import NamedTuple

import msgspec

from zse.images.sizes import SizeRule

LENGTH = struct.Struct(">I")
STATUS = struct.Struct(">i")  # as waitpid(2) gives it
NO_PILLOW = 3  # exit code of the process that starts the others
WALL_SLACK_S = 1.0  # beyond its time, after which a process is killed from outside


class ImageLimits(msgspec.Struct, array_like=True, frozen=True):
    """max_bytes: of one image's file. max_pixels: of one image, width × height by its header. max_images: of a request. cpu_s, wall_s:
    that one image may take."""

    max_bytes: int = 20 << 20
    max_pixels: int = 36_000_000
    max_images: int = 32
    cpu_s: int = 10
    wall_s: float = 20.0

    @property
    def memory_bytes(self) -> int:
        """Of addresses that a process may take: Pillow has four bytes a pixel of each image that stands at once (four with
        transparency: decoded, background, mask, result), the file, and tables."""
        return (64 << 20) + 4 * self.max_bytes + 20 * self.max_pixels


class ImageJob(msgspec.Struct, array_like=True):
    """server → process. num_bytes: of the file, which follows. reads: False asks for the size alone."""

    num_bytes: int
    rule: SizeRule
    limits: ImageLimits
    reads: bool = True


class Decoded(msgspec.Struct, array_like=True, tag=0):
    """process → server. height × width × 3 bytes of pixels follow, rows from the top, red, green, blue, where they were asked for."""

    height: int
    width: int


class Refused(msgspec.Struct, array_like=True, tag=1):
    """process → server: why the image is not taken, behind "the image"."""

    reason: str


class DecodedImage(NamedTuple):
    """height, width: after resizing. pixels: u8 [height, width, 3]; empty where only the size was asked for."""

    height: int
    width: int
    pixels: bytes
