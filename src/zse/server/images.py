"""The images of a request on their way to the engine: decoded in processes with limits (zse/images), tokens in the prompt, frames.

Nothing of them is logged, and nothing is kept but what sessions, stored responses and kept answers are asked to keep."""

import asyncio
import binascii
import hashlib
from typing import Any

import msgspec

from zse.engine.messages import ImageInput, image_key
from zse.errors import RequestError
from zse.images.messages import DecodedImage
from zse.images.worker import OWN_DECODES, ImageDecoder, ImageLimits, UnreadableImage
from zse.models.vision.config import VisionConfig
from zse.server.errors import APIError, unsupported
from zse.server.requests.image_parts import for_template, images_of, num_characters
from zse.server.work import RequestRun, check_text, maybe_in_thread
from zse.tokenizer.chat_template import ImageText

# Of the pixels of a request, which go to the engine in a frame for each of its answers (engine/messages.py: MAX_FRAME_BYTES).
MAX_PIXEL_BYTES, MAX_ANSWERS_BYTES = 48 << 20, 192 << 20
PIECE_CHARACTERS = 1 << 20  # of base64: decoding one holds the interpreter's lock for a millisecond


class Pictures(msgspec.Struct):
    """The images of one prompt, in its order. text: how the chat template shows them. ids: of the placeholder, of the end of a row
    and of the end of an image; None where the model has none of it."""

    vision: VisionConfig
    images: list[DecodedImage]
    text: ImageText
    placeholder: int
    row_end: int | None
    image_end: int | None

    def expanded(self, ids: list[int]) -> tuple[list[int], list[ImageInput]]:
        """The prompt in which each image has all its tokens, and what the engine gets beside it. ids: with one placeholder an image.
        Raises RequestError: there are more or fewer."""
        if ids.count(self.placeholder) != len(self.images):
            message = f"the prompt has {ids.count(self.placeholder)} placeholders for {len(self.images)} images"
            raise RequestError(message, code="invalid_value", param="messages")
        out: list[int] = []
        inputs = []
        left = iter(self.images)
        for id in ids:
            if id != self.placeholder:
                out.append(id)
                continue
            height, width, pixels = next(left)
            tokens = self._tokens(height, width)
            key = image_key(height, width, pixels)
            inputs.append(ImageInput(len(out), len(tokens), height, width, pixels, key))
            out += tokens
        return out, inputs

    def encode_chat(
        self, model: Any, messages: list[dict], tools: list[dict] | None, variables: dict | None
    ) -> tuple[list[int], list[ImageInput]]:
        """expanded() of a conversation. Raises as that and ServedModel.encode_chat()."""
        return self.expanded(model.encode_chat(for_template(messages), tools, variables, self.text))

    def _tokens(self, height: int, width: int) -> list[int]:
        parts = self.vision.parts(height, width)
        if self.row_end is None:
            return [self.placeholder] * len(parts)
        tokens = [self.placeholder if part >= 0 else self.row_end for part in parts]
        if self.image_end is not None:
            tokens[-1] = self.image_end
        return tokens


def decoder(max_bytes: int = 20 << 20, max_pixels: int = 36_000_000, max_images: int = 32) -> ImageDecoder:
    """What decodes a server's images. max_bytes, max_pixels: of one image; max_images: of a request."""
    return ImageDecoder(ImageLimits(max_bytes, max_pixels, max_images))


async def prepare(work: RequestRun, served: Any, messages: list[dict], model: Any, reads: bool = True) -> Pictures:
    """The images of a conversation, which has some, as its model sees them. reads: False where only tokens are counted.
    Raises RequestError."""
    parts = images_of(messages)
    app, tenant = work.app, work.request.account
    check_text(work.request, num_characters(messages))
    info = await app.pool.ready(served)
    if not info.vision:
        raise unsupported(parts[0]["path"], "this model sees no images")
    vision = VisionConfig.decode(info.vision).beside(len(parts))
    limits = app.images.limits
    if len(parts) > limits.max_images:
        message = f"The request has {len(parts)} images; at most {limits.max_images} are taken."
        raise APIError("array_above_max_length", message, "messages")
    left = MAX_PIXEL_BYTES
    gate = asyncio.Semaphore(OWN_DECODES)  # a request of many images does not fill its tenant's queue of them

    async def one(part: dict) -> DecodedImage:
        nonlocal left
        path = part["path"]
        data, digest = await _file_of(work, part, limits.max_bytes)
        try:
            async with gate:
                image = await app.images.decode(data, vision, tenant=tenant, digest=digest, reads=reads)
        except UnreadableImage as error:
            raise APIError("invalid_value", f"'{path}': the image {error}.", path) from None
        except RequestError as error:
            if error.param != "messages":
                raise
            raise APIError("invalid_value", f"'{path}': {error.message}.", path) from None
        left -= len(image.pixels)
        if left < 0:
            message = f"'{path}': the images of the request have more than {MAX_PIXEL_BYTES // 3} pixels for the model."
            raise APIError("invalid_value", message, path)
        return image

    tasks = [asyncio.ensure_future(one(part)) for part in parts]
    try:
        images = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return _pictures(vision, images, model)


async def _file_of(work: RequestRun, part: dict, most: int) -> tuple[bytes, bytes]:
    """The bytes of an image, and their SHA-256. Raises APIError."""
    if "url" in part:
        return await maybe_in_thread(True, lambda: _sent(part["url"], part["path"], most))
    store, path = work.app.files, part["path"]
    if store is None:
        raise unsupported(path, "files are kept by a server with a database (--database PATH)")
    try:
        stored = await store.find(work.request, part["file"])
        if stored.size > most:
            raise _too_large(path, most)

        def read() -> bytes:
            with store.read(stored.id) as file:
                return file.read(most)

        return await maybe_in_thread(True, read), stored.digest
    except APIError as error:
        error.param = error.param or path
        raise


def _too_large(path: str, most: int) -> APIError:
    message = f"'{path}': the image has more than {most} bytes, which is what is taken (--max-image-bytes)."
    return APIError("invalid_value", message, path)


def _sent(url: str, path: str, most: int) -> tuple[bytes, bytes]:
    begin = url.index(",") + 1
    if "\n" in url:  # the lines that base64 and MIME write
        url = url.replace("\r", "").replace("\n", "")
    if 3 * (len(url) - begin) // 4 > most + 2:
        raise _too_large(path, most)
    try:
        pieces = (url[at : at + PIECE_CHARACTERS] for at in range(begin, len(url), PIECE_CHARACTERS))
        data = b"".join([binascii.a2b_base64(piece, strict_mode=True) for piece in pieces])
    except (binascii.Error, ValueError):
        raise APIError("invalid_value", f"'{path}' is not base64 behind its comma.", path) from None
    return data, hashlib.sha256(data).digest()


def _pictures(vision: VisionConfig, images: list[DecodedImage], model: Any) -> Pictures:
    def id_of(text: str) -> Any:
        id = model.control_id(text) if text else None
        if text and id is None:
            reason = f"this model's tokenizer has no control token {text}, which stands for images"
            raise unsupported("messages", reason)
        return id

    placeholder = vision.placeholder
    if vision.placeholder_id is None and model.control_id(placeholder) is None:
        # GGUF files of Gemma 3 leave its placeholder out, whose embedding nobody reads: any token may stand there.
        placeholder = model.spare_control or placeholder
    ids = map(id_of, (placeholder, vision.row_end, vision.image_end))
    shown = ImageText(vision.marker, vision.before + placeholder + vision.after, len(images))
    return Pictures(vision, images, shown, *ids)


def check_options(completion: Any, pictures: Pictures) -> None:
    """Raises APIError for what does not go with images."""
    given = {
        "truncate_prompt_tokens": completion.extras.truncate_prompt_tokens,
        "prompt_logprobs": completion.prompt_top,
        "use_beam_search": completion.beams,
    }
    for field in (field for field, value in given.items() if value is not None):
        raise unsupported(field, "it does not go with images")
    if completion.best_of * sum(len(image.pixels) for image in pictures.images) > MAX_ANSWERS_BYTES:
        message = f"'n': that many answers to these images are not taken; send {completion.best_of} requests."
        raise APIError("invalid_value", message, "n")
