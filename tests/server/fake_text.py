"""A byte-level stand-in for tokenizer, template and detokenizer: the server's tests need no model file."""

import codecs

EOS = 256
IMAGE, _MARK = 257, 1


class Detokenizer:
    def __init__(self, stop: tuple[str, ...]):
        self._stop, self._held = stop, ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.stopped: str | None = None

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, token: int) -> str:
        return self._emit(self._utf8.decode(bytes([token]) if token < 256 else b""))

    def finish(self) -> str:
        text = self._emit(self._utf8.decode(b"", True))
        held, self._held = self._held, ""
        return text if self.stopped is not None else text + held

    def _emit(self, text: str) -> str:
        text, self._held = self._held + text, ""
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            position, self.stopped = min(found)
            return text[:position]
        keep = max(
            (length for stop in self._stop for length in range(1, len(stop)) if text.endswith(stop[:length])), default=0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _shown(content, images) -> str:
    if isinstance(content, str):
        return content
    assert all(part == {"type": "image"} or part.keys() == {"type", "text"} for part in content), content
    instead = images.text.replace("<image>", chr(_MARK))
    return "".join(part.get("text", instead) for part in content)


class TextModel:
    vocab_size = 260
    has_chat_template, template_refused = True, ""
    sampling: dict = {}
    prompts = {"query": "Q:"}
    method = None

    def __init__(self, template: str = ""):
        """template: the text that parsers are chosen by; one that ends in "<think>" opens the reasoning itself."""
        self.template_source = template

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_part(self, text: str, control: bool = False) -> list[int]:
        return list(text.encode())

    def encode_pair(self, one: str, other: str, most: int | None = None) -> tuple[list[int], int]:
        ids = [*one.encode(), 0]
        return [*ids, *other.encode()][:most], len(ids)

    def cut(self, ids: list[int], most: int) -> list[int]:
        return ids[:most]

    def encode_chat(
        self, messages: list[dict], tools: list[dict] | None = None, variables: dict | None = None, images=None
    ) -> list[int]:
        """One line a message; the tools and calls of the messages first, where the fake engine does not look. An image is the token
        IMAGE."""
        offered = "".join(f"tool:{tool['function']['name']}\n" for tool in tools or ())
        text = offered + "".join(f"{message['role']}:{_shown(message['content'], images)}\n" for message in messages)
        given = variables or {}
        if given.get("continue_final_message"):
            text = text[:-1]
        elif given.get("add_generation_prompt", True):
            text += "assistant:" + "<think>" * self.template_source.endswith("<think>")
        return [IMAGE if byte == _MARK else byte for byte in text.encode()]

    def control_id(self, text: str) -> int | None:
        return {"<image>": IMAGE, "<row>": IMAGE + 1, "<end>": IMAGE + 2}.get(text)

    def message_points(self, prompt: list[int]) -> tuple[int, ...]:
        """The last two lines."""
        return tuple(at + 1 for at, id in enumerate(prompt) if id == 10)[-2:]

    def decode(self, ids: list[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def prompt_pieces(self, ids: list[int], is_text: bool) -> list[str]:
        show = Detokenizer(())
        pieces = [show.push(id) for id in ids]
        return [*pieces[:-1], pieces[-1] + show.finish()]

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<end>"

    def detokenizer(
        self, stop: tuple[str, ...], keep: tuple[str, ...] = (), skip_special: bool = True, min_tokens: int = 0
    ) -> Detokenizer:
        return Detokenizer(stop)


def load(path: str, name: str) -> TextModel:
    return TextModel()
