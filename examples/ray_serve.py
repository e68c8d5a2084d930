"""Replicas of `zse serve` on a Ray cluster, down to none while nobody asks, each request where its beginning is cached:

    pip install 'zse[cluster]'
    python examples/ray_serve.py smollm2 --replicas 4 --port 8000

A replica is one `zse serve` on its machine, whose start is what makes scaling to zero bearable. The ingress passes requests
and answers through as they are, streams included; keys, limits and errors stay those of `zse serve`. Ray decides how many
replicas there are and starts one again whose server has died.
"""

import argparse
import asyncio
import hashlib
import json
import signal
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from ray import serve
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

START_S = 60.0  # for a model that is read from a slow disk
FIRST_S = 900.0  # until an answer begins: one that is not a stream begins when it is whole
BLOCK_BYTES = 512  # of a request's text: about as many tokens as eight pages of KV
KEPT_BLOCKS = 65_536  # of a replica: more text than its cache is likely to hold
MOST_AHEAD = 8  # requests that the replica with the longest prefix may have more than the idlest one
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}


def blocks(body: bytes, tenant: str = "") -> Iterator[bytes]:
    """Digests of the beginnings of a request's text, each BLOCK_BYTES longer than the one before. tenant: who else's
    cache it must not be looked for in. Nothing for a body without text."""
    try:
        request = json.loads(body)
        asked = {name: request[name] for name in ("system", "messages", "prompt", "input") if name in request}
    except (ValueError, TypeError):
        return
    text = json.dumps(asked).encode() if asked else b""
    digest = hashlib.sha256(tenant.encode())
    for at in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest.update(text[at : at + BLOCK_BYTES])
        yield digest.digest()


class PrefixRouter(RequestRouter):
    """The replica that was sent the longest beginning of a request first, then the others, idlest first. One that has
    MOST_AHEAD requests more than the idlest must not get more for it."""

    def initialize_state(self, **kwargs: Any) -> None:
        self.sent: defaultdict[ReplicaID, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self.running: Counter[ReplicaID] = Counter()

    def known(self, replica: ReplicaID, wanted: list[bytes]) -> int:
        """Of the blocks, how many from the first on the replica was sent before."""
        sent = self.sent[replica]
        return next((count for count, block in enumerate(wanted) if block not in sent), len(wanted))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica a rank, the best first."""
        wanted = list(self.wanted(pending_request)) if pending_request is not None else []
        idlest = min((self.running[replica.replica_id] for replica in candidate_replicas), default=0)

        def order(replica: RunningReplica) -> tuple[int, int]:
            running = self.running[replica.replica_id]
            known = self.known(replica.replica_id, wanted) if running - idlest < MOST_AHEAD else 0
            return -known, running

        return [[replica] for replica in sorted(candidate_replicas, key=order)]

    @staticmethod
    def wanted(pending: PendingRequest) -> Iterator[bytes]:
        """The blocks of what Replica.forward() is called with."""
        _, _, headers, body = pending.args
        return blocks(body, headers.get("authorization", ""))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """What it was sent will be in its cache."""
        super().on_request_routed(pending_request, replica_id, result)
        self.running[replica_id] += 1
        sent = self.sent[replica_id]
        for block in self.wanted(pending_request):
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > KEPT_BLOCKS:
            sent.popitem(last=False)

    def on_request_completed(self, replica_id: ReplicaID, *args: Any, **kwargs: Any) -> None:
        """One less to wait for."""
        super().on_request_completed(replica_id, *args, **kwargs)
        self.running[replica_id] -= 1

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Its cache is gone too."""
        super().on_replica_actor_died(replica_id)
        self.sent.pop(replica_id, None)
        self.running.pop(replica_id, None)


@serve.deployment
class Replica:
    """One `zse serve` on a port of its own, ready when __init__ returns."""

    async def __init__(self, model: str, options: list[str]):
        command = [sys.executable, "-m", "zse", "serve", model, "--host", "127.0.0.1", "--port", "0", *options]
        self.server = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        url = await asyncio.wait_for(self._url(), START_S)
        self.reading = asyncio.create_task(self._pass_on())
        self.http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(10.0, read=None))

    async def _url(self) -> str:
        """Where the server listens, by what it says first. Raises RuntimeError with its error."""
        said = []
        async for line in self.server.stdout:
            said.append(line.decode())
            if " on http://" in said[-1]:
                return "http://" + said[-1].split(" on http://")[1].split()[0]
        raise RuntimeError("zse serve ended: " + "".join(said[-5:]).strip())

    async def _pass_on(self) -> None:
        async for line in self.server.stdout:
            sys.stderr.write(line.decode())

    async def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> AsyncIterator[Any]:
        """(status, headers) of the answer, then its bytes as they come. A reader who leaves ends the request."""
        async with self.http.stream(method, path, headers=headers, content=body) as answer:
            yield answer.status_code, {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}
            async for piece in answer.aiter_raw():
                yield piece

    async def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        if self.server.returncode is not None:
            raise RuntimeError(f"zse serve ended with {self.server.returncode}")

    async def __del__(self) -> None:
        if self.server.returncode is None:
            self.server.send_signal(signal.SIGTERM)  # it drains, then ends
            await self.server.wait()


@serve.deployment(num_replicas=1, max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0})
class Ingress:
    """HTTP in front of the replicas."""

    def __init__(self, replica: Any):
        self.replica = replica.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """The answer of the replica that the router chooses."""
        headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        pieces = self.replica.forward.remote(request.method, path, headers, await request.body())
        try:
            status, headers = await asyncio.wait_for(anext(pieces), FIRST_S)
        except Exception as error:  # of Ray: no replica starts, or the one that was asked has died
            message = f"no replica has answered ({type(error).__name__}); try again later"
            error = {"message": message, "type": "server_error", "param": None, "code": "no_replica"}
            return JSONResponse({"error": error}, 503, {"Retry-After": "5"})
        return StreamingResponse(pieces, status, headers)


def application(model: str, options: list[str], replicas: int, idle_s: float, cpus: float, gpus: float) -> Any:
    """The deployment of `model` on 0 to `replicas` replicas, with more options of `zse serve`. idle_s: before one goes;
    cpus, gpus: what Ray sets aside for each."""
    scaling = AutoscalingConfig(
        min_replicas=0,
        max_replicas=replicas,
        target_ongoing_requests=8,
        upscale_delay_s=0.0,
        downscale_delay_s=idle_s,
        metrics_interval_s=0.2,
        look_back_period_s=2.0,
    )
    router = RequestRouterConfig(request_router_class=PrefixRouter)
    deployment = Replica.options(
        autoscaling_config=scaling,
        request_router_config=router,
        max_ongoing_requests=256,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
    )
    return Ingress.bind(deployment.bind(model, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=2, help="at most")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds without requests before a replica goes")
    parser.add_argument("--cpus", type=float, default=1.0, help="of each replica")
    parser.add_argument("--gpus", type=float, default=0.0, help="of each replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments, options = parser.parse_known_args()  # what is not known here is for `zse serve`
    serve.start(http_options=HTTPOptions(host=arguments.host, port=arguments.port))
    scale = arguments.replicas, arguments.idle, arguments.cpus, arguments.gpus
    serve.run(application(arguments.model, options, *scale), blocking=True)


if __name__ == "__main__":
    main()
