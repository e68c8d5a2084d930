"""What benchmarks/peer_reliability.py does to any OpenAI-compatible server. A part starts a server of its own, attacks it through
sockets as a stranger could, and says what came back: figure → text. Nothing is asked of a server that only one of them has."""

import asyncio
import contextlib
import random
import signal
import socket
import statistics
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import harness
import test_error_contract
import test_http
import wire
from hostile import GRAMMARS, SCHEMAS, TEMPLATES
from peer_servers import CONTEXT, MEMORY_LIMIT, ROWS, NoStart, Peer, Running
from wire import TEXT, Answer, completion, words


@dataclass
class Settings:
    """How much is sent; seconds: of the overload, and of each half of the slow connections; model: a GGUF file."""

    model: str
    seconds: float = 60.0
    mutants: int = 20_000
    requests: int = 10_000
    sockets: int = 1000


Figures = dict[str, str]


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def counts(counter: Counter) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items(), key=lambda item: -item[1])) or "none"


# -- errors

# Rows that need the inside of this project's server, or are its own bounds on sizes, or say what only it has.
NOT_ASKED = (
    "scope:", "unsupported", "dimensions", "schema", "long: messages", "long: logit_bias", "long: stop's", "token id:",
    "slow head", "half a body", "large", "long header", "many headers", "long target", "http: other Host", "rpm", "tpm",
    "concurrency", "queue", "draining", "restarting", "crash", "deadline", "bug", "NaN",
    "conflict", "pull",  # of an administrator
)  # fmt: skip
BEYOND = {
    "token id: prompt": {"prompt": [1, 1_000_000]},
    "token id: logit_bias": {"prompt": "a", "logit_bias": {"1000000": 1}},
}


def remote(port: int) -> SimpleNamespace:
    """What the rows of test_error_contract.py send to, for a server elsewhere."""

    def raw(data: bytes) -> Answer:
        return asyncio.run(wire.ask(port, data, 10))

    def post(body, path: str = wire.CHAT, key: str = "user", **headers) -> Answer:
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        if isinstance(body, dict):  # who accepts it is not to generate for long
            body = {"max_tokens": 1} | body
        return raw(harness.request("POST", path, body, {"authorization": f"Bearer {key}"} | more))

    def get(path: str, headers: dict | None = None) -> Answer:
        return raw(harness.request("GET", path, None, headers))

    def lines(head: bytes, body: bytes = b"") -> Answer:
        return raw(head.replace(b"\n", b"\r\n").replace(b"|", b"") + b"\r\n\r\n" + body)

    return SimpleNamespace(post=post, raw=lines, server=SimpleNamespace(raw=raw, get=get))


def verdict_of(answer: Answer, status: int) -> str:
    if answer.status == status and answer.error is not None:
        return "as the table says"
    if answer.status == 0:
        return "no answer"
    if answer.status >= 500:
        return "5xx"
    return (
        "accepted" if answer.status < 400 else "another 4xx" if answer.error is not None else "a body of another form"
    )


def errors_of(port: int) -> dict[str, tuple[int, str]]:
    """Row → (status, verdict)."""
    world, found = remote(port), {}
    rows = {
        name: (send, status)
        for name, (send, status, *_) in test_error_contract.ROWS.items()
        if not name.startswith(NOT_ASKED)
    }
    rows |= {name: (lambda world, body=body: world.post(body, TEXT), 400) for name, body in BEYOND.items()}
    for name, (send, status) in rows.items():
        answer = send(world)
        found[name] = answer.status, verdict_of(answer, status)
    return found


def errors(peer: Peer, settings: Settings) -> Figures:
    with Running(peer, settings.model, key="user") as server:
        found = errors_of(server.port)
    figures = {"rows": str(len(found))}
    for verdict in ("as the table says", "another 4xx", "a body of another form", "accepted", "5xx", "no answer"):
        names = [f"{name} ({status})" for name, (status, each) in found.items() if each == verdict]
        shown = "" if verdict == "as the table says" or not names else ": " + ", ".join(names)
        figures[verdict] = f"{len(names)}{shown}"
    return figures


# -- HTTP

# What RFC 9112 says that a server must refuse (sections 2.2, 3.2, 5, 6.1, 6.3, 7.1; RFC 9110, 5.5 and 8.6).
MUST_REFUSE = (
    "nul in value", "nul in name", "obs-fold space", "obs-fold tab", "space before colon", "space in name", "no colon", "empty name",
    "no host", "two hosts", "host with user", "host with slash", "host bad port", "host open bracket", "two different lengths",
    "length plus", "length minus", "length hex", "length space", "length letters", "length float", "length empty",
    "length overflow", "length arabic digits", "coding gzip", "coding chunked, identity", "chunk size minus", "chunk size plus",
    "chunk size 0x", "chunk size empty", "chunk size overflow", "chunk without crlf", "length and chunked", "chunked and length",
)  # fmt: skip
HTTP_REFUSALS = (400, 408, 411, 413, 414, 417, 426, 431, 501, 505)


def malformed_of(port: int) -> dict[str, str]:
    """Name → "refused", "accepted (status)", "5xx" or "no answer"."""

    def verdict(name: str) -> str:
        answer = asyncio.run(wire.ask(port, test_http.MALFORMED[name][0], 4))
        if answer.status in HTTP_REFUSALS or answer.status == 0 and answer.how in ("closed", "cut"):
            return "refused"
        if answer.status == 0:
            return "no answer"
        return f"{'5xx' if answer.status >= 500 else 'accepted'} ({answer.status})"

    return {name: verdict(name) for name in test_http.MALFORMED}


def malformed(peer: Peer, settings: Settings) -> Figures:
    with Running(peer, settings.model) as server:
        found = malformed_of(server.port)
        state = server.state()
    must = {name: found[name] for name in MUST_REFUSE}
    wrong = [f"{name}: {verdict}" for name, verdict in must.items() if verdict != "refused"]
    return {
        "that RFC 9112 has refused": f"{len(must) - len(wrong)} of {len(must)}" + "; ".join(["", *wrong]),
        f"5xx, of all {len(found)}": counts(Counter(name for name, verdict in found.items() if "5xx" in verdict)),
        "no answer in 4 s": counts(Counter(name for name, verdict in found.items() if verdict == "no answer")),
        "afterwards": state,
    }


def seeds_of_http() -> list[bytes]:
    """Whole requests, plain and chunked, of a chat that is answered with one token."""
    body = b'{"max_tokens":1,"messages":[{"role":"user","content":"hi"}]}'
    head = b"POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunks = b"5\r\n" + body[:5] + b"\r\n%x;x=y\r\n" % (len(body) - 5) + body[5:] + b"\r\n0\r\nTrailer: x\r\n\r\n"
    return [
        head + b"Authorization: Bearer key\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
        head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks,
        b"GET /v1/models HTTP/1.1\r\nHost: [::1]:80\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.0\r\nHost: localhost\r\nAccept: */*\r\n\r\n" * 2,
    ]


def mutants(peer: Peer, settings: Settings) -> Figures:
    with Running(peer, settings.model) as server:
        sent = wire.mutants(seeds_of_http(), settings.mutants, 1)
        server.ask(completion("hello", 1))
        before, descriptors, start = server.memory(), server.descriptors(), time.monotonic()
        verdicts, wrong = asyncio.run(wire.send_mutants(server.port, sent, 64, 1.0))
        took, state = time.monotonic() - start, server.state()
        left = server.descriptors() - descriptors if server.popen.poll() is None else 0
        return {
            f"{len(sent)} mutants, 64 at once": f"{took:.0f} s",
            "answers": counts(verdicts),
            "5xx": str(len(wrong)) + (f", such as {wrong[0][:120]!r}" if wrong else ""),
            "memory": f"{(server.memory() - before) / 2**20:+.1f} MiB",
            "descriptors": f"{left:+d}",
            "afterwards": state,
        }


# -- slow and absent clients


def loris(peer: Peer, settings: Settings) -> Figures:
    """Requests of one token, four a second, alone and beside connections that send a byte each five seconds."""
    draw, seconds = random.Random(1), settings.seconds / 2

    async def clients(port: int) -> list[Answer]:
        found: list[Answer] = []
        task = asyncio.create_task(wire.periodic(port, lambda: completion(words(draw, 8), 1), 0.25, 20, found))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    async def run(port: int) -> tuple[list[Answer], list[Answer], wire.Loris]:
        await wire.ask(port, completion("hello", 1), 20)
        alone = await clients(port)
        async with wire.Loris(port, settings.sockets) as slow:
            return alone, await clients(port), slow

    with Running(peer, settings.model) as server:
        alone, beside, slow = asyncio.run(run(server.port))
        state = server.state()
    good = [answer.end_s for answer in beside if answer.status == 200]
    before = [answer.end_s for answer in alone if answer.status == 200]
    return {
        "alone, median and P99": f"{ms(at(before, 0.5))}, {ms(at(before, 0.99))}",
        f"beside {settings.sockets} slow connections": f"{ms(at(good, 0.5))}, {ms(at(good, 0.99))}"
        if good
        else "none answered",
        "of their requests answered within 20 s": f"{len(good)} of {len(beside)}",
        "slow connections that were closed": str(slow.num_closed),
        "afterwards": state,
    }


def readers(peer: Peer, settings: Settings) -> Figures:
    """As many clients as the server has rows ask for long streams with 20 log-probabilities a token, and read nothing; then others
    ask."""
    fields = {"max_tokens": CONTEXT - 128, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20}
    stream = attack_of(fields)
    with Running(peer, settings.model) as server:
        idle = server.ask(completion("hello", 1)).end_s
        before, most = server.memory(), 0
        held = [wire.connect(server.port, stream, 4096) for _ in range(ROWS)]
        time.sleep(1)
        if server.until_idle(1) < 1:
            return {"the attack": "is refused"}
        start, first, waits = time.monotonic(), None, []
        while (since := time.monotonic() - start) < settings.seconds + 30:
            answer = server.ask(completion("hello", 1), settings.seconds)
            waits.append(answer.end_s)
            first = since + answer.end_s if first is None and answer.status == 200 else first
            most = max(most, server.memory() - before)
            if answer.status == 200 and server.until_idle(0.5) < 0.5:
                break
            time.sleep(0.5)
        ended = time.monotonic() - start
        state = server.state()
        for sock in held:
            sock.close()
    return {
        "a request of one token, idle": ms(idle),
        f"beside {ROWS} clients that do not read: first answered after": "never" if first is None else ms(first),
        "longest wait": ms(max(waits)),
        "the server computes for them": ms(ended),
        "memory at most": f"{most / 2**20:+.0f} MiB",
        "afterwards": state,
    }


LONG = 1900  # tokens about, of a prompt whose computation takes seconds


def leaves(peer: Peer, settings: Settings) -> Figures:
    """All rows are taken by clients, and more wait; all leave. How soon somebody else is answered, and the server idle."""
    draw, found = random.Random(2), {}
    states: dict[str, tuple[int, Callable[[], bytes], float]] = {
        "while prompts are computed": (ROWS, lambda: completion(words(draw, LONG), 100, stream=True), 0.3),
        "streams": (ROWS, lambda: completion(words(draw, 8), 1800, stream=True), 2.0),
        "whole answers": (ROWS, lambda: completion(words(draw, 8), 1800), 2.0),
        "with as many in the queue": (2 * ROWS, lambda: completion(words(draw, 8), 1800, stream=True), 2.0),
    }
    with Running(peer, settings.model) as server:
        server.ask(completion("hello", 1))
        idle = statistics.median(server.ask(completion(words(draw, 8), 1)).end_s for _ in range(5))
        found["a request of one token, idle"] = ms(idle)
        for name, (count, make, wait) in states.items():
            for way in ("fin", "rst"):
                socks = [wire.connect(server.port, make()) for _ in range(count)]
                time.sleep(wait)
                for sock in socks:
                    wire.leave(sock, way)
                answer = server.ask(completion(words(draw, 8), 1), 60)
                quiet = server.until_idle(60)
                found[f"{name}, {way}: next answer, idle after"] = (
                    f"{ms(answer.end_s) if answer.status == 200 else answer.how}, {ms(answer.end_s + quiet)}"
                )
        return found | {"afterwards": server.state()}


# -- overload


def overload(peer: Peer, settings: Settings) -> Figures:
    """Ten times as many requests a second as the server answers, for a minute; a client waits 60 s at most."""
    draw, patience = random.Random(3), 60.0

    def make() -> bytes:
        return completion(words(draw, 48), 16, stream=True)

    def good(answers: list[Answer]) -> list[Answer]:
        return [answer for answer in answers if answer.status == 200 and b"[DONE]" in answer.body]

    with Running(peer, settings.model) as server:
        server.ask(make())
        idle = statistics.median(server.ask(make()).first_s for _ in range(5))
        peak = len(good(asyncio.run(wire.closed_loop(server.port, make, 2 * ROWS, 10)))) / 10
        before = server.memory()
        start = time.monotonic()
        answers = asyncio.run(wire.open_loop(server.port, make, 10 * peak, settings.seconds, patience))
        took = time.monotonic() - start
        end, back, grown = time.monotonic(), None, server.memory() - before
        while server.popen.poll() is None and time.monotonic() - end < 60:
            if server.ask(make(), 5).first_s and server.ask(make(), 5).first_s < 2 * idle + 0.05:
                back = time.monotonic() - end
                break
        state = server.state()
    served, refused = good(answers), [answer for answer in answers if answer.status in (429, 503)]
    others = Counter(
        f"{answer.status or ''} {answer.how}".strip()
        for answer in answers
        if answer not in served and answer.status not in (429, 503)
    )
    firsts, refusals = [answer.first_s for answer in served], [answer.end_s for answer in refused]
    return {
        "peak, requests a second": f"{peak:.1f}",
        f"sent in {settings.seconds:.0f} s": str(len(answers)),
        "answered within 60 s": f"{len(served)} ({len(served) / took / peak:.0%} of the peak's rate)" if peak else "0",
        "their first token, median and P99": f"{ms(at(firsts, 0.5))}, {ms(at(firsts, 0.99))}",
        "refused, median and P99 time": f"{len(refused)}, {ms(at(refusals, 0.5))}, {ms(at(refusals, 0.99))}"
        if refused
        else "0",
        "others": counts(others),
        "memory": f"{grown / 2**20:+.0f} MiB",
        "back to normal after": "not within 60 s" if back is None else ms(back),
        "afterwards": state,
    }


# -- hostile documents


def bystanders(server: Running, attack: bytes, timeout: float) -> tuple[Answer, float]:
    """The attack's answer, and the longest that another client's request of one token took meanwhile. A server that takes more
    than MEMORY_LIMIT is killed."""

    async def watch() -> None:
        while server.memory() < MEMORY_LIMIT:
            await asyncio.sleep(0.1)
        server.popen.kill()

    async def run() -> tuple[Answer, float]:
        found: list[Answer] = []
        task = asyncio.create_task(wire.periodic(server.port, lambda: completion("hello", 1), 0.2, timeout, found))
        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0.1)
        answer = await wire.ask(server.port, attack, timeout)
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
        return answer, max((each.end_s for each in found), default=0.0)

    return asyncio.run(run())


def documents(peer: Peer, settings: Settings) -> Figures:
    """Schemas and grammars that are hard to compile, one after the other; a server that dies or hangs is started again."""
    found, timeout = {}, 30.0
    bodies = {
        name: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
        for name, schema in SCHEMAS.items()
    }
    bodies |= {name: peer.grammar(source) for name, source in GRAMMARS.items()}
    server = Running(peer, settings.model).__enter__()
    try:
        bystanders(server, attack_of({"response_format": {"type": "json_object"}}), timeout)
        for name, fields in bodies.items():
            before = server.memory()
            answer, longest = bystanders(server, attack_of(fields), timeout)
            grown = (server.memory() - before) / 2**20
            dead = server.popen.poll() is not None or server.memory() == 0 and server.popen.wait(5) is not None
            if dead and server.popen.returncode == -signal.SIGKILL:
                what = f"killed at {MEMORY_LIMIT >> 30} GiB"
            else:
                what = f"dies ({server.popen.returncode})" if dead else str(answer.status or answer.how)
            found[name] = f"{what} in {ms(answer.end_s)}, others {ms(longest)}, {grown:+.0f} MiB"
            if dead or server.until_idle(5) >= 5:
                found[name] += "" if dead else ", computes on"
                server.__exit__()
                server = Running(peer, settings.model).__enter__()
    finally:
        server.__exit__()
    return found


def attack_of(fields: dict) -> bytes:
    chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    return wire.request(wire.CHAT, chat | fields)


def templates(peer: Peer, settings: Settings) -> Figures:
    """A model file whose chat template is hostile: what a start and one chat do, and how long others wait."""
    found, data, timeout = {}, Path(settings.model).read_bytes(), 20.0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "hostile.gguf"
        for name, template in TEMPLATES.items():
            model.write_bytes(with_template(data, template))
            try:
                with Running(peer, str(model), start_s=timeout) as server:
                    found[name] = one_template(server, timeout)
            except NoStart as error:
                found[name] = f"no start: {error}"
    return found


def one_template(server: Running, timeout: float) -> str:
    before = server.memory()
    answer, longest = bystanders(server, attack_of({}), timeout)
    grown, start = (server.memory() - before) / 2**20, time.monotonic()
    server.popen.send_signal(signal.SIGTERM)
    try:
        server.popen.wait(timeout)
        ended = f"SIGTERM ends it in {ms(time.monotonic() - start)}"
    except subprocess.TimeoutExpired:
        ended = f"SIGTERM does not end it in {timeout:.0f} s"
    return f"{answer.status or answer.how} in {ms(answer.end_s)}, others {ms(longest)}, {grown:+.0f} MiB, {ended}"


def with_template(data: bytes, template: str) -> bytes:
    """The model file with another chat template, as long as its own: a comment fills it."""
    key = b"tokenizer.chat_template"
    at = data.index(key) + len(key)
    kind, length = struct.unpack_from("<IQ", data, at)
    filler = length - len(template.encode()) - len("{##}")
    assert kind == 8 and filler >= 0, "the model's own template is shorter"
    return data[: at + 12] + template.encode() + b"{#" + b"x" * filler + b"#}" + data[at + 12 + length :]


# -- long runs and the end

ROUNDS = 5  # of growth()


def growth(peer: Peer, settings: Settings) -> Figures:
    """Mixed requests, 5 % of them left; memory from when all pages of the cache have been used, round by round."""
    draw = random.Random(4)
    kinds = [
        lambda: completion(words(draw, 4), 1),
        lambda: completion(words(draw, 4), 2, stream=True),
        lambda: attack_of({"max_tokens": 1}),
        lambda: attack_of({"temperature": 9}),
        lambda: wire.request(wire.CHAT, b"{"),
        lambda: wire.request("/v1/models", None, method="GET"),
        lambda: wire.request("/nope", None, method="GET"),
    ]

    async def drive(port: int, count: int) -> None:
        turns = iter(range(count))

        async def client() -> None:
            for number in turns:
                if number % 20:
                    await wire.ask(port, draw.choice(kinds)(), 30)
                    continue
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(completion(words(draw, 4), 1000, stream=True))
                await asyncio.sleep(0.02)
                writer.close()

        await asyncio.gather(*(client() for _ in range(8)))

    with Running(peer, settings.model) as server:
        start, held = time.monotonic(), [server.memory()]
        # Memory of a cache is taken when a page is first written: until two rounds of fresh prompts take no more.
        while len(held) < 4 or max(held[-1] - held[-2], held[-2] - held[-3]) > 1 << 20:
            asyncio.run(wire.closed_loop(server.port, lambda: completion(words(draw, LONG // 2), 1), ROWS, 10))
            held.append(server.memory())
            if time.monotonic() - start > 180:
                break
        asyncio.run(drive(server.port, settings.requests // 5))
        descriptors, start = server.descriptors(), time.monotonic()
        found = [server.memory()]
        for _ in range(ROUNDS):
            asyncio.run(drive(server.port, settings.requests // ROUNDS))
            found.append(server.memory())
        took = time.monotonic() - start
        server.until_idle(10)
        left = server.descriptors() - descriptors
        return {
            f"{settings.requests} requests": f"{took:.0f} s",
            "memory": f"{(found[-1] - found[0]) / settings.requests:+.0f} bytes a request",
            f"after each of {ROUNDS} rounds, MiB": ", ".join(f"{held / 2**20:.1f}" for held in found),
            "descriptors": f"{left:+d}",
            "afterwards": server.state(),
        }


def sigterm(peer: Peer, settings: Settings) -> Figures:
    """Streams of 200 tokens in all rows, each with its first text, as many whole answers in the queue: SIGTERM."""
    draw, limit = random.Random(5), 60.0

    def first_text(sock: socket.socket) -> bytes:
        got = b""
        while b"data: {" not in got and (piece := sock.recv(1 << 16)):
            got += piece
        return got

    def rest(sock: socket.socket, got: bytes, end: float) -> bytes:
        with contextlib.suppress(TimeoutError, ConnectionError):
            while (left := end - time.monotonic()) > 0:
                sock.settimeout(left)
                piece = sock.recv(1 << 16)
                if not piece:
                    return got
                got += piece
        return got

    def verdict(got: bytes) -> str:
        if b"[DONE]" in got or b'"finish_reason":"length"' in got:
            return "whole"
        return "an error" if b'"error"' in got else "cut" if got else "no answer"

    with Running(peer, settings.model) as server:
        server.ask(completion("hello", 1))
        streams = [wire.connect(server.port, completion(words(draw, 8), 200, stream=True)) for _ in range(ROWS)]
        began = []
        for sock in streams:
            sock.settimeout(30)
            began.append(first_text(sock))
        queue = [wire.connect(server.port, completion(words(draw, 8), 20)) for _ in range(ROWS)]
        time.sleep(0.3)
        start = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        late = server.ask(completion("hello", 1), 5)
        ends = [rest(sock, got, start + limit) for sock, got in zip(streams, began)]
        took = time.monotonic() - start
        answers = [rest(sock, b"", start + limit) for sock in queue]
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.popen.wait(max(1.0, start + limit - time.monotonic()))
        code, ended = server.popen.poll(), time.monotonic() - start
        for sock in (*streams, *queue):
            sock.close()
    return {
        f"{ROWS} streams": f"{counts(Counter(map(verdict, ends)))}, all ended after {ms(took)}",
        f"{ROWS} in the queue": counts(Counter(map(verdict, answers))),
        "who asks then": str(late.status or late.how),
        "exit": f"code {code} after {ms(ended)}" if code is not None else f"not within {limit:.0f} s",
    }


PARTS: dict[str, Callable[[Peer, Settings], Figures]] = {
    "errors": errors,
    "malformed": malformed,
    "mutants": mutants,
    "loris": loris,
    "readers": readers,
    "leaves": leaves,
    "overload": overload,
    "documents": documents,
    "templates": templates,
    "growth": growth,
    "sigterm": sigterm,
}
