"""A small OpenAI-compatible server in this process, whose answers and pauses a test chooses."""

import asyncio
import json
import threading


class FakeOpenAI:
    """mode: "sse" (chunked), "close" (to the end of the connection), "length" (Content-Length), and broken
    ones: "status",
    "error" (an error event), "cut" (the connection ends inside a chunk), "open" (ends without [DONE]), "html", "hang",
    "empty", "odd" (events of another form). fail_every: every n-th request is refused with 503.
    usage: send the server's own counts."""

    def __init__(self):
        self.mode, self.fail_every, self.usage = "sse", 0, True
        self.first_s = self.gap_s = 0.0
        self.bodies: list[dict] = []
        self.heads: list[str] = []
        self.running = self.most_running = 0

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=256)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error):
        async def stop():
            self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _serve(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            length = next(int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line)
            raw = await reader.readexactly(length)
            if head.startswith("GET"):
                answer = json.dumps({"data": [{"id": "fake"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
            else:
                self.running += 1
                self.most_running = max(self.most_running, self.running)
                try:
                    await self._answer(head, json.loads(raw), writer)
                finally:
                    self.running -= 1
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, body: dict, writer) -> None:
        self.bodies.append(body)
        chat = "/chat/" in head.split()[1]
        refused = self.fail_every and len(self.bodies) % self.fail_every == 0
        if self.mode == "status" or refused:
            text = json.dumps({"error": {"message": "too much at once"}}).encode()
            writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
            return
        if self.mode == "html":
            writer.write(b"<html>not HTTP</html>\r\n\r\n")
            return
        framing = {"close": b"", "length": b""}.get(self.mode, b"Transfer-Encoding: chunked\r\n")
        events = list(self._events(body, chat))
        if self.mode == "length":
            framing = b"Content-Length: %d\r\n" % sum(map(len, events))
        writer.write(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + framing + b"\r\n"
        )
        await asyncio.sleep(self.first_s)
        if self.mode == "hang":
            await asyncio.sleep(60)
        for index, event in enumerate(events):
            if self.mode in ("close", "length"):
                writer.write(event)
            elif index == 2 and self.mode == "cut":
                writer.write(b"40\r\ndata: {")
                return
            else:  # an event over two chunks, one of them with an extension
                for part in (event[:7], event[7:]):
                    writer.write(b"%x;x=y\r\n" % len(part) + part + b"\r\n")
            await writer.drain()
            if index + 1 < len(events):
                await asyncio.sleep(self.gap_s)
        if "chunked" in framing.decode():
            writer.write(b"0\r\n\r\n")

    def _events(self, body: dict, chat: bool):
        def event(value) -> bytes:
            return b"data: " + json.dumps(value).encode() + b"\r\n\r\n"

        def choice(text, reason=None):
            part = {"delta": {"content": text}} if chat else {"text": text}
            return event({"choices": [{"index": 0, **part, "finish_reason": reason}]})

        yield b": a comment\n\n"
        if self.mode == "odd":
            yield event({"choices": [7], "usage": {"completion_tokens": []}})
        if chat:
            yield event({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
        if self.mode != "empty":
            for index in range(body["max_tokens"]):
                yield choice(f" t{index}")
                if self.mode == "error" and index == 1:
                    yield event({"error": {"message": "out of memory"}})
        if self.mode == "open":
            return
        yield choice("", "length")
        if self.usage:
            counts = {"prompt_tokens": 11, "completion_tokens": body["max_tokens"],
                      "prompt_tokens_details": {"cached_tokens": 4}}  # fmt: skip
            yield event({"choices": [], "usage": counts})
        yield b"data: [DONE]\n\n"
