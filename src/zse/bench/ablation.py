"""What each serving feature is worth: one workload against a server with all of them off, then one more switched on at
a time. The reports, in this order, are what bench/page.py draws."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from zse.bench import reports
from zse.bench.client import Target
from zse.bench.load import LoadSettings, measure
from zse.bench.serving import RunningServer
from zse.bench.workloads import Workload
from zse.errors import EngineError


class Step(NamedTuple):
    """A row of the ablation. off: the words of `zse serve` that switch the feature off in all rows before this one; on:
    those that switch it on from this row on."""

    label: str
    off: tuple[str, ...] = ()
    on: tuple[str, ...] = ()


STEPS = (
    Step("one at a time"),
    Step("static batches", off=("--max-rows", "1")),
    Step("+ continuous batching", off=("--batching", "static")),
    Step("+ paged KV", off=("--kv-layout", "contiguous")),
    Step("+ chunked prefill", off=("--no-chunked-prefill",)),
    Step("+ prefix cache", off=("--no-prefix-cache",)),
    Step("+ prompt lookup", off=("--speculation", "none")),
    Step("+ KV in 8 bits", on=("--kv-dtype", "int8")),
)


def words(number: int) -> list[str]:
    """The options of `zse serve` for row `number`: what later rows switch on is off, what came so far is on."""
    off = [word for step in STEPS[number + 1 :] for word in step.off]
    return off + [word for step in STEPS[: number + 1] for word in step.on]


def ablation(
    model: str,
    workloads: list[Workload],
    settings: LoadSettings,
    options: list[str],
    command: str,
    tell: Callable[[str, str, dict], None],
    key: str = "",
) -> Iterator[dict]:
    """The report of each row as it comes. options: of every server, before the row's; command: what the user typed.
    EngineError: a row in which a request failed, whose figures would not compare."""
    for number, step in enumerate(STEPS):
        chosen = [*options, *words(number)]  # a row's --kv-dtype comes after --kv-dtype auto

        def told(name: str, figures: dict, label: str = step.label) -> None:
            tell(label, name, figures)

        with RunningServer(model, chosen) as server:
            target = Target.of(server.url, key)
            found = measure(target, None, workloads, settings, None, told)
        failed = next((run for run in found["workloads"].values() if run["failures"]), None)
        if failed is not None:
            raise EngineError(f"{step.label}: {failed['failures']} requests failed: {failed['errors'][0]['message']}")
        head = reports.head(command, settings, None, chosen)
        yield {**head, "label": step.label, **found, "model": model}
