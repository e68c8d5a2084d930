"""The bytes of a PNG, JPEG or WebP to pixels of a model's size, by Pillow. Runs behind limits only (images/__main__.py).

Orientation of EXIF is applied. Transparency is laid on white: what shows through has no colour of its own, and documents are drawn for
white. 16-bit grey keeps its upper eight bits. CMYK, palettes and grey become RGB as Pillow converts them, which is what the models'
processors do. An animation is refused: which of its pictures is meant nobody says."""

import io
import struct
import zlib

from PIL import Image, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin

from zse.images.messages import DecodedImage, ImageJob
from zse.images.sizes import target_size

_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_WHITE = (255, 255, 255)
_ORIENTATION = 0x0112  # of EXIF (CIPA DC-008)
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPS = (5, 6, 7, 8)
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
# What Pillow raises of files that are damaged.
_DAMAGED = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, OverflowError, struct.error, zlib.error)
MAX_SIDE = 65_535  # of JPEG; PNG and WebP could say more


class ImageError(Exception):
    """Why an image is not taken, behind "the image"."""


def load() -> None:
    """Import and prepare whatever decoding needs: afterwards no file can be opened."""
    made = Image.new("RGB", (2, 2))
    about = Image.Exif()
    about[_ORIENTATION] = 6
    for kind in ("PNG", "JPEG", "WEBP"):
        data = io.BytesIO()
        made.save(data, kind, exif=about)
        _upright(_opened(data.getvalue())).resize((4, 4), Image.Resampling.BICUBIC)
    assert MpoImagePlugin and TiffImagePlugin  # imported by Pillow where a file is such a one


def decode(data: bytes, job: ImageJob) -> DecodedImage:
    """The image as its model reads it. Raises ImageError; MemoryError behind a limit."""
    try:
        return _decode(data, job)
    except _DAMAGED as error:
        reason = "is cut off" if "truncated" in str(error) else "is damaged"
        raise ImageError(f"{reason}: it cannot be decoded") from None


def _decode(data: bytes, job: ImageJob) -> DecodedImage:
    if data.startswith(b"RIFF"):
        _check_size(*_webp_size(data), job)  # Pillow would make room for it first
    image = _opened(data)
    _check_size(*image.size, job)
    if not isinstance(image, JpegImagePlugin.JpegImageFile) and getattr(image, "n_frames", 1) > 1:
        raise ImageError(f"is an animation of {image.n_frames} pictures: send one of them")  # type: ignore[attr-defined]
    width, height = image.size
    if _orientation(image) in _SWAPS:
        width, height = height, width
    try:
        height, width = target_size(job.rule, height, width)
    except ValueError as error:
        raise ImageError(str(error)) from None
    if not job.reads:
        return DecodedImage(height, width, b"")
    shown = _in_colour(_upright(image))
    if shown.size != (width, height):
        shown = shown.resize((width, height), _FILTERS[job.rule.resample])
    return DecodedImage(height, width, shown.tobytes())


def _opened(data: bytes) -> Image.Image:
    file = io.BytesIO(data)
    if data.startswith(_PNG):
        return PngImagePlugin.PngImageFile(file)
    if data.startswith(_JPEG):
        return JpegImagePlugin.JpegImageFile(file)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImagePlugin.WebPImageFile(file)
    raise ImageError("is neither a PNG, nor a JPEG, nor a WebP")


def _check_size(width: int, height: int, job: ImageJob) -> None:
    most = job.limits.max_pixels
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


def _orientation(image: Image.Image) -> int:
    """By EXIF; 1 where it has none, or one that cannot be read."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except _DAMAGED:
        return 1
    return found if isinstance(found, int) else 1


def _upright(image: Image.Image) -> Image.Image:
    image.load()
    turn = _TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _in_colour(image: Image.Image) -> Image.Image:
    """As RGB."""
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    shown = Image.new("RGB", seen.size, _WHITE)
    shown.paste(seen, mask=seen.getchannel("A"))
    return shown
