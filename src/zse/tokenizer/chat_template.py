"""Chat messages -> prompt tokens, through the model's own Jinja template, so that users cannot forge control tokens.

The rendered text mixes the template's words, where `<|im_end|>` is a control token, with users' words, where it is ten
characters. Encoding them apart would change tokens at every seam. Instead the template is rendered twice, once with a
mark put into the users' strings behind every character that begins a control token; the marks come out as *barriers*:
places that no control token may span. If the marks changed what the template does (some look for `</think>` in a
message, some count an id's characters), a narrower marking is tried. Without such characters one rendering is enough.
"""

import bisect
import functools
from collections import namedtuple
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile

from zse.errors import FormatError, RequestError
from zse.tokenizer import template_fast, template_jinja
from zse.tokenizer.base import Tokenizer
from zse.tokenizer.template_limits import FAILED, REFUSED

MAX_SOURCE_BYTES = 64 << 10
WITHOUT = "; without a chat there are completions: zse run --raw, and /v1/completions of zse serve"
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
MAX_POINTS = 2
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters: in no text that means anything


# text: the prompt. barriers: offsets in bytes that no control token may span (Tokenizer.encode).
Rendered = namedtuple("Rendered", "text barriers")
# marker: what a template writes for an image; text: what stands in the prompt for it; count: images of the messages.
ImageText = namedtuple("ImageText", "marker text count")


def find_last(text: str, part: str) -> int:
    """text.rfind(part), which takes as long as both lengths multiplied where a stranger chose the two, in linear time."""
    at = text[::-1].find(part[::-1])
    return at if at < 0 else len(text) - len(part) - at


class ChatTemplate:
    """A model's chat template, checked and compiled. FormatError when it is refused.

    source: Jinja text. tokenizer: whose control tokens it writes. Constant after loading; threads may share one.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, path: str = "model"):
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > MAX_SOURCE_BYTES:
            reason = f"{size} bytes; at most {MAX_SOURCE_BYTES} are accepted{WITHOUT}"
            raise FormatError(path, 0, "chat_template", reason)
        self._tokenizer, self.source = tokenizer, source
        ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id, "unk": tokenizer.unknown_id}
        self._variables = {f"{role}_token": tokenizer.text_of(id) for role, id in ids.items()}
        try:
            self._template = compile_template(source)
        except ValueError as error:
            raise FormatError(path, 0, "chat_template", f"{error}{WITHOUT}") from None
        # LFM2.5's name for what others call reasoning_content; gpt-oss' template refuses it beside a content.
        others = "reasoning_content" in source or "<|channel|>" in source
        self._says_thinking = ".thinking" in source and not others
        self._first = tokenizer.control_first_characters()
        # A template that writes "<|" + role + "|>" leaves a control token open where a user's text may begin.
        self._has_open_end = any(map(tokenizer.ends_inside_control, self._template.literals))

    def render(
        self,
        messages: Sequence[dict],
        *,
        tools: Sequence[dict] | None = None,
        add_generation_prompt: bool = True,
        **variables,
    ) -> Rendered:
        """The prompt, for Tokenizer.encode(text, special=True, add_bos=False, barriers=barriers): control tokens only
        where the template itself writes them.

        Args:
            messages: dicts with "role" (one of ROLES) and what the template reads ("content", ...).
            tools: function definitions, as in the API.
            add_generation_prompt: end where the assistant's reply begins.
            variables: what else the request gives the template (chat_template_kwargs), such as enable_thinking=False.

        RequestError (400): an unknown role, or the template refuses, fails or takes too much (template_limits.py).
        """
        for index, message in enumerate(messages):
            if message.get("role") not in ROLES:
                raise RequestError(
                    f"role {message.get('role')!r} is not one of {', '.join(ROLES)}",
                    code="invalid_role",
                    param=f"messages[{index}].role",
                )
        given = {"messages": list(messages), "tools": tools, "variables": variables}
        if self._says_thinking:
            more = [{"thinking": each["reasoning_content"]} if "reasoning_content" in each else {} for each in messages]
            given["messages"] = [{**each, **found} for each, found in zip(messages, more, strict=True)]
        text = self._render(given, add_generation_prompt)
        if not self._has_open_end and not _any_string(given, self._holds_first):
            return Rendered(text, ())
        mark = _unused_mark(given, text)
        expected = None  # how many control tokens the template itself writes
        strict = [self._mark_start, self._mark_tail] if self._has_open_end else [self._mark_first]
        for marked in [*strict, self._mark_control]:
            changed = _map_given(given, lambda item, marked=marked: marked(item, mark))
            try:
                marked_text = self._render(changed, add_generation_prompt)
            except RequestError as error:
                if error.code in (REFUSED, FAILED):  # not of the messages, which it took, but of the marks
                    continue
                raise
            same = marked_text.replace(mark, "") == text
            if same and marked != self._mark_control:
                return Rendered(text, _offsets(marked_text, mark))
            controls = self._count_controls(marked_text, mark)
            if same and controls == expected:
                return Rendered(text, _offsets(marked_text, mark))
            expected = controls
        raise RequestError(
            "the messages hold text of control tokens that the model's chat template takes apart; remove it",
            code="control_tokens_in_text",
            param="messages",
        )

    def encode(
        self,
        messages: Sequence[dict],
        *,
        continue_final_message: bool = False,
        images: ImageText | None = None,
        **given,
    ) -> list[int]:
        """The prompt as token ids. continue_final_message: it ends with the last message's content, with nothing of the
        template behind. images: of the messages, whose contents have parts of the type image. Arguments and errors else as
        render(); RequestError too where the template does not show each image once."""
        if continue_final_message:
            given["add_generation_prompt"] = False
        text, barriers = self.render(messages, **given)
        if continue_final_message:
            content = messages[-1]["content"].strip()
            at = find_last(text, content) if content else -1
            if at < 0:
                raise RequestError(
                    "the last message is empty, or not in the prompt as it is: it cannot be continued",
                    code="invalid_value",
                    param="continue_final_message",
                )
            text = text[: at + len(content)]
            size = len(text.encode("utf-8", "surrogatepass"))
            barriers = [barrier for barrier in barriers if barrier <= size]
        if images is not None:
            text, barriers = _with_images(text, barriers, images)
        return self._tokenizer.encode(text, special=True, add_bos=False, barriers=barriers)

    def message_points(self, prompt: list[int]) -> tuple[int, ...]:
        """Behind how many tokens of a prompt the last messages begin, at most two, ascending: where the next prompt of
        the conversation, whose last answer may be written another way, or another prompt is likely to differ."""
        backwards, found = prompt[::-1], []
        for opener in self._openers:
            at = -1
            for _ in range(min(MAX_POINTS, prompt.count(opener))):
                at = backwards.index(opener, at + 1)
                found.append(len(prompt) - 1 - at)
        return tuple(sorted(point for point in found if point)[-MAX_POINTS:])

    @functools.cached_property
    def _openers(self) -> frozenset[int]:
        """The control tokens that messages begin with: those by which a conversation goes on that is a message longer,
        or up to its answer. Empty where the template writes text there."""
        texts = ("user", "Good morning to you."), ("assistant", "The same to you."), ("user", "What is the time now?")
        messages = [{"role": role, "content": content} for role, content in texts]
        asked = [(1, False), (1, True), (2, False), (3, False)]
        tokens: dict[tuple[int, bool], list[int]] = {}
        for count, answers in asked:
            with suppress(RequestError):
                tokens[count, answers] = self.encode(messages[:count], add_generation_prompt=answers)
        found: set[int] = set()
        for first, second in ((asked[0], asked[1]), (asked[0], asked[2]), (asked[2], asked[3])):
            shorter, longer = tokens.get(first, []), tokens.get(second, [])
            at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(shorter, longer, strict=False)))
            # White space may stand before it.
            found.update([id for id in longer[at : at + 2] if self._tokenizer.is_special(id)][:1])
        return frozenset(found)

    def _render(self, given: dict, add_generation_prompt: bool) -> str:
        own = {"messages": given["messages"], "tools": given["tools"], "add_generation_prompt": add_generation_prompt}
        return self._template.render({**self._variables, **given["variables"], **own})

    def _count_controls(self, marked_text: str, mark: str) -> int:
        ids = self._tokenizer.encode(
            marked_text.replace(mark, ""), special=True, add_bos=False, barriers=_offsets(marked_text, mark)
        )
        return sum(map(self._tokenizer.is_special, ids))

    # --- markings, from the strictest on; each leaves a string without control characters as it is ---------------

    def _holds_first(self, text: str) -> bool:
        return any(character in text for character in self._first)

    def _mark_first(self, text: str, mark: str) -> str:
        for character in self._first:
            if character in text:
                text = text.replace(character, character + mark)
        return text

    def _mark_start(self, text: str, mark: str) -> str:
        if text in ROLES:
            return text
        body = text.lstrip()
        return text[: len(text) - len(body)] + mark + self._mark_first(body, mark) if body else text

    def _mark_tail(self, text: str, mark: str) -> str:
        """As _mark_start, but at the start only of strings that could go on with a control token."""
        body = text.strip()
        tails, inside = self._tails
        if body in inside or any(body[:size] in tails for size in range(1, min(len(body), 256) + 1)):
            return self._mark_start(text, mark)
        return self._mark_first(text, mark)

    @functools.cached_property
    def _tails(self) -> tuple[set[str], str]:
        """What may follow the beginning of a control token; all of it as one text, whose parts may go on in another
        string."""
        tails = {text[at:] for text in self._tokenizer.control_texts() for at in range(1, len(text))}
        return tails, "\0".join(tails)

    def _mark_control(self, text: str, mark: str) -> str:
        """A mark inside each whole control token, and behind a last character that could begin one."""
        if not self._holds_first(text):
            return text
        parts, ids = [], self._tokenizer.encode(text, special=True, add_bos=False)
        for id in ids:
            data = self._tokenizer.token_bytes(id)
            parts.append(_mark_bytes(data, mark) if self._tokenizer.is_special(id) else data)
        marked = b"".join(parts).decode("utf-8", "surrogatepass")
        if marked.replace(mark, "").lstrip(" ") != text.lstrip(" "):  # a vocabulary without some byte
            return self._mark_first(text, mark)
        marked = text[: len(text) - len(text.lstrip(" "))] + marked.lstrip(" ")
        for size in range(1, min(len(marked), 64)):
            if marked[-size] in self._first and self._tokenizer.ends_inside_control(marked[-size:]):
                return marked[: len(marked) - size + 1] + mark + marked[len(marked) - size + 1 :]
        return marked


def load_chat_template(source, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of an open model (ModelSource), or None if it has none: a base model, for completions only."""
    if not source.chat_template:
        return None
    return ChatTemplate(source.chat_template, tokenizer, source.path)


def no_chat_template(model: str, refused: str = "") -> RequestError:
    """What a chat request to a model without a template is told. refused: why the one that it has is not used."""
    reason = f"a chat template that is not used: {refused}" if refused else "no chat template (it is a base model)"
    return RequestError(
        f"model {model!r} has {reason}; use /v1/completions with a prompt", code="no_chat_template", param="model"
    )


def compile_template(source: str):
    """An object with render(variables) and literals: all that the rest of this module knows of who runs a template.
    ValueError when it is refused."""
    return template_fast.compile_fast(source) or template_jinja.JinjaTemplate(source)


def _with_images(text: str, barriers: Sequence[int], images: ImageText) -> Rendered:
    """The prompt with what stands for images in place of the template's markers: those that no barrier cuts, since a user may
    have written others."""
    marker, instead = (part.encode() for part in (images.marker, images.text))
    data = text.encode("utf-8", "surrogatepass")
    out, moved, copied, at, count = bytearray(), list(barriers), 0, data.find(marker), 0
    while at >= 0:
        first = bisect.bisect_right(barriers, at)
        if first < len(barriers) and barriers[first] < at + len(marker):
            at = data.find(marker, at + 1)
            continue
        out += data[copied:at] + instead
        copied, count = at + len(marker), count + 1
        shift = len(out) - copied
        moved[first:] = [barrier + shift for barrier in barriers[first:]]
        at = data.find(marker, copied)
    if count != images.count:
        raise RequestError(
            f"the model's chat template shows {count} of {images.count} images: it does not take them where they stand",
            code="invalid_value",
            param="messages",
        )
    return Rendered((out + data[copied:]).decode("utf-8", "surrogatepass"), moved)


def _unused_mark(given, text: str) -> str:
    used = set(text)
    _any_string(given, used.update)  # None: goes on to the next string
    mark = next((mark for mark in _MARKS if mark not in used), None)
    if mark is None:
        raise RequestError("the messages hold every noncharacter U+FDD0 to U+FDEF; remove one", param="messages")
    return mark


def _mark_bytes(data: bytes, mark: str) -> bytes:
    text = data.decode("utf-8", "surrogatepass")
    return (text[:1] + mark + text[1:]).encode("utf-8", "surrogatepass")


def _offsets(text: str, mark: str) -> list[int]:
    """Where the marks were, in bytes of the text without them."""
    offsets, at = [], 0
    for part in text.split(mark)[:-1]:
        at += len(part.encode("utf-8", "surrogatepass"))
        offsets.append(at)
    return offsets


def _any_string(value, test) -> bool:
    if isinstance(value, str):
        return test(value)
    if isinstance(value, dict):
        return any(_any_string(key, test) or _any_string(item, test) for key, item in value.items())
    return isinstance(value, (list, tuple)) and any(_any_string(item, test) for item in value)


def _map_given(given: dict, change) -> dict:
    """_map_strings() of what a request gives, but for the types of a content's parts, which are the server's own words."""
    changed = _map_strings(given, change)
    for message, new in zip(given["messages"], changed["messages"]):
        if isinstance(message.get("content"), list):
            for part, new_part in zip(message["content"], new["content"]):
                new_part["type"] = part["type"]
    return changed


def _map_strings(value, change):
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_key(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def _map_key(key, change):
    """Keys that templates ask for by name are identifiers; any other may be printed, so it is marked as text is."""
    return change(key) if isinstance(key, str) and not key.isidentifier() else key
