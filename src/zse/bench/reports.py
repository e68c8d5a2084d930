"""Reports of `zse bench serve --workload`: reading, the text, and the gate that finds what became slower."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from zse import trust
from zse.bench import process
from zse.errors import ConfigError, one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.bench.load import LoadSettings

FORMAT = 1
MAX_BYTES = 64 << 20
TIMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "end to end"}
# What the gate looks at: throughputs must not fall, times must not rise. p99 is left out: of 48
# requests it is the worst one.
HIGHER = ("output_tok_per_s", "requests_per_s")
LOWER = tuple(f"{time}.{point}" for time in ("ttft_ms", "itl_ms", "e2e_ms") for point in ("p50", "p95"))
_CLOCK_MS = 0.1  # smaller differences are the client's own, not the server's
_COMPARABLE = ("seed", "scale", "vocab_size", "chat", "ignore_eos")


class Change(NamedTuple):
    """One figure of two reports. percent: how much worse it became; negative: better."""

    workload: str
    figure: str
    before: float
    after: float
    percent: float

    def line(self) -> str:
        return f"{self.workload}: {self.figure} {self.before:.4g} → {self.after:.4g}, {self.percent:+.1f} % worse"


def commit() -> str | None:
    """The commit of the source tree that this package runs from; None where it is installed."""
    package = Path(__file__).resolve().parents[1]
    if package.parent.name != "src" or not (package.parents[1] / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(package.parents[1]), "rev-parse", "HEAD"], capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def head(command: str, settings: "LoadSettings", url: str | None, options: list[str]) -> dict:
    """What a report says before its figures: how, where and with what they were measured.

    Args:
        command: the command line that the user typed.
        settings: of the clients.
        url: the server's, None for one that was started with `options`.
        options: words of `zse serve`.
    """
    return {
        "format": FORMAT,
        "bench": "serve",
        "command": command,
        "commit": commit(),
        "machine": process.machine(),
        "settings": vars(settings) | {"url": url, "server_options": shlex.join(options) or None},
    }


def read(path: str | os.PathLike) -> dict:
    """A report from its file. ConfigError: not one, or of another version."""
    try:
        if os.path.getsize(path) > MAX_BYTES:
            raise ConfigError(f"{one_line(path)} is larger than {MAX_BYTES >> 20} MiB: not a report")
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{one_line(path)}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{one_line(path)} is not JSON: {one_line(error)}") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT or not _sound(report):
        raise ConfigError(f"{one_line(path)} is not a report of `zse bench serve --workload NAME --json FILE`")
    return report


def _sound(report: dict) -> bool:
    """Whether the parts that are read later have the types that write() gives them."""
    workloads = report.get("workloads")
    texts = all(isinstance(report.get(name), str) for name in ("label", "model"))
    parts = all(isinstance(report.get(name), dict) for name in ("settings", "machine"))
    if not (texts and parts and isinstance(workloads, dict) and workloads):
        return False
    return all(isinstance(run, dict) and _sound_run(run) for run in workloads.values())


def _sound_run(run: dict) -> bool:
    plain = all(_is_number(run.get(name)) for name in ("requests", "failures", "seconds", *HIGHER))
    return plain and all(
        run.get(name, 0) is None
        or (isinstance(run.get(name), dict) and run[name] and all(map(_is_number, run[name].values())))
        for name in TIMES
    )


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def write(path: str | os.PathLike, text: str) -> None:
    """Write a whole file, or leave what is there. ConfigError: it cannot be written."""
    try:
        trust.write_whole(os.fspath(path), text.encode(), 0o666, sync=False)
    except OSError as error:
        raise ConfigError(f"{one_line(path)} cannot be written: {error.strerror}") from None


def figure(run: dict, name: str) -> float | None:
    """ "output_tok_per_s" or "ttft_ms.p95" of a workload's figures; None where there was nothing to measure."""
    head, _, point = name.partition(".")
    value = run.get(head)
    return value.get(point) if point and isinstance(value, dict) else None if point else value


def compare(before: dict, after: dict, tolerance: float) -> list[Change]:
    """What became worse by more than `tolerance` percent, in the workloads that both reports have. More failures, and a
    figure that there no longer is, always count. ConfigError: reports that measured different things."""
    for name in _COMPARABLE:
        old, new = before["settings"].get(name), after["settings"].get(name)
        if old != new:
            raise ConfigError(f"the reports cannot be compared: {name} was {old!r} and is {new!r}")
    shared = [name for name in after["workloads"] if name in before["workloads"]]
    if not shared:
        raise ConfigError(f"the reports share no workload: {_names(before)} and {_names(after)}")
    worse = []
    for workload in shared:
        old, new = before["workloads"][workload], after["workloads"][workload]
        if new["failures"] > old["failures"]:
            worse.append(Change(workload, "failures", old["failures"], new["failures"], float("inf")))
        for name in (*HIGHER, *LOWER):
            was, now = figure(old, name), figure(new, name)
            if was is None:
                continue
            if now is None:
                worse.append(Change(workload, name, was, float("nan"), float("inf")))
                continue
            loss = was - now if name in HIGHER else now - was
            if name in LOWER and loss < _CLOCK_MS:
                continue
            percent = 100 * loss / was if was > 0 else float("inf") if loss > 0 else 0.0
            if percent > tolerance:
                worse.append(Change(workload, name, was, now, percent))
    return worse


def _names(report: dict) -> str:
    return ", ".join(map(one_line, report["workloads"]))


def text(name: str, run: dict) -> str:
    """A workload's figures as lines of a terminal."""
    lines = [
        f"{name}: {run['requests']} requests in {run['seconds']:.1f} s, {run['failures']} failed",
        f"  {run['output_tok_per_s']:.1f} output tok/s, {run['requests_per_s']:.2f} requests/s",
    ]
    heads = next((list(run[time]) for time in TIMES if run.get(time)), [])
    if heads:
        lines.append("  " + " " * 14 + "".join(f"{head:>10}" for head in heads))
    for time, title in TIMES.items():
        if run.get(time):
            lines.append(f"  {title + ', ms':<14}" + "".join(f"{value:>10.1f}" for value in run[time].values()))
    for error in run.get("errors") or ():
        lines.append(f"  {error['count']} times: {one_line(error['message'])}")
    return "\n".join(lines)
