"""`zse serve` on one GPU, measured from outside: start, memory, first tokens, clients at once, models that take turns.

    python benchmarks/gpu_serve.py --client serve_bench.py [--types int4,fp8,bf16] [--parts start,memory,ttft,load,swap]

For each type a model of Qwen2.5-7B's shape with random weights is made (make_random_model.py) unless FOLDER has it.

    start   exec of `zse serve` → first streamed token, page cache warm; --cold: dropped as well; phases of one start
    memory  GPU memory in use after the start, for one sequence of 8k tokens
    ttft    one client, 128, 1,024 and 7,000 tokens in
    load    --clients at once, 512 tokens in, 256 out (--client is the script that plays them)
            beside both the floor: the bytes that a step must read at 4.35 TB/s, of a mixture's experts those that are chosen
    default the same with no option of zse serve at all, and a burst: 1,000 requests of 1,024 tokens at once, none refused
    mix     MIX (clients, tokens in and out) with no option of zse serve, the clients in four processes
    checkpoints  starts of an AWQ directory, and of a bf16 directory as it is and with --quantize fp8, int4, int8; not by type
    swap    two models of which one fits (--max-loaded 1): request for the other one → first token, with an engine that has
            been parked for 3 s, and with one that was parked just now

Every server is ended by its pid. A server that dies, or a part that is over its share of --budget-seconds, ends the
part with a line that says so. vLLM's figures are those of vLLM 0.26.0 on an H200 (benchmarks/LOG.md).
"""

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import make_random_model

from zse.bench.process import free_port
from zse.bench.startup import drop_page_cache

HERE = os.path.dirname(os.path.abspath(__file__))
# Types → figure → vLLM 0.26.0, H200, the same shape (AWQ int4 with Machete, FP8 dynamic, BF16).
VLLM: dict[str, dict[str, float]] = {
    "int4": {
        "start s": 65.3,
        "memory GiB": 130.6,
        "decode 1": 267,
        "ttft 128": 15.6,
        "ttft 1024": 30.5,
        "ttft 7000": 187,
        "out 4": 1001,
        "out 16": 3387,
        "out 64": 7616,
        "out 256": 10825,
    },
    "fp8": {
        "start s": 96.6,
        "memory GiB": 130.4,
        "decode 1": 300,
        "ttft 128": 12.8,
        "ttft 1024": 27.3,
        "ttft 7000": 129,
        "out 4": 1120,
        "out 16": 3911,
        "out 64": 10125,
        "out 256": 12425,
    },
    "bf16": {
        "start s": 80.6,
        "memory GiB": 130.6,
        "decode 1": 212,
        "ttft 128": 12.3,
        "ttft 1024": 30.8,
        "ttft 7000": 177,
        "out 4": 803,
        "out 16": 2788,
        "out 64": 7391,
        "out 256": 9924,
    },
}
# clients:in:out → (requests, output tok/s of vLLM 0.26.0 with its defaults: int4, fp8), an H200, four client processes.
MIX = {
    "64:512:256": (128, 7513, 9914),
    "256:512:256": (512, 9318, 11341),
    "128:128:512": (256, 17522, 21966),
    "64:2048:128": (128, 2089, 3097),
    "32:7000:64": (64, 337, 501),
    "256:1000:100": (512, 3380, 4518),
}
for _case, (_, _int4, _fp8) in MIX.items():
    VLLM["int4"][f"mix {_case}"], VLLM["fp8"][f"mix {_case}"] = _int4, _fp8
UNCACHED = ("--no-prefix-cache", "--speculation", "none")  # of all parts but `default`
# Of the prompts, another for each case: with one seed the 512 prompts of 256 clients began with the 128 of 64 clients before them,
# which the prefix cache of default settings then had.
SEEDS = itertools.count(1)
CACHED_BY_CHANCE = 50
PARTS = ("start", "memory", "ttft", "load", "default", "mix", "checkpoints", "swap")
# What the part checkpoints starts: name → the directory's type of make_random_model.py, options of zse serve.
CHECKPOINTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "awq": ("hf-awq", ()),
    "as it is": ("hf-bf16", ()),
    **{f"to {quant}": ("hf-bf16", ("--quantize", quant)) for quant in ("fp8", "int4", "int8")},
}
# How long an engine is parked before the request comes: at once its files are not registered yet.
SWAPS = {3.0: "swap", 0.0: "swap at once"}
READ_BYTES_S = 4.35e12  # of an H200's memory, measured
READERS, READ_BYTES = 8, 2 << 20  # of the disk's speed: as the loader reads


class Failed(Exception):
    """A part that cannot go on."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="int4,fp8,bf16")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "zse-bench"))
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokenizer", help="a tokenizer.json for the models that are made")
    parser.add_argument("--client", help="the script that plays the clients (serve_bench.py)")
    parser.add_argument("--clients", default="1,4,16,64,256")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--checkpoints", default=",".join(CHECKPOINTS), help="which starts of the part of that name")
    parser.add_argument("--cold", action="store_true", help="also with the page cache dropped")
    parser.add_argument("--budget-seconds", type=float, default=600.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("options", nargs="*", help="more options of zse serve, after --")
    own = parser.parse_args()
    # As installed: modules have bytecode, which costs a start 0.2 s where it must do without.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    types, parts = own.types.split(","), own.parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown or {"load", "ttft", "default", "mix"} & {*parts} and not own.client:
        parser.error(f"no such part: {', '.join(unknown)}" if unknown else "ttft, load, default and mix need --client")
    os.makedirs(own.folder, exist_ok=True)
    end = time.monotonic() + own.budget_seconds
    figures: dict[str, dict[str, float]] = {}
    steps = [(type, part) for type in types for part in parts if part != "checkpoints"]
    steps += [(name, "checkpoints") for name in own.checkpoints.split(",") if "checkpoints" in parts]
    for number, (type, part) in enumerate(steps):
        # What is left is shared by the parts that are left; load takes three shares.
        weights = [3 if name in ("load", "default", "mix") else 1 for _, name in steps[number:]]
        share = (end - time.monotonic()) * weights[0] / sum(weights)
        try:
            if share < 3:
                raise Failed("no time left")
            into, deadline = figures.setdefault(type, {}), time.monotonic() + share
            if part == "checkpoints":
                made, options = CHECKPOINTS[type]
                measure_starts(model_path(own, made), own, deadline, into, type, options)
            else:
                measure(part, model_path(own, type), own, deadline, into)
        except Failed as error:
            print(f"{type} {part}: {error}", flush=True)
    is_vllms = own.shape == parser.get_default("shape") and not own.layers  # what vLLM's figures are of
    print(table(figures, VLLM if is_vllms else {}))
    if own.json:
        with open(own.json, "w") as file:
            json.dump(figures, file, indent=1)
    return 0


def model_path(own, type: str) -> str:
    if os.path.exists(type):
        return type
    path = os.path.join(own.folder, f"{own.shape}-{own.layers or 'all'}-{type}")
    path += "" if type.startswith("hf-") else ".zse"
    if not os.path.exists(path):
        command = [
            sys.executable,
            os.path.join(HERE, "make_random_model.py"),
            path,
            "--shape",
            own.shape,
            "--type",
            type,
        ]
        command += ["--layers", str(own.layers)] if own.layers else []
        command += ["--tokenizer", own.tokenizer] if own.tokenizer else []
        subprocess.run(command, check=True)
    return path


def measure(part: str, path: str, own, deadline: float, into: dict[str, float]) -> None:
    if part == "start":
        measure_starts(path, own, deadline, into)
    elif part == "memory":
        with Server([path], own, "--max-context", "8192", "--max-rows", "1") as server:
            server.first_token(deadline)
            into["memory GiB"] = gpu_memory_mib() / 1024
            print(
                f"{os.path.basename(path)}: GPU memory {into['memory GiB']:.2f} GiB; "
                f"{server.metric('zse_engine_memory_bytes')}",
                flush=True,
            )
    elif part == "swap":
        measure_swap(path, own, deadline, into)
    else:
        counts = [int(word) for word in own.clients.split(",")]
        cases = [f"1:{size}:8:6" for size in (128, 1024, 7000)]
        options = "--max-context", "8192", "--max-rows", str(max(64, *counts)), *UNCACHED
        if part != "ttft":
            # As few requests as give a steady figure: at least two rounds.
            cases = [
                f"{count}:{128 if count == 1 else 512}:256:{4 if count == 1 else max(8, 2 * count)}" for count in counts
            ]
        if part == "default":
            options = ()
            cases.append("1000:1024:16:1000")
        if part == "mix":
            options, cases = (), [f"{case}:{requests}" for case, (requests, *_) in MIX.items()]
        with Server([path], own, *options) as server:
            server.first_token(deadline)
            for case in cases:
                row = play(own.client, server, case, deadline)
                print(f"{os.path.basename(path)}: {json.dumps(row)}", flush=True)
                print_floor(own, path, row)
                if part == "mix":
                    into[f"mix {row['clients']}:{row['in']}:{row['out']}"] = row["out_tok_s"]
                elif part == "default":
                    into[f"default out {row['clients']}"] = row["out_tok_s"]
                elif part == "ttft":
                    into[f"ttft {row['in']}"] = row["ttft_p50_ms"]
                elif row["clients"] == 1:
                    into["decode 1"] = row["decode_tok_s_per_client"]
                else:
                    into[f"out {row['clients']}"] = row["out_tok_s"]
            cached = float(server.metric("zse_cached_prompt_tokens_total", 1).rpartition(" ")[2] or 0)
            # Of 1,770 random prompts about ten begin with a token that another began with: one token each.
            if cached > CACHED_BY_CHANCE:
                raise SystemExit(f"{os.path.basename(path)}: {cached:.0f} tokens of prompts came from the cache")


def floor_s(own, type: str, rows: int) -> tuple[float, float]:
    """(bytes, seconds) that the weights of a decode step of `rows` sequences take at least: all but the embedding, of experts as many as
    so many tokens choose where every choice is as likely."""
    config = dict(make_random_model.SHAPES[own.shape])
    if own.layers:
        config["num_hidden_layers"] = own.layers
    part = 1.0
    if "num_experts" in config:
        part = 1 - (1 - config["num_experts_per_tok"] / config["num_experts"]) ** rows
    nbytes = 0.0
    for name, shape, group in make_random_model.tensors(config):
        if "embed_tokens" not in name or config["tie_word_embeddings"]:
            planned = make_random_model.planned(name, shape, group, type)
            nbytes += planned.nbytes * (part if ".experts." in name else 1)
    return nbytes, nbytes / READ_BYTES_S


def print_floor(own, path: str, row: dict) -> None:
    type = os.path.basename(path).removesuffix(".zse").rpartition("-")[2]
    if type not in ("int4", "int8", "fp8", "bf16"):
        return
    nbytes, seconds = floor_s(own, type, row["clients"])
    rate = row["clients"] / seconds
    got = row["decode_tok_s_per_client"] if row["clients"] == 1 else row["out_tok_s"]
    print(f"  floor: {nbytes / 1e9:.2f} GB a step, {rate:.0f} tok/s; {100 * got / rate:.0f} % of it", flush=True)


def files_of(path: str) -> list[str]:
    return [path] if os.path.isfile(path) else [entry.path for entry in os.scandir(path) if entry.is_file()]


def disk_seconds(path: str) -> tuple[int, float]:
    """(bytes, seconds) of plain reads of a model's files, not in the page cache, by READERS threads in order."""
    drop_page_cache(path)
    files = [(os.open(name, os.O_RDONLY), os.path.getsize(name)) for name in files_of(path)]
    pieces = [(fd, at) for fd, size in files for at in range(0, size, READ_BYTES)]
    local = threading.local()

    def read(piece: tuple[int, int]) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(READ_BYTES)
        return os.preadv(piece[0], [local.buffer], piece[1])

    with ThreadPoolExecutor(READERS) as pool:
        start = time.perf_counter()
        total = sum(pool.map(read, pieces))
        seconds = time.perf_counter() - start
    for fd, _ in files:
        os.close(fd)
    return total, seconds


def measure_starts(
    path: str, own, deadline: float, into: dict[str, float], name: str = "", options: tuple[str, ...] = ()
) -> None:
    """Starts of a model; name: of what is printed, the file's by default."""
    name = name or os.path.basename(path)
    for cold in (False, True) if own.cold else (False,):
        seconds, beyond = [], []
        for number in range(own.starts):
            if time.monotonic() > deadline:
                break
            if cold:
                nbytes, disk_s = disk_seconds(path)
                into["disk s"] = min(disk_s, into.get("disk s", disk_s))
                print(f"{name}: plain reads {nbytes / 1e9:.2f} GB in {disk_s:.2f} s, {nbytes / disk_s / 1e9:.2f} GB/s")
                drop_page_cache(path)
            with Server([path], own, "--max-context", "8192", "--max-rows", "1", *options) as server:
                seconds.append(server.first_token(deadline))
                if cold:
                    beyond.append(seconds[-1] - disk_s)
                if not number:  # the first start also fills the caches of bytecode and kernels
                    if not cold:
                        seconds.clear()
                    continue
                if number == 1:
                    print(
                        f"{name}: {'cold' if cold else 'warm'} start, phases in ms: server "
                        f"{server.metric('zse_start_phase_seconds', 1000)}; engine "
                        f"{server.metric('zse_engine_phase_seconds', 1000)}",
                        flush=True,
                    )
        if not seconds:
            raise Failed("no time for a second start")
        figure = "start s, page cache dropped" if cold else "start s"
        into[figure] = statistics.median(seconds)
        print(f"{name}: {figure}: {', '.join(f'{value:.3f}' for value in sorted(seconds))}", flush=True)
        if cold:
            into["start s beyond plain reads"] = statistics.median(beyond)
            print(f"{name}: beyond plain reads: {', '.join(f'{value:.3f}' for value in sorted(beyond))}", flush=True)


def measure_swap(path: str, own, deadline: float, into: dict[str, float]) -> None:
    twin = path.removesuffix(".zse") + "-twin.zse"
    if not os.path.exists(twin):
        os.link(path, twin)
    names = [os.path.basename(model).removesuffix(".zse") for model in (path, twin)]
    with Server(
        [path, twin], own, "--max-context", "8192", "--max-rows", "1", "--max-loaded", "1", "--spare-engines", "1"
    ) as server:
        server.first_token(deadline)
        for pause_s, name in SWAPS.items():
            seconds = []
            for number in range(6):
                while "zse_parked_engines 1" not in server.get("/metrics"):
                    server.check(deadline)
                    time.sleep(0.01)
                time.sleep(pause_s)
                start = time.perf_counter()
                server.stream_first(names[(number + 1) % 2], deadline)
                seconds.append(time.perf_counter() - start)
            print(
                f"{os.path.basename(path)}: {name}: request for a model that is not loaded → first token, s: "
                f"{', '.join(f'{value:.3f}' for value in seconds)}; in the server, ms: "
                f"{server.metric('zse_model_load_seconds', 1000)}; engine "
                f"{server.metric('zse_engine_phase_seconds', 1000)}",
                flush=True,
            )
            into[f"{name} s"] = statistics.median(seconds)


class Server:
    """A `zse serve` on a free port; ended by its pid when the block is left."""

    def __init__(self, models: list[str], own, *options: str):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            sys.executable,
            "-m",
            "zse",
            "serve",
            *models,
            "--port",
            str(self.port),
            "--device",
            own.device,
            *options,
            *own.options,
        ]

    def __enter__(self) -> "Server":
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self.start = time.perf_counter()
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._errors.close()

    def check(self, deadline: float) -> None:
        """Raises Failed when the server is gone or the time is over."""
        if self.process.poll() is not None:
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines()[-15:] or ["no word"]
            raise Failed(f"the server ended with exit code {self.process.returncode}:\n  " + "\n  ".join(lines))
        if time.monotonic() > deadline:
            raise Failed("over its time")

    def first_token(self, deadline: float) -> float:
        """Seconds from exec to the first event with a token, asked for as soon as the socket is open."""
        while True:
            self.check(deadline)
            try:
                sock = socket.create_connection(("127.0.0.1", self.port), timeout=0.5)
                break
            except OSError:
                time.sleep(0.001)
        with sock:
            self._stream(sock, None, deadline)
        return time.perf_counter() - self.start

    def stream_first(self, model: str, deadline: float) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as sock:
            self._stream(sock, model, deadline)

    def _stream(self, sock: socket.socket, model: str | None, deadline: float) -> None:
        body: dict = {
            "prompt": list(range(1000, 1016)),
            "max_tokens": 8,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        } | ({"model": model} if model else {})
        data = json.dumps(body).encode()
        sock.settimeout(0.25)
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(data) + data
        )
        answer = b""
        while b"data: {" not in answer:
            self.check(deadline)
            try:
                piece = sock.recv(1 << 16)
            except TimeoutError:
                continue
            if not piece or b'{"error"' in answer + piece:
                end = time.monotonic() + 2
                while time.monotonic() < end:  # a server that cannot load its model ends, and says why
                    self.check(deadline)
                    time.sleep(0.02)
                raise Failed(f"the server answered {(answer + piece)[-200:].decode(errors='replace')}")
            answer += piece

    def get(self, path: str) -> str:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = b""
            while piece := sock.recv(1 << 16):
                answer += piece
        return answer.partition(b"\r\n\r\n")[2].decode()

    def metric(self, name: str, factor: float = 2**-20) -> str:
        """The values of a metric (of the first model that has it) by their last label, as one text."""
        values: dict[str, str] = {}
        for line in self.get("/metrics").splitlines():
            if line.startswith(name + "{"):
                labels, _, value = line.rpartition(" ")
                label = labels.rpartition('="')[2].removesuffix('"}')
                values.setdefault(label, f"{label} {float(value) * factor:.0f}")
        return ", ".join(values.values())


def play(client: str, server: Server, case: str, deadline: float) -> dict:
    """The figures that the client script prints for one case."""
    server.check(deadline)
    process = subprocess.Popen(
        [
            sys.executable,
            client,
            "load",
            "--url",
            server.url,
            "--case",
            case,
            "--seed",
            str(next(SEEDS)),
            "--procs",
            "4",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None:
        try:
            server.check(deadline)
        except Failed:
            process.kill()
            process.communicate()
            raise
        time.sleep(0.05)
    output, errors = process.communicate()
    if process.returncode or not output.strip():
        raise Failed(f"case {case}: the client failed: {(errors.strip().splitlines() or ['no word'])[-1]}")
    return json.loads(output.strip().splitlines()[-1])


def gpu_memory_mib() -> float:
    result = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(result.stdout.split()[0])


def table(figures: dict[str, dict[str, float]], peer: dict[str, dict[str, float]]) -> str:
    """Our figures beside the peer's, by type."""
    names = list(dict.fromkeys(name for values in figures.values() for name in values))
    lines = ["figure".ljust(30) + "".join(f"{os.path.basename(type):>12}{'vLLM':>10}{'ratio':>8}" for type in figures)]
    for name in names:
        line = name.ljust(30)
        for type, values in figures.items():
            ours, theirs = values.get(name), peer.get(type, {}).get(name)
            line += " " * 12 if ours is None else f"{ours:12.3f}" if ours < 10 else f"{ours:12.1f}"
            line += f"{theirs:10.1f}" if theirs is not None else " " * 10
            line += f"{ours / theirs:8.2f}" if ours is not None and theirs else " " * 8
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
