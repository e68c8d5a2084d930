"""The measuring code itself: counts, statistics and output, with the echoing LLM and a small HTTP server."""

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from zse.bench import process, serving, speed
from zse.cli import bench as cli_bench
from zse.cli import options
from zse.cli.main import parser_of
from zse.errors import ConfigError, EngineError


class CountingLLM:
    vocab_size = 5000

    def __init__(self):
        self.calls = []

    def stream(self, prompt, params):
        self.calls.append((len(prompt), params.max_tokens))
        assert params.ignore_eos and params.temperature == 0
        for index in range(params.max_tokens):
            yield SimpleNamespace(text="x", token_ids=[index], finish_reason=None)


def test_decode_times_the_tokens_after_the_first():
    llm = CountingLLM()
    result = speed.decode(llm, 16, 32, 2)
    assert llm.calls == [(16, speed.WARM_UP_TOKENS + 1), (16, 33), (16, 33)]
    assert len(result["runs"]) == 2 and min(result["runs"]) <= result["tok_per_s"] <= max(result["runs"])


def test_prefill_calls_as_described():
    llm = CountingLLM()
    assert len(speed.prefill(llm, 100, 3)["runs"]) == 3 and llm.calls[0] == (100, 1)


class Steps:
    """An engine's steps in a time of their own: a prompt takes as long as it likes, a step of all that run 10 ms."""

    def __init__(self, rows=9):
        self.now, self.waiting, self.left, self.prompts, self.rows = 0.0, [], {}, [], rows

    def submit(self, id, prompt, params):
        assert params.max_tokens + len(prompt) <= 28
        assert prompt not in self.prompts, "equal prompts would share the prefix cache"
        self.prompts.append(prompt)
        self.waiting.append((id, params.max_tokens))

    def step(self):
        self.now += 0.01
        if self.waiting and sum(map(bool, self.left.values())) < self.rows:
            self.now += random.uniform(0, 5)
            id, count = self.waiting.pop(0)
            self.left[id] = count
        found = [id for id, left in self.left.items() if left]
        self.left.update({id: self.left[id] - 1 for id in found})
        return [SimpleNamespace(id=id, tokens=[1], error=None, finish=not self.left[id] or None) for id in found]

    def cancel(self, id):
        self.left.pop(id, None)


def test_batch_times_the_steps_in_which_all_run(monkeypatch):
    engine = Steps()
    config = SimpleNamespace(max_tokens_per_step=256, max_context=28)  # 16 tokens, 9 new ones and 3 beside prompts
    llm = SimpleNamespace(vocab_size=5000, config=config, _engine=engine, _next_id=7)
    monkeypatch.setattr(speed, "perf_counter", lambda: engine.now)
    result = speed.batch(llm, 4, 16, 8, 3)
    assert result["runs"] == pytest.approx([400.0] * 3) and result["tok_per_s"] == pytest.approx(400.0)
    assert not engine.left and llm._next_id == 7 + 4 * 4
    llm._engine = Steps(rows=3)
    with pytest.raises(EngineError, match="4 sequences do not run at once"):
        speed.batch(llm, 4, 16, 8, 1)


def test_latency_times_the_first_token_and_the_ones_between():
    llm = CountingLLM()
    result = speed.latency(llm, 100, 7, 2)
    assert llm.calls == [(100, speed.WARM_UP_TOKENS + 1), (100, 8), (100, 8)] and result["prompt_tokens"] == 100
    for times in (result["ttft_ms"], result["itl_ms"]):
        assert list(times) == ["p50", "p95", "p99"] and 0 <= times["p50"] <= times["p95"] <= times["p99"]


def test_percentiles_are_those_of_the_nearest_rank():
    assert speed.percentiles([*range(200, 0, -1)]) == {"p50": 100, "p95": 190, "p99": 198}
    assert speed.percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert speed.percentiles([5.0, 1.0, 3.0]) == {"p50": 3.0, "p95": 5.0, "p99": 5.0}


def test_prompts_differ_between_repeats_and_are_reproducible():
    llm = CountingLLM()
    assert speed.prompt_ids(llm, 8, 1) == speed.prompt_ids(llm, 8, 1) != speed.prompt_ids(llm, 8, 2)
    assert all(1000 <= token < 5000 for token in speed.prompt_ids(llm, 500, 3))
    assert len({tuple(speed.prompt_ids(llm, 16, seed)) for seed in range(200)}) == 200


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["max_tokens"] == 99:
                self.send_error(400)
                return
            self.send_response(200)
            self.end_headers()
            for index in range(body["max_tokens"]):
                self.wfile.write(b'data: {"choices": [{"text": "t%d"}]}\n\n' % index)
            if body["max_tokens"] == 98:
                self.wfile.write(b'data: {"error": {"message": "broken"}}\n\n')
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield httpd.server_port
    httpd.shutdown()
    httpd.server_close()


def test_clients_count_the_pieces_and_report_failures(server):
    url = f"http://127.0.0.1:{server}/v1"
    assert [len(outcome.clocks_s) for outcome in serving.ask(url, ["x"], 7)] == [7]
    load = serving.load(url, 3, 5)
    assert load["clients"] == 3 and load["tok_per_s"] > 0 and load["ttft_ms"] > 0 and load["itl_ms"] is not None
    with pytest.raises(EngineError, match="1 of 1 clients failed: 400"):
        serving.ask(url, ["x"], 99)
    with pytest.raises(EngineError, match="3 of 3 clients failed: .*broken"):
        serving.load(url, 3, 98)


def test_a_server_that_does_not_start_is_one_line(home, monkeypatch):
    with pytest.raises(EngineError, match="ended with exit code"), serving.RunningServer("nothing", []):
        pass


def test_machine_names_what_a_figure_needs():
    facts = process.machine()
    assert {"zse", "python", "cpu", "logical_cpus", "load_average", "date"} <= set(facts)
    assert process.peak_memory_bytes() > 1 << 20


def test_the_command_prints_text_and_json(zse, tmp_path):
    text = zse("bench", "decode", "echo", "--repeats", "1", fake=True).stdout
    assert "tok per s" in text and "peak memory" in text and "load average" in text
    data = json.loads(zse("bench", "prefill", "echo", "--json", "--tokens", "5", fake=True).stdout)
    assert data["bench"] == "prefill" and data["machine"]["zse"] and data["tok_per_s"] > 0
    assert data["gpu_allocated_bytes"] == 5 << 20 and data["gpu_taken_bytes"] == 7 << 30
    text = zse("bench", "latency", "echo", "--repeats", "1", "--tokens", "5", fake=True).stdout
    assert "16 prompt tokens" in text and "128 prompt tokens" in text and "1024" not in text, "those that fit 512"
    words = ("bench", "latency", "echo", "--prompts", "9,30", "--repeats", "2", "--json")
    data = json.loads(zse(*words, fake=True).stdout)
    assert [row["prompt_tokens"] for row in data["latency"]] == [9, 30] and data["repeats"] == 2
    assert data["latency"][0]["ttft_ms"]["p99"] >= 0 and set(data["latency"][0]["itl_ms"]) == {"p50", "p95", "p99"}
    text = zse("bench", "perplexity", "echo", "--kv-dtype", "int8", "--tokens", "300", fake=True).stdout
    assert "300.0000" in text and "kv dtype" in text and "int8" in text
    own = tmp_path / "own.txt"
    own.write_text("Zwölf")
    words = ("bench", "perplexity", "echo", "--text", str(own), "--json")
    data = json.loads(zse(*words, fake=True).stdout)
    assert (data["tokens"], data["perplexity"], data["kv_page_bytes"]) == (6, 6.0, 320)
    own.write_bytes(b"\xff")
    assert "own.txt" in zse(*words, fake=True, code=2).stderr
    assert "128,1024" in zse("bench", "latency", "echo", "--prompts", "x", code=2).stderr
    assert "1,4,8" in zse("bench", "serve", "echo", "--clients", "0", code=2).stderr
    assert "required: KIND" in zse("bench", code=2).stderr


def test_graphs_and_no_graphs_take_turns(monkeypatch):
    opened = []

    def open_llm(args, **options):
        opened.append(options["graphs"])
        assert options["prefix_cache"] is False and options["speculation"] == "none"
        device = SimpleNamespace(kernels="gpu" if args.device == "cuda" else "cpu")
        return SimpleNamespace(device=device, metrics=dict, close=lambda: None)

    monkeypatch.setattr(cli_bench, "open_llm", open_llm)
    monkeypatch.setattr(cli_bench.speed, "decode", lambda llm, *rest: {"runs": [40.0 if opened[-1] else 10.0]})
    args = SimpleNamespace(device="cuda", repeats=2, context=16, tokens=8)
    found = cli_bench._graphs(args)
    assert (
        opened == [True, False, True, False] and found["graphs_ratio"] == 4.0 and found["no_graphs_tok_per_s"] == 10.0
    )
    args.device = "cpu"
    with pytest.raises(ConfigError, match="give a GPU"):
        cli_bench._graphs(args)


@pytest.mark.parametrize(
    "typed",
    [
        "",
        "--verify",
        "--no-verify",
        "--lazy-experts --max-context 512",
        "--device cpu --activations f32 --quantize int8",
    ],
)
def test_engine_options_reach_the_server_that_is_measured(typed):
    """What is typed again gives the same values, of flags too."""
    args = parser_of("bench").parse_args(["serve", "smollm2", *typed.split()])
    again = parser_of("serve").parse_args(["smollm2", *options.options_again(args, options.ENGINE_OPTIONS)])
    assert options.values_of(again, options.ENGINE_OPTIONS) == options.values_of(args, options.ENGINE_OPTIONS)
    assert not set(typed.split()) - set(options.options_again(args, options.ENGINE_OPTIONS))
