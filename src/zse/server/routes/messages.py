"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

import functools

import msgspec

from zse.http.exchange import Response
from zse.server.answering import Choice, ChoiceDelta, CompletionRun, answer
from zse.server.api_request import APIRequest
from zse.server.counting import count
from zse.server.requests.messages import read_counted, read_messages
from zse.server.tools.answer import CALL, CONTENT, REASONING
from zse.server.tools.calls import ToolCall, arguments_of

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# What a block is when it begins, and the delta that adds to it, by what the answer's parts are.
_BEGUN: dict[str, dict] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
_NAMES = {CONTENT: "text", REASONING: "thinking"}


def _event(kind: str, **values: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind} | values))


class _Writer:
    """A message of blocks: thinking, text, a block for each call. A stream numbers its blocks as they begin."""

    def __init__(self, job: CompletionRun):
        self.job = job
        self._num_blocks, self._open = 0, ""  # "thinking", "text", or a number of a call; "" where no block is open

    def _message(self) -> dict:
        work = self.job.work
        return {
            "id": "msg_" + work.request.id.removeprefix("req_"),
            "type": "message",
            "role": "assistant",
            "model": self.job.completion.model or work.served.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict:
        usage = self.job.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
            "output_tokens_details": {"thinking_tokens": usage.reasoning},
        }

    @staticmethod
    def _end(choice: Choice) -> dict:
        reason = _REASONS.get(choice.finish_reason or "", "end_turn")
        if choice.stop_text is not None and reason == "end_turn":
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_text}
        return {"stop_reason": reason, "stop_sequence": None}

    def whole(self) -> bytes:
        choice = self.job.choices[0]
        content: list[dict] = []
        calls = choice.calls
        for segment in choice.segments:
            if segment.kind == CALL:
                content.append(_tool_use(calls[segment.number]) | {"input": arguments_of(calls[segment.number])})
            else:
                name = _NAMES[segment.kind]
                content.append(_BEGUN[name] | {name: segment.text})
        return msgspec.json.encode(self._message() | {"content": content} | self._end(choice))

    def part(self, choice: Choice, delta: ChoiceDelta, is_first: bool) -> bytes:
        out = _event("message_start", message=self._message()) if is_first else b""
        for segment in delta.segments:
            if segment.kind == CALL:
                begun = _tool_use(ToolCall(segment.name, "", segment.id))
                added = {"type": "input_json_delta", "partial_json": segment.text}
                out += self._add(str(segment.number), begun, added)
            else:
                name = _NAMES[segment.kind]
                out += self._add(name, _BEGUN[name], {"type": f"{name}_delta", name: segment.text})
        if delta.finish_reason is not None:
            out += self._close() + _event("message_delta", delta=self._end(choice), usage=self._usage())
        return out

    def _add(self, block: str, begun: dict, delta: dict) -> bytes:
        """A piece of a block, which begins where another one is open."""
        out = b""
        if self._open != block:
            out = self._close() + _event("content_block_start", index=self._num_blocks, content_block=begun)
            self._open = block
        return out + _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open, self._num_blocks = "", self._num_blocks + 1
        return _event("content_block_stop", index=self._num_blocks - 1)

    def last(self) -> bytes:
        return _event("message_stop")


def _tool_use(call: ToolCall) -> dict:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


# POST /v1/messages
messages = functools.partial(answer, read=lambda body: (read_messages(body), _Writer))


async def count_tokens(app, request: APIRequest) -> Response:
    """POST /v1/messages/count_tokens"""
    return Response.json({"input_tokens": await count(app, request, read_counted)})
