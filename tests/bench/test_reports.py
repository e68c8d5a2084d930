"""Reports: what is read back, the gate, the page, and the commands that make them."""

import argparse
import copy
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from zse.bench import ablation, reports
from zse.bench.page import page
from zse.cli import bench_serve, main, serve
from zse.cli import parser as parsers
from zse.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def times(ms: float) -> dict:
    return {"mean": ms, "p50": ms, "p90": 2 * ms, "p95": 3 * ms, "p99": 4 * ms}


def report(label="one", speed=1.0, workloads=("baseline", "qps_sweep@1", "qps_sweep@4")) -> dict:
    run = {"requests": 8, "failures": 0, "errors": [], "seconds": 4.0 / speed, "output_tok_per_s": 100 * speed,
           "requests_per_s": 2 * speed, "ttft_ms": times(50 / speed), "itl_ms": times(9 / speed),
           "tpot_ms": times(9 / speed), "e2e_ms": times(500 / speed), "workload": {"measures": "alone"}}  # fmt: skip
    return {"format": 1, "bench": "serve", "label": label, "model": "m", "command": "zse bench serve m", "commit": "abc",
            "machine": {"cpu": "a CPU", "date": "2026-01-01T00:00:00Z"},
            "settings": {"seed": 42, "scale": 1.0, "vocab_size": None, "chat": False, "ignore_eos": True},
            "workloads": {name: copy.deepcopy(run) for name in workloads}}  # fmt: skip


def save(path, value) -> str:
    path.write_text(json.dumps(value))
    return str(path)


def test_a_report_is_read_back(tmp_path):
    assert reports.read(save(tmp_path / "a.json", report())) == report()
    assert reports.commit() is None or len(reports.commit()) == 40


@pytest.mark.parametrize("damage", [
    lambda r: [], lambda r: {**r, "format": 2}, lambda r: {**r, "workloads": {}}, lambda r: {**r, "label": 3},
    lambda r: {**r, "workloads": {"a": 1}}, lambda r: {**r, "workloads": {"a": {}}}, lambda r: {**r, "settings": None},
    lambda r: r["workloads"]["baseline"].update(ttft_ms={"p50": "fast"}) or r,
    lambda r: r["workloads"]["baseline"].update(seconds=float("nan")) or r,
    lambda r: r["workloads"]["baseline"].pop("itl_ms") and r,
])  # fmt: skip
def test_what_is_no_report_is_one_line(tmp_path, damage):
    with pytest.raises(ConfigError, match="is not a report"):
        reports.read(save(tmp_path / "a.json", damage(report())))


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        reports.read(tmp_path / "none.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        reports.read(tmp_path / "x.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not JSON"):
        reports.read(tmp_path / "deep.json")
    with pytest.raises(ConfigError, match="No such file"):
        reports.write(tmp_path / "no" / "a.json", "x")


def test_the_gate_passes_what_is_within_the_tolerance():
    assert reports.compare(report(), report(speed=1.0), 5) == []
    assert reports.compare(report(), report(speed=3.0), 5) == []
    assert reports.compare(report(), report(speed=1 / 1.049), 5) == []


def test_the_gate_names_what_became_worse():
    worse = reports.compare(report(), report(speed=1 / 1.06), 5)
    assert {change.figure for change in worse} == {*reports.HIGHER, *reports.LOWER}
    assert {change.workload for change in worse} == set(report()["workloads"])
    slow = report()
    slow["workloads"]["baseline"]["ttft_ms"]["p95"] *= 1.2
    (change,) = reports.compare(report(), slow, 5)
    assert change.line() == "baseline: ttft_ms.p95 150 → 180, +20.0 % worse"
    assert reports.compare(report(), slow, 25) == []


def test_the_gate_sees_failures_and_figures_that_are_gone():
    failed = report()
    failed["workloads"]["baseline"].update(failures=1, itl_ms=None)
    assert {change.figure for change in reports.compare(report(), failed, 1e9)} == {
        "failures",
        "itl_ms.p50",
        "itl_ms.p95",
    }
    assert reports.compare(failed, report(), 5) == []


def test_the_gate_leaves_out_what_the_clock_cannot_tell():
    fast, slower = report(), report()
    fast["workloads"]["baseline"]["itl_ms"] = times(0.02)
    slower["workloads"]["baseline"]["itl_ms"] = times(0.04)
    assert reports.compare(fast, slower, 5) == []


def test_the_gate_refuses_what_cannot_be_compared():
    other = report()
    other["settings"]["scale"] = 0.5
    with pytest.raises(ConfigError, match="scale was 1.0 and is 0.5"):
        reports.compare(report(), other, 5)
    with pytest.raises(ConfigError, match="share no workload"):
        reports.compare(report(workloads=("a",)), report(workloads=("b",)), 5)
    assert reports.compare(report(workloads=("a", "b")), report(workloads=("b",)), 5) == []


def test_the_page_is_well_formed_and_needs_nothing_else():
    rows = [
        report("static"),
        report('+ continuous <batching> & "more"', 1.6),
        report("+ prefix cache", 2.0, ("baseline",)),
    ]
    rows[1]["workloads"]["baseline"].update(failures=3, itl_ms=None)
    text = page(rows)
    root = ElementTree.fromstring(text)
    assert "<batching>" not in text and "http" not in text.replace("http://www.w3.org/2000/svg", "").replace(
        "http-equiv", ""
    )
    assert not list(root.iter("script")) and not list(root.iter("link")) and not list(root.iter("img"))
    charts = {figure.find("figcaption").text: figure.find(f"{SVG}svg") for figure in root.iter("figure")}
    assert "Output tokens a second, over requests a second" in charts
    lines = charts["TTFT p95, ms, over requests a second"].findall(f"{SVG}polyline")
    assert len(lines) == 3 and [len(line.get("points").split()) for line in lines] == [2, 2, 0]
    assert [head.text for head in root.iter("h2")] == ["qps_sweep", "baseline", "qps_sweep@1", "qps_sweep@4"]


def test_bars_are_as_long_as_their_figures_and_tell_the_gain():
    root = ElementTree.fromstring(page([report("a", 1.0, ("baseline",)), report("b", 2.0, ("baseline",))]))
    charts = {figure.find("figcaption").text: figure.find(f"{SVG}svg") for figure in root.iter("figure")}
    throughput, ttft = charts["Output tokens a second"], charts["TTFT p95, ms"]
    widths = [float(bar.get("width")) for bar in throughput.findall(f"{SVG}rect")]
    assert widths == [100.0, 200.0]
    assert [float(bar.get("width")) for bar in ttft.findall(f"{SVG}rect")] == [200.0, 100.0]
    told = [text.text for chart in (throughput, ttft) for text in chart.findall(f"{SVG}text")]
    assert "200 (2.00×)" in told and "75 (2.00×)" in told and "100" in told


def test_a_page_of_nothing_but_failures():
    broken = report()
    for run in broken["workloads"].values():
        run.update(
            failures=8, output_tok_per_s=0, requests_per_s=0, ttft_ms=None, itl_ms=None, tpot_ms=None, e2e_ms=None
        )
    assert "–" in "".join(ElementTree.fromstring(page([broken])).itertext())
    assert "8 failed" in reports.text("baseline", broken["workloads"]["baseline"])


def zse(*words) -> int:
    return main.main(["bench", *map(str, words)])


def test_the_command_measures_a_url_and_holds_it_to_a_report(fake, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ZSE_API_KEY", "sk-secret")
    fake.gap_s = 0.002
    first, second, drawn = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "page.html"
    base = ["serve", "--url", fake.url, "--workload", "zedinfer_e,baseline", "--scale", "0.05"]
    assert zse(*base, "--json", first, "--label", "idle") == 0
    assert "baseline: 2 requests" in capsys.readouterr().out
    saved = reports.read(first)
    assert saved["label"] == "idle" and saved["model"] == "fake" and saved["settings"]["scale"] == 0.05
    assert saved["command"].startswith("zse ") and saved["machine"]["date"] and len(saved["workloads"]) == 2
    assert "Bearer sk-secret" in fake.heads[0] and "sk-secret" not in first.read_text()
    fake.first_s = fake.gap_s = 0.1  # far above what a busy machine adds to the first run
    assert zse(*base, "--json", second, "--compare", first, "--tolerance", "20", "--page", drawn) == 1
    assert "baseline: ttft_ms.p95" in capsys.readouterr().err
    assert {"idle", "fake"} <= set("\n".join(ElementTree.parse(drawn).getroot().itertext()).split())
    assert zse("report", second, "--compare", first) == 1 and zse("report", first, "--compare", second) == 0
    assert zse("report", first, second, "--page", drawn) == 0 and "idle (fake" in capsys.readouterr().out
    fake.first_s = fake.gap_s = 0.002
    assert zse(*base, "--json") == 0 and json.loads(capsys.readouterr().out)["workloads"]
    fake.fail_every = 1000
    fake.mode = "status"
    assert zse(*base) == 1 and "warm-up failed" in capsys.readouterr().err


def test_the_command_starts_a_server_of_its_own(tmp_path):
    """From exec to the report, with a model of random weights and an option of the server's."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    model, out = tmp_path / "tiny.zse", tmp_path / "out.json"
    make = [sys.executable, root / "benchmarks/make_random_model.py", model, "--shape", "tiny", "--type", "int8"]
    subprocess.run(make, check=True, stdout=subprocess.PIPE, env=environment)
    words = ["bench", "serve", model, "--workload", "zedinfer_mu_c", "--scale", "0.2", "--json", out, "--prompt-ids", "2000",
             "--device", "cpu", "--threads", "1", "--server-options=--max-rows 2"]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "zse", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    saved = reports.read(out)
    run = saved["workloads"]["zedinfer_mu_c"]
    assert (run["requests"], run["failures"], run["output_tokens"], run["prompt_tokens"]) == (6, 0, 36, 36)
    assert saved["label"] == "tiny.zse" and "--threads 1 --max-rows 2" in saved["settings"]["server_options"].replace(
        "--activations auto --kv-dtype auto ", ""
    )


def test_an_ablation_switches_one_thing_on_at_a_time(fake, tmp_path, capsys, monkeypatch):
    asked = []

    class Started:
        def __init__(self, model, options):
            self.url = f"http://127.0.0.1:{fake.port}/v1"
            asked.append(options)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(ablation, "RunningServer", Started)
    monkeypatch.setattr(bench_serve, "locate", lambda name: name)
    assert zse("ablation", "m.gguf", "--workload", "baseline", "--scale", "0.05", "-o", tmp_path / "out") == 0
    assert "+ prefix cache          baseline" in capsys.readouterr().out
    assert len(asked) == len(ablation.STEPS)
    labels = [reports.read(tmp_path / "out" / f"{number}.json")["label"] for number in range(len(asked))]
    text = "\n".join(ElementTree.parse(tmp_path / "out" / "ablation.html").getroot().itertext())
    assert labels == [step.label for step in ablation.STEPS] and all(label in text for label in labels)
    parser = argparse.ArgumentParser()
    parsers.add(parser, serve.ARGUMENTS)
    rows = [vars(parser.parse_args(["m.gguf", *options])) for options in asked]
    for before, after in pairwise(rows):
        assert sum(before[name] != after[name] for name in before) == 1
    plain = vars(parser.parse_args(["m.gguf"]))
    assert {name for name in plain if rows[-1][name] != plain[name]} == {"kv_dtype"}
    fake.fail_every = 4
    assert zse("ablation", "m.gguf", "--workload", "baseline", "--scale", "0.05", "-o", tmp_path / "out") == 1
    assert "one at a time: 1 requests failed" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "line"), [
    (["ablation", "m", "--workload", "qps_sweep"], "not a sweep"),
    (["serve"], "MODEL is missing"),
    (["serve", "--url", "http://x/v1"], "--url needs --workload"),
    (["serve", "m", "--page", "x"], "--page needs --workload"),
    (["serve", "--workload", "baseline"], "name either a MODEL"),
    (["serve", "m", "--workload", "baseline", "--url", "http://x"], "name either a MODEL"),
    (["serve", "--workload", "nothing", "--url", "http://x"], "workload 'nothing' is not supported"),
    (["serve", "--workload", "baseline", "--url", "x"], "is not a URL"),
    (["serve", "--workload", "baseline", "--url", "http://x", "--server-options=--max-rows 1"], "--server-options are for"),
    (["serve", "m", "--workload", "baseline", "--server-options=--a '"], "--server-options: No closing"),
    (["serve", "--workload", "baseline", "--url", "http://x", "--chat", "--prompt-ids", "500"], "a chat has text only"),
    (["serve", "m", "--workload", "baseline", "--scale", "0"], "more than 0"),
    (["serve", "--workload", "baseline", "--url", "http://x", "--qps", "1,x"], "not a list of rates"),
    (["report", "/nonexistent.json"], "No such file"),
])  # fmt: skip
def test_wrong_usage_is_one_line(words, line, capsys):
    assert zse(*words) == 2
    assert line in capsys.readouterr().err
