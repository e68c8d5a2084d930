"""How OpenAI's Responses API shows an answer: items of the output, whole and as events."""

import time
from functools import partial

import msgspec

from zse.server import database as storage
from zse.server.answering import Choice, ChoiceDelta, CompletionRun, TokenUsage
from zse.server.logprobs import TokenScore, chat_logprobs
from zse.server.requests.responses import shown
from zse.server.tools import answer as parts

TEXT, REASONING, CALL, MCP_CALL = "message", "reasoning", "function_call", "mcp_call"
_PREFIXES = {TEXT: "msg_", REASONING: "rs_", CALL: "fc_", MCP_CALL: "mcp_", "mcp_list_tools": "mcpl_"}
_PREFIXES |= {"mcp_approval_request": "mcpr_"}
_DELTAS = {
    TEXT: "output_text",
    REASONING: "reasoning_text",
    CALL: "function_call_arguments",
    MCP_CALL: "mcp_call_arguments",
}
_WITH_PARTS = TEXT, REASONING


class OutputItem:
    """One item of the output. text: of a message, of reasoning, or a call's arguments."""

    def __init__(self, kind: str, index: int, request_id: str, **more: object):
        self.kind, self.index, self.more = kind, index, more
        self.id = f"{_PREFIXES[kind]}{request_id}_{index}"
        self.text, self.status = "", "in_progress"
        self.logprobs: list[dict] = []

    @property
    def place(self) -> dict:
        """Where events say that it is."""
        return {"item_id": self.id, "output_index": self.index} | (
            {"content_index": 0} if self.kind in _WITH_PARTS else {}
        )

    @property
    def part(self) -> dict:
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def shown(self, begun: bool = False) -> dict:
        """The item; begun: as it begins, without its part."""
        out: dict = {"id": self.id, "type": self.kind, "status": self.status} | self.more
        if self.kind in (CALL, MCP_CALL):
            return out | {"arguments": self.text}
        if self.kind not in _WITH_PARTS:  # it is what `more` says
            del out["status"]
            return out
        out["content"] = [] if begun else [self.part]
        out["summary" if self.kind == REASONING else "role"] = [] if self.kind == REASONING else "assistant"
        return out


class OutputPiece(msgspec.Struct):
    """Text that goes to an item. key: its kind, and the number of the call; more: what the item has beside; scores: of
    a message's tokens."""

    key: tuple[str, int]
    text: str
    more: dict = {}
    scores: list[TokenScore] = []


class ResponseWriter:
    """A response of items: reasoning, a message, an item for each call. status: of the response."""

    def __init__(self, values: dict, job: CompletionRun):
        self.job = job
        if values["store"]:
            job.keeps.append(self.store)
        self._values = values
        self._id, self._shown = job.work.request.id.removeprefix("req_"), shown(values)
        self.items: list[OutputItem] = []
        self._open: tuple[str, int] | None = None  # kind and number of the call of the last item, where it goes on
        self.status = "in_progress"

    # -- what there is

    def response(self) -> dict:
        """The whole of it, as far as it is."""
        work, params = self.job.work, self.job.completion.params
        is_over = self.status != "in_progress"
        return {
            "id": "resp_" + self._id,
            "object": "response",
            "created_at": self.job.created,
            "status": self.status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "model": self.job.completion.model or work.served.name,
            "output": [item.shown() for item in self.items] if is_over else [],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": self._usage() if is_over else None,
        } | self._shown

    @property
    def used(self) -> TokenUsage:
        """So far."""
        return self.job.usage

    def _usage(self) -> dict:
        usage = self.used
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }

    async def store(self) -> None:
        """Keep the answer, which is over. Raises APIError."""
        values, app, tenant = self._values, self.job.work.app, self.job.work.request.tenant
        body, items = msgspec.json.encode(self.response()), msgspec.json.encode(values["input"])
        now, previous = time.time(), values["previous_response_id"] or ""
        row = storage.responses.StoredResponse("resp_" + self._id, previous, now, body, items)
        await app.database.run(partial(storage.responses.store, tenant=tenant, response=row, now=now))

    def _begin(self, piece: OutputPiece) -> OutputItem:
        self._open = piece.key
        self.items.append(OutputItem(piece.key[0], len(self.items), self._id, **piece.more))
        return self.items[-1]

    def _end(self, choice: Choice) -> None:
        self.status = "incomplete" if choice.finish_reason == "length" else "completed"

    def _scores(self, scores: list[TokenScore]) -> list:
        if self.job.completion.params.logprobs is None:
            return []
        return chat_logprobs(scores, self.job.model.token_bytes)["content"]

    # -- how it is written

    def whole(self) -> bytes:
        choice = self.job.choices[0]
        self._end(choice)
        for piece in self.pieces(choice.segments):
            item = self._begin(piece)
            item.text, item.status, item.logprobs = piece.text, "completed", self._scores(piece.scores)
        if self.items:  # the one that an end of tokens cuts
            self.items[-1].status = self.status
        return msgspec.json.encode(self.response())

    def _event(self, kind: str, **values: object) -> bytes:
        request = self.job.work.request
        body = {"type": kind, "sequence_number": request.num_events or 0} | values
        request.num_events = (request.num_events or 0) + 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))

    def opening(self) -> bytes:
        """The first events of a stream."""
        response = self.response()
        out = self._event("response.created", response=response)
        return out + self._event("response.in_progress", response=response)

    def pieces(self, segments: list[parts.AnswerSegment]) -> list[OutputPiece]:
        """What goes to which item."""
        return [
            OutputPiece((CALL, one.number), one.text, {"call_id": one.id, "name": one.name})
            if one.kind == parts.CALL
            else OutputPiece((TEXT if one.kind == parts.CONTENT else REASONING, 0), one.text, scores=one.scores)
            for one in segments
        ]

    def part(self, choice: Choice, delta: ChoiceDelta, is_first: bool) -> bytes:
        out = b""
        if is_first:
            out += self.opening()
        for piece in self.pieces(delta.segments):
            if piece.key != self._open:
                out += self._close("completed")
                item = self._begin(piece)
                out += self._event("response.output_item.added", output_index=item.index, item=item.shown(begun=True))
                if item.kind in _WITH_PARTS:
                    out += self._event("response.content_part.added", part=item.part, **item.place)
                elif item.kind == MCP_CALL:
                    out += self._event("response.mcp_call.in_progress", **item.place)
            item, more = self.items[-1], {}
            item.text += piece.text
            if item.kind == TEXT:
                more = {"logprobs": self._scores(piece.scores)}
                item.logprobs += more["logprobs"]
            out += self._event(f"response.{_DELTAS[item.kind]}.delta", delta=piece.text, **item.place, **more)
        if delta.finish_reason is not None:
            self._end(choice)
            out += self._close(self.status)
        return out

    def _close(self, status: str) -> bytes:
        """The last item is over."""
        if self._open is None:
            return b""
        item, self._open = self.items[-1], None
        item.status = status
        kind, out = f"response.{_DELTAS[item.kind]}.done", b""
        if item.kind not in _WITH_PARTS:
            out += self._event(kind, arguments=item.text, **item.place)
        else:
            more = {"logprobs": item.logprobs} if item.kind == TEXT else {}
            out += self._event(kind, text=item.text, **item.place, **more)
            out += self._event("response.content_part.done", part=item.part, **item.place)
        return out + self._done(item)

    def _done(self, item: OutputItem) -> bytes:
        return self._event("response.output_item.done", output_index=item.index, item=item.shown())

    def last(self) -> bytes:
        return self._event(f"response.{self.status}", response=self.response())
