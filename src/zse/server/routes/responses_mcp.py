"""Responses whose model may call tools of MCP servers: rounds of the model with the calls between them, one answer."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from zse.http.exchange import Response
from zse.server import idempotency
from zse.server.answering import CompletionRun, TokenUsage, accept, begun
from zse.server.api_request import APIRequest
from zse.server.errors import APIError, unsupported
from zse.server.mcp.results import CallResult, McpTool
from zse.server.mcp.servers import McpServer
from zse.server.mcp.session import McpError
from zse.server.requests.completions import SESSION_HEADER, Completion
from zse.server.requests.mcp import ALWAYS, NEVER, approved
from zse.server.requests.responses import check_items, completion_of
from zse.server.routes.mcp import check_access
from zse.server.routes.response_items import CALL, MCP_CALL, OutputItem, OutputPiece, ResponseWriter
from zse.server.tools.answer import AnswerSegment
from zse.server.tools.calls import load_object
from zse.server.work import RequestRun, maybe_in_thread

# Of one request: its calls where max_tool_calls says nothing, and the time in which they may begin.
MAX_CALLS, TOTAL_S = 32, 600.0


class _Offer(NamedTuple):
    """A tool that the model may call. asks: the user has to approve each call."""

    tool: McpTool
    asks: bool


class _Writer(ResponseWriter):
    """offers: by the name of the function that the model sees. to_run: calls of the round that are complete. waits: the
    client has to do something before the model can go on."""

    def __init__(self, values: dict, job: CompletionRun):
        super().__init__(values, job)
        self.offers: dict[str, _Offer] = {}
        self.to_run: list[OutputItem] = []
        self.waits = False
        self._called: dict[int, _Offer | None] = {}
        self._to_ask: dict[int, list] = {}
        self._before = TokenUsage(0, 0, 0, 0)

    @property
    def used(self) -> TokenUsage:
        """By all rounds so far."""
        parts = zip(msgspec.structs.astuple(self._before), msgspec.structs.astuple(self.job.usage), strict=True)
        return TokenUsage(*map(sum, parts))

    def begin_round(self, job: CompletionRun) -> None:
        self._before, self.job, self.status = self.used, job, "in_progress"
        self._called.clear()

    def pieces(self, segments: list[AnswerSegment]) -> list[OutputPiece]:
        out = []
        for piece in super().pieces(segments):
            kind, index = piece.key
            if kind == CALL and piece.more["name"]:
                self._called[index] = self.offers.get(piece.more["name"])
            offer = self._called.get(index) if kind == CALL else None
            if offer is None:
                self.waits |= kind == CALL
                out.append(piece)
            elif offer.asks:
                self._to_ask.setdefault(index, [offer, ""])[1] += piece.text
            else:
                out.append(OutputPiece((MCP_CALL, index), piece.text, _about(offer.tool)))
        return out

    def _done(self, item: OutputItem) -> bytes:
        if item.kind == MCP_CALL and item.status == "completed":  # the model has written it; it has not run
            item.status = "calling"
            self.to_run.append(item)
            return b""
        return super()._done(item)

    def _whole(self, kind: str, events: str, **more: object) -> bytes:
        """An item that is there at once. events: those between its beginning and its end."""
        item = self._begin(OutputPiece((kind, 0), "", more))
        self._open = None
        out = self._event("response.output_item.added", output_index=item.index, item=item.shown())
        for event in events.split():
            out += self._event(f"response.{kind}.{event}", **item.place)
        return out + super()._done(item)

    def listed(self, label: str, tools: list[McpTool], error: str) -> bytes:
        """The tools of a server, as the model has them."""
        shown = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.schema, "annotations": None}
            for tool in tools
        ]
        ended = "in_progress failed" if error else "in_progress completed"
        return self._whole("mcp_list_tools", ended, server_label=label, tools=shown, error=error or None)

    def asked(self) -> bytes:
        """The questions that the round has left."""
        out = b""
        if self.status != "incomplete":
            for offer, arguments in self._to_ask.values():
                self.waits = True
                told = {"server_label": offer.tool.label, "name": offer.tool.name, "arguments": arguments}
                out += self._whole("mcp_approval_request", "", **told)
        self._to_ask.clear()
        return out

    def begin_call(self, tool: McpTool, arguments: str, question: str) -> tuple[OutputItem, bytes]:
        """A call that the user has approved."""
        item = self._begin(OutputPiece((MCP_CALL, 0), arguments, _about(tool) | {"approval_request_id": question}))
        out = self._event("response.output_item.added", output_index=item.index, item=item.shown())
        out += self._event("response.mcp_call.in_progress", **item.place)
        item.text = arguments
        out += self._event("response.mcp_call_arguments.delta", delta=arguments, **item.place)
        out += self._close("completed")
        self.to_run.remove(item)
        return item, out

    def called(self, item: OutputItem, result: CallResult) -> bytes:
        """A call has ended."""
        if result.is_error:
            item.more["error"] = {
                "type": "mcp_tool_execution_error",
                "content": [{"type": "text", "text": result.output}],
            }
        else:
            item.more["output"] = result.output
        item.status = "failed" if result.is_error else "completed"
        return self._event(f"response.mcp_call.{item.status}", **item.place) + super()._done(item)


def _about(tool: McpTool) -> dict:
    empty = dict.fromkeys(("output", "error", "approval_request_id"))
    return {"server_label": tool.label, "name": tool.name} | empty


class McpAnswer:
    """The answer of one request. items: of its whole conversation."""

    def __init__(self, app, request: APIRequest, values: dict, items: list[dict]):
        self._app, self._request, self._values, self._items = app, request, values, items
        self._deadline = time.monotonic() + TOTAL_S
        self._left = values["max_tool_calls"] or MAX_CALLS
        self._created, self._first_of_round = int(time.time()), 0

    async def answer(self) -> Response | None:
        """Raises RequestError, after the first event as the stream's last one."""
        app, request, values = self._app, self._request, self._values
        servers = self._servers()
        with RequestRun(app, request) as work:
            completion = await maybe_in_thread(
                work.is_long, self._completion
            )  # says what is wrong before anything runs
            if completion.stream and "idempotency-key" in request.headers:
                raise idempotency.of_a_stream()
            if SESSION_HEADER in request.headers:  # it would have half of the rounds
                raise unsupported(SESSION_HEADER, "tools of MCP servers go with previous_response_id")
            completion.model = completion.model or app.find_model(request, None, "model").name
            writer = _Writer(values, CompletionRun(completion, work, self._created))
            waiting = approved(self._items)
            await self._offer(writer, servers)
            for question in waiting:
                await self._run_approved(writer, servers, question)
        may_call = True
        while True:
            completion = await self._round(writer, may_call)
            has_run = await self._run_calls(writer)
            if not has_run or writer.waits or writer.status == "incomplete" or not may_call:
                break
            may_call = self._left > 0 and time.monotonic() < self._deadline
            if values["max_output_tokens"] is not None and writer.used.completion >= values["max_output_tokens"]:
                writer.status = "incomplete"  # nothing is left for another round
                break
        request.note = f"{writer.used.prompt}+{writer.used.completion} tokens"
        if values["store"]:
            await writer.store()
        if not completion.stream:
            return Response(200, msgspec.json.encode(writer.response()))
        request.send_events(writer.last(), is_last=True)
        return None

    def _servers(self) -> dict[str, tuple[McpServer, dict]]:
        """label → (server, what the request says of it). Raises APIError."""
        check_access(self._request)
        found: dict[str, tuple[McpServer, dict]] = {}
        for index, tool in enumerate(self._values["tools"]):
            if tool["type"] != "mcp":
                continue
            label, path = tool["server_label"], f"tools[{index}].server_label"
            server = None if self._app.mcp is None else self._app.mcp.by_label.get(label)
            if server is None:
                known = ", ".join(self._app.mcp.by_label) if self._app.mcp else "none"
                raise APIError("invalid_value", f"'{path}' is no MCP server of this one, which has: {known}.", path)
            if label in found:
                raise APIError("invalid_value", f"'{path}' is the label of an earlier tool.", path)
            found[label] = server, tool
        return found

    def _completion(self, offers: dict[str, _Offer] | None = None, **changed: object) -> Completion:
        offers = offers or {}
        tools = [tool for tool in self._values["tools"] if tool["type"] == "function"]
        tools += [
            {"name": name, "description": offer.tool.description, "parameters": offer.tool.schema, "strict": False}
            for name, offer in offers.items()
        ]
        names = {(offer.tool.label, offer.tool.name): name for name, offer in offers.items()}
        choice = self._values["tool_choice"] if tools else None
        return completion_of(self._values | {"tools": tools, "tool_choice": choice} | changed, self._items, names)

    async def _send(self, data: bytes) -> None:
        if self._values["stream"] and data:
            self._request.send_events(data)
            await self._request.connection.drain()

    async def _offer(self, writer: _Writer, servers: dict[str, tuple[McpServer, dict]]) -> None:
        """Ask the servers for their tools, and show those that the conversation has not yet."""
        seen = {one["server_label"] for one in self._items if one["type"] == "mcp_list_tools"}
        taken = {tool["name"] for tool in self._values["tools"] if tool["type"] == "function"}
        out = writer.opening()
        for label, (server, asked) in servers.items():
            tools: list[McpTool] = []
            error = ""
            try:
                listed = await server.tools()
                wanted = asked["allowed_tools"]
                tools = [tool for tool in listed.values() if wanted is None or tool.name in wanted]
            except McpError as failed:
                error = str(failed)
            for tool in tools:
                # The name of another's tool stays the other's.
                name = tool.name if tool.name not in taken else f"{label}__{tool.name}"[:64]
                if name not in taken:
                    taken.add(name)
                    writer.offers[name] = _Offer(tool, _asks(server, tool.name, asked["require_approval"]))
            if error or label not in seen:
                out += writer.listed(label, tools, error)
        await self._send(out)

    async def _run_approved(self, writer: _Writer, servers: dict, question: dict) -> None:
        label, name = question["server_label"], question["name"]
        offered = {(offer.tool.label, offer.tool.name): offer.tool for offer in writer.offers.values()}
        tool = offered.get((label, name), McpTool(label, name, "", {}))
        item, out = writer.begin_call(tool, question["arguments"], question["id"])
        await self._send(out)
        if (label, name) in offered:
            result = await self._call(tool, question["arguments"])
        else:
            result = CallResult(f"{label} offers no tool {name} to this request", is_error=True)
        await self._send(writer.called(item, result))
        self._items += check_items([item.shown()])

    async def _round(self, writer: _Writer, may_call: bool) -> Completion:
        """The model's next words."""
        app, request, most = self._app, self._request, self._values["max_output_tokens"]
        changed: dict = {} if may_call else {"tool_choice": "none"}
        if writer.used.completion:  # what was asked of the first round it has done
            changed = {"tool_choice": "auto" if may_call else "none"}
            changed["max_output_tokens"] = None if most is None else most - writer.used.completion
        with RequestRun(app, request) as work:
            make: Callable[[], Completion] = partial(self._completion, writer.offers, **changed)
            completion = await maybe_in_thread(work.is_long or len(self._items) > 64, make)
            first = len(writer.items)
            job = CompletionRun(completion, work, self._created)
            async with begun(job):
                writer.begin_round(job)
                choice = job.choices[0]
                while choice.finish_reason is None:
                    _, event = await work.channel.next()
                    await self._send(writer.part(choice, accept(job, choice, event), False))
        await self._send(writer.asked())
        self._first_of_round = first
        return completion

    async def _run_calls(self, writer: _Writer) -> bool:
        """Run those of the round; whether there were some."""
        calls, writer.to_run = writer.to_run, []
        for item in calls:
            tool = McpTool(str(item.more["server_label"]), str(item.more["name"]), "", {})
            await self._send(writer.called(item, await self._call(tool, item.text)))
        if calls:
            self._items += check_items([item.shown() for item in writer.items[self._first_of_round :]])
        return bool(calls)

    async def _call(self, tool: McpTool, arguments: str) -> CallResult:
        """The result of one call, within what is left of the request's calls and time. Raises APIError: the key is not
        valid any more."""
        if self._app.needs_key:
            self._app.identify(self._request)
        left_s = self._deadline - time.monotonic()
        if self._left <= 0 or left_s <= 0:
            return CallResult("not run: this request has no calls or no time left", is_error=True)
        self._left -= 1
        try:
            given = load_object(arguments)
        except ValueError:
            return CallResult("the arguments are no JSON object", is_error=True)
        return await self._app.mcp.call(tool, given, self._request.tenant, left_s)


def _asks(server: McpServer, name: str, wanted: str | dict | None) -> bool:
    """Whether the user has to approve a call: where the request wants it, and where the operator does not allow it."""
    if isinstance(wanted, dict):
        wanted = NEVER if name in (wanted[NEVER] or ()) and name not in (wanted[ALWAYS] or ()) else ALWAYS
    return wanted == ALWAYS or not server.may_run(name)
