"""Images are decoded as transformers' processors do it, in processes that reach nothing and of which nothing is left."""

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import make_image_references as references
import numpy as np
import psutil
import pytest
from image_files import file_of, hostile, saved
from PIL import Image, ImageOps

from zse.errors import RequestError
from zse.images.messages import DecodedImage, ImageJob, ImageLimits, encode
from zse.images.worker import ImageDecoder, UnreadableImage
from zse.models.vision.read import vision_from_hf

LIMITS = ImageLimits(20 << 20, 36_000_000)
SQUARE = references.vision("gemma3")
AREA = references.vision("qwen2_5")


@pytest.fixture(scope="module")
def decoder():
    before = set(psutil.Process().children(recursive=True))
    made = ImageDecoder(LIMITS)
    yield made
    made.close()
    assert not set(psutil.Process().children(recursive=True)) - before


def array(image: DecodedImage) -> np.ndarray:
    return np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)


def difference(image: DecodedImage, wanted: np.ndarray) -> int:
    return int(np.abs(array(image).astype(int) - wanted).max())


@pytest.fixture(scope="module")
def stored():
    with np.load(references.PLACE) as file:
        return dict(file)


EACH = [(name, size) for name in references.CONFIGS for size in references.SIZES]


@pytest.mark.parametrize(("name", "size"), EACH)
def test_pixels_are_those_of_transformers_processors(decoder, stored, name, size):
    """Within a grey level, since another Pillow may round otherwise."""
    found = decoder.decode_now(saved(references.picture(*size)), references.vision(name))
    assert difference(found, stored[f"{name} {size[0]} {size[1]}"]) <= 1


def test_tiles_are_padded_as_pillow_pads(decoder):
    """As DeepSeek-VL2's authors call it: an overview, then what is cut, around it the mean; an image of one tile once."""
    vision = vision_from_hf(
        "config.json",
        {
            "architectures": ["DeepseekVLV2ForCausalLM"],
            "vision_config": {"patch_size": 14},
            "candidate_resolutions": [[384, 384], [768, 384], [384, 768]],
        },
        {"image_mean": [0.5, 0.4, 0.45]},
    )
    for size, (height, width) in (((500, 200), (768, 384)), ((200, 200), (384, 384)), ((30, 900), (384, 768))):
        shown = references.picture(*size)
        found = decoder.decode_now(saved(shown), vision)
        assert (found.height, found.width) == (height, width)
        views = [
            ImageOps.pad(shown.convert("RGB"), each, method=Image.Resampling.BICUBIC, color=(127, 102, 114))
            for each in ((384, 384), (width, height))[(height, width) == (384, 384) :]
        ]
        assert found.pixels == b"".join(np.asarray(view).tobytes() for view in views)


@pytest.mark.exhaustive
def test_the_references_are_those_of_the_transformers_that_is_here(stored):
    pytest.importorskip("transformers")
    for name, size in EACH:
        found = references.processed(name, references.picture(*size)).astype(int)
        assert np.abs(found - stored[f"{name} {size[0]} {size[1]}"]).max() <= 1


def same_picture() -> dict[str, bytes]:
    """One picture of two halves, red and white, in every form; what is transparent is white."""
    wide = Image.new("RGB", (112, 112), (255, 0, 0))
    wide.paste((255, 255, 255), (0, 56, 112, 112))
    clear = wide.convert("RGBA")
    clear.paste((0, 0, 0, 0), (0, 56, 112, 112))
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned a quarter clockwise
    lying = wide.transpose(Image.Transpose.ROTATE_90)
    palette = wide.quantize(4)
    seen_through = clear.quantize(4)
    return {
        "PNG": saved(wide),
        "WebP": saved(wide, "WEBP", lossless=True),
        "JPEG": saved(wide, "JPEG", quality=100, subsampling=0),
        "CMYK": saved(wide.convert("CMYK"), "JPEG", quality=100, subsampling=0),
        "progressive": saved(wide, "JPEG", quality=100, subsampling=0, progressive=True),
        "alpha": saved(clear),
        "alpha in WebP": saved(clear, "WEBP", lossless=True),
        "palette": saved(palette),
        "palette with alpha": saved(seen_through),
        "a colour that is transparent": saved(wide, transparency=(255, 255, 255)),
        "EXIF in a PNG": saved(lying, exif=turned),
        "EXIF in a JPEG": saved(lying, "JPEG", quality=100, subsampling=0, exif=turned),
        "EXIF in a WebP": saved(lying, "WEBP", lossless=True, exif=turned),
        "EXIF that is none": saved(wide, "JPEG", quality=100, subsampling=0, exif=b"Exif\0\0nonsense"),
        "interlaced": saved(wide, optimize=True),
    }


@pytest.mark.parametrize("form", same_picture())
def test_every_form_is_the_same_picture(decoder, form):
    pixels = array(decoder.decode_now(same_picture()[form], SQUARE)).astype(int)
    assert np.abs(pixels[10:50] - (255, 0, 0)).max() <= 3 and np.abs(pixels[62:100] - 255).max() <= 3


def test_grey_of_one_eight_and_sixteen_bits(decoder):
    ramp = np.linspace(0, 65535, 112).astype(np.uint16)
    deep = decoder.decode_now(saved(Image.fromarray(np.tile(ramp, (112, 1)))), SQUARE)
    eight = decoder.decode_now(saved(Image.fromarray(np.tile((ramp >> 8).astype(np.uint8), (112, 1)))), SQUARE)
    assert difference(deep, array(eight)) <= 1 and array(deep)[0, -1].tolist() == [255] * 3
    bits = decoder.decode_now(saved(Image.new("1", (112, 112), 1)), SQUARE)
    assert array(bits).min() == 255


@pytest.mark.parametrize("name", hostile())
def test_hostile_files_are_refused_with_one_line(decoder, name):
    data, words = hostile()[name]
    began = time.monotonic()
    with pytest.raises((UnreadableImage, RequestError), match=words.replace("^", r"\^")) as refused:
        decoder.decode_now(data, AREA)
    assert "\n" not in str(refused.value) and time.monotonic() - began < 5


def test_only_the_size(decoder):
    data = file_of(100, 60)
    assert decoder.decode_now(data, AREA, reads=False) == DecodedImage(*decoder.decode_now(data, AREA)[:2], b"")


def test_limits_of_memory_and_time():
    big = saved(Image.new("RGB", (3000, 3000)), compress_level=1)
    made = ImageDecoder(ImageLimits(1 << 20, 1000))
    with pytest.raises(UnreadableImage, match="3000 x 3000 pixels; at most 1000"):
        made.decode_now(big, AREA)
    made.limits = ImageLimits(1 << 20, 36_000_000, wall_s=0.05)
    with pytest.raises(UnreadableImage, match="takes too long"):
        made.decode_now(big, AREA)
    made.limits = ImageLimits(1 << 20, 36_000_000, max_memory_bytes=16 << 20)
    with pytest.raises(UnreadableImage, match="more than 16 MiB"):
        made.decode_now(big, AREA)
    made.limits = LIMITS
    assert made.decode_now(big, AREA).pixels  # the next one is as ever
    made.close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
def test_an_image_s_process_has_its_limits_before_the_file_comes(decoder):
    """tests/structured/test_checker_limits.py tries what they keep out."""
    decoder.decode_now(file_of(), AREA)
    others = set(psutil.Process(decoder._process.pid).children())
    with decoder._forked() as mine:
        mine.sendall(encode(ImageJob(100, LIMITS)))
        deadline, status = time.monotonic() + 5, ""
        while "\nSeccomp:\t2\n" not in status and time.monotonic() < deadline:
            for child in set(psutil.Process(decoder._process.pid).children()) - others:
                status = Path(f"/proc/{child.pid}/status").read_text()
                lines = Path(f"/proc/{child.pid}/limits").read_text().splitlines()
                opened = os.listdir(f"/proc/{child.pid}/fd")
        assert "\nSeccomp:\t2\n" in status and "\nNoNewPrivs:\t1\n" in status
        soft = {" ".join(line[:25].split()): line[26:].split()[0] for line in lines}
        assert (soft["Max open files"], soft["Max file size"], soft["Max processes"]) == ("3", "0", "0")
        assert 0 < int(soft["Max cpu time"]) <= LIMITS.cpu_s + 2
        assert 0 < int(soft["Max address space"]) < LIMITS.memory_bytes + (1 << 30)
        assert len(opened) <= 8  # null devices, its socket, what wakes the one that forks


def test_a_process_that_died_is_replaced(decoder):
    data = file_of()
    wanted = decoder.decode_now(data, AREA)
    decoder._process.kill()
    assert decoder.decode_now(data, AREA) == wanted
    decoder._process.kill()
    decoder._process.wait()
    assert decoder.decode_now(data, AREA) == wanted


def test_no_file_socket_or_process_is_left(decoder):
    decoder.decode_now(file_of(), AREA)
    descriptors, children = len(os.listdir("/proc/self/fd")), set(psutil.Process().children(recursive=True))
    for name, (data, _) in hostile().items():
        with pytest.raises((UnreadableImage, RequestError)):
            decoder.decode_now(data, AREA)
    deadline = time.monotonic() + 3
    while set(psutil.Process().children(recursive=True)) - children and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not set(psutil.Process().children(recursive=True)) - children
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_the_event_loop_goes_on_and_tenants_take_turns(decoder, monkeypatch):
    begun, run = [], decoder.decode_now
    monkeypatch.setattr(decoder, "decode_now", lambda *given: begun.append(given[0]) or run(*given))
    files = {"flood": file_of(200, 200), "other": file_of(100, 100)}

    async def main():
        async def one(tenant):
            await decoder.decode(files[tenant], AREA, tenant=tenant)

        await asyncio.gather(*(one("flood") for _ in range(6)), one("other"))
        assert files["other"] in begun[:3] and len(begun) == 7
        task = asyncio.create_task(one("flood"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await one("flood")  # its turn was given back

    asyncio.run(main())


def test_the_last_results_are_kept_by_tenant(monkeypatch):
    monkeypatch.setattr("zse.images.worker.KEPT_BYTES", 2 * 3 * 112 * 112)
    made, files = ImageDecoder(LIMITS), [file_of(20 + number) for number in range(3)]
    asked = []
    run = made.decode_now
    made.decode_now = lambda *given: asked.append(given[0]) or run(*given)

    async def main():
        for tenant, number in (("a", 0), ("a", 0), ("b", 0), ("a", 0), ("a", 1), ("a", 0)):
            await made.decode(files[number], SQUARE, tenant=tenant, digest=bytes([number]))
        assert await made.decode(files[0], SQUARE, tenant="a", digest=b"\0", reads=False) == DecodedImage(112, 112, b"")
        await made.decode(files[1], AREA, tenant="a", digest=b"\1")  # as another model sees it

    asyncio.run(main())
    made.close()
    assert asked == [files[0], files[0], files[1], files[1]]


def test_what_is_closed_stays_closed(decoder):
    made = ImageDecoder(LIMITS)
    made.decode_now(file_of(), AREA)
    process = made._process
    made.close()
    assert process.returncode is not None
    with pytest.raises(RequestError) as refused:
        made.decode_now(file_of(), AREA)
    assert refused.value.status == 503


def test_a_machine_without_room_says_so(monkeypatch):
    def full(*given, **more):
        raise OSError(24, "Too many open files")

    made = ImageDecoder(LIMITS)
    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(RequestError, match="does not start .Too many open files.: try again later") as refused:
        made.decode_now(file_of(), AREA)
    assert refused.value.status == 503


def mutants(number: int):
    """Files that were changed at random: bytes, lengths, parts that are there twice or not at all."""
    draw = random.Random(2026)
    kinds = [file_of(24, 24, kind, noise=True) for kind in ("PNG", "JPEG", "WEBP")]
    kinds += [same_picture()[name] for name in ("EXIF in a JPEG", "palette with alpha", "progressive", "alpha in WebP")]
    for _ in range(number):
        data = bytearray(draw.choice(kinds))
        for _ in range(draw.randrange(1, 5)):
            at, size = draw.randrange(len(data)), draw.randrange(1, 9)
            how = draw.randrange(4)
            if how == 0:
                data[at : at + size] = draw.randbytes(size)
            elif how == 1:
                data[at : at + size] = draw.choice((b"\0", b"\xff", b"\x7f\xff")) * size
            elif how == 2:
                del data[at : at + draw.randrange(1, 200)]
            else:
                data[at:at] = data[at : at + draw.randrange(1, 200)]
            data = data or bytearray(b"\x89PNG")
        yield bytes(data)


@pytest.mark.parametrize(
    "number", [200, pytest.param(int(os.environ.get("ZSE_TEST_IMAGE_MUTANTS", 5000)), marks=pytest.mark.exhaustive)]
)
def test_mutants_are_read_or_refused(decoder, number):
    for data in mutants(number):
        try:
            image = decoder.decode_now(data, AREA)
            assert len(image.pixels) == 3 * image.height * image.width
        except UnreadableImage as refused:
            assert "\n" not in str(refused) and "Traceback" not in str(refused)
        except RequestError as refused:
            assert refused.status == 400, refused
    assert decoder._process.poll() is None


def test_without_pillow_it_says_what_to_do(monkeypatch, tmp_path):
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL" / "__init__.py").write_text("raise ImportError")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made = ImageDecoder(LIMITS)
    with pytest.raises(UnreadableImage, match=r"pip install 'zse\[images\]'"):
        made.decode_now(file_of(), AREA)
    made.close()


def test_importing_it_imports_no_decoder():
    script = "import sys, zse.images.worker; print([m for m in ('numpy', 'PIL') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
