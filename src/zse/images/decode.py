"""The bytes of a PNG, JPEG or WebP to pixels of a model's size, by Pillow. Runs behind limits only (images/__main__.py).

Orientation of EXIF is applied. Transparency is laid on white: what shows through has no colour of its own, and documents are drawn for
white. 16-bit grey keeps its upper eight bits. CMYK, palettes and grey become RGB as Pillow converts them, which is what the models'
processors do. An animation is refused: which of its pictures is meant nobody says."""

import contextlib
import io
import struct
import zlib
from importlib import import_module
from typing import Any

from zse.images.messages import ResizeTo
from zse.lazy import LazyModule

# Pillow is the extra `images`: imported by load(), which says so where it is not there.
Image, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin = (
    LazyModule(f"PIL.{name}") for name in ("Image", "ImageOps", "JpegImagePlugin", "PngImagePlugin", "WebPImagePlugin")
)
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_WHITE = (255, 255, 255)
_ORIENTATION = 0x0112  # of EXIF (CIPA DC-008)
_TURNS = dict(
    enumerate("FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90".split(), 2)
)
_SWAPS = (5, 6, 7, 8)
# What Pillow raises of files that are damaged.
_DAMAGED = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, OverflowError, struct.error, zlib.error)
MAX_SIDE = 65_535  # of JPEG; PNG and WebP could say more


class ImageError(Exception):
    """Why an image is not taken, behind "the image"."""


def load() -> None:
    """Import and prepare whatever decoding needs: afterwards no file can be opened. ImportError: Pillow is not installed."""
    for name in (
        "Image",
        "ImageOps",
        "JpegImagePlugin",
        "MpoImagePlugin",
        "PngImagePlugin",
        "TiffImagePlugin",
        "WebPImagePlugin",
    ):
        import_module(f"PIL.{name}")
    made = Image.new("RGB", (2, 2))
    about = Image.Exif()
    about[_ORIENTATION] = 6
    for kind in ("PNG", "JPEG", "WEBP"):
        data = io.BytesIO()
        made.save(data, kind, exif=about)
        image = _upright(_opened(data.getvalue())).resize((4, 4), Image.Resampling.BICUBIC)
        ImageOps.pad(image, (6, 4), method=Image.Resampling.BICUBIC, color=(1, 2, 3))


@contextlib.contextmanager
def _refusing():
    try:
        yield
    except _DAMAGED as error:
        reason = "is cut off" if "truncated" in str(error) else "is damaged"
        raise ImageError(f"{reason}: it cannot be decoded") from None


class EncodedImage:
    """An image whose header has been read. Raises ImageError; MemoryError behind a limit.

    height, width: as it stands upright."""

    def __init__(self, data: bytes, max_pixels: int):
        with _refusing():
            if data.startswith(b"RIFF"):
                _check_size(_webp_size(data), max_pixels)  # Pillow would make room for it first
            image = self._image = _opened(data)
            _check_size(image.size, max_pixels)
            # A JPEG's further pictures are previews, or how bright it is.
            count = 1 if isinstance(image, JpegImagePlugin.JpegImageFile) else getattr(image, "n_frames", 1)
            if count > 1:
                raise ImageError(f"is an animation of {count} pictures: send one of them")
            self.width, self.height = image.size
            if _orientation(image) in _SWAPS:
                self.width, self.height = self.height, self.width

    def resized(self, target: ResizeTo) -> bytes:
        """Its pixels at that size, u8 [height, width, 3], behind those of the overview. Raises as above."""
        with _refusing():
            shown = _in_colour(_upright(self._image))
            size, how = (target.width, target.height), Image.Resampling[target.resample.upper()]
            if target.fill is not None:
                side, fill = target.overview, target.fill
                views = (ImageOps.pad(shown, view, method=how, color=fill) for view in ((side, side), size)[not side :])
                return b"".join(view.tobytes() for view in views)
            return (shown if shown.size == size else shown.resize(size, how)).tobytes()


def _opened(data: bytes) -> Any:
    file = io.BytesIO(data)
    if data.startswith(_PNG):
        return PngImagePlugin.PngImageFile(file)
    if data.startswith(_JPEG):
        return JpegImagePlugin.JpegImageFile(file)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImagePlugin.WebPImageFile(file)
    raise ImageError("is neither a PNG, nor a JPEG, nor a WebP")


def _check_size(size: tuple[int, int], most: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError("has no pixels")
    if width * height > most or max(width, height) > MAX_SIDE:
        raise ImageError(f"has {width} x {height} pixels; at most {most} are taken, {MAX_SIDE} in a row or column")


def _webp_size(data: bytes) -> tuple[int, int]:
    """(width, height) by the first chunk of a WebP (RFC 9649)."""
    if len(data) < 30:
        raise ImageError("is cut off: it cannot be decoded")
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _orientation(image: Any) -> int:
    """By EXIF; 1 where it has none, or one that cannot be read."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except _DAMAGED:
        return 1
    return found if isinstance(found, int) else 1


def _upright(image: Any) -> Any:
    image.load()
    turn = _TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(Image.Transpose[turn])


def _in_colour(image: Any) -> Any:
    """As RGB."""
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    shown = Image.new("RGB", seen.size, _WHITE)
    shown.paste(seen, mask=seen.getchannel("A"))
    return shown
