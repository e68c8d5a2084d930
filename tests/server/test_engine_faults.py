"""A GPU's driver that fails under load: each request has its answer or one error, the engine starts again, nobody waits for ever.

Every call of a step fails once with each code (the long form; a few in the short one). What the device itself does then is in
tests/runtime/test_driver_faults.py."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import Harness, wait_for

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from faulty_driver import CODES, Faulty
from gpu_fixtures import Fake, compile_driver

CALLS = 12  # of three steps, or more
CLIENTS = 6


class OverDriver(Harness):
    engine_path = str(Path(__file__).with_name("driver_engine.py"))


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    return Faulty(Fake(compile_driver(tmp_path_factory.mktemp("fake")), folder).path, folder).path


def errors_in(reply) -> list[dict]:
    """The errors that an answer tells, of a stream or of a body."""
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in reply.body.decode().splitlines() if line.startswith("data: {")]
        return [event["error"] for event in events if "error" in event]
    return [reply.json["error"]] if "error" in reply.json else []


def check(driver: str, faults: list[tuple[int, int]], folder: Path) -> None:
    file = folder / "faults"
    file.write_text("".join(f"{at} {code}\n" for at, code in faults))
    server = OverDriver(f"--rows 4 --step-ms 2 --driver {driver} --faults {file}", wait=False)
    try:
        for left in range(len(faults), -1, -1):
            wait_for(lambda: server.engine.state == "ready", 30)
            assert file.read_text().count("\n") == max(left - 1, 0)

            def ask(number: int):
                prompt = chr(97 + number) * 20
                return prompt, server.complete(prompt, max_tokens=20, stream=number % 2 == 1)

            with ThreadPoolExecutor(CLIENTS) as pool:
                replies = list(pool.map(ask, range(CLIENTS)))
            told = 0
            for prompt, reply in replies:
                found = errors_in(reply)
                told += len(found)
                if not found:
                    assert reply.status == 200 and (b"[DONE]" in reply.body or prompt in reply.body.decode()), reply
                else:
                    assert len(found) == 1 and found[0]["type"] == "server_error", reply
                    assert reply.status in (200, 500, 503) and b"[DONE]" not in reply.body
            assert bool(told) == (left > 0), (left, told)
            server.assert_quiet()
    finally:
        server.close()


@pytest.mark.parametrize("name", CODES)
def test_requests_have_one_error_each_and_the_engine_starts_again(name, driver, tmp_path):
    check(driver, [(2, CODES[name]), (CALLS - 1, CODES[name])], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("first", range(0, CALLS, 3))
def test_whichever_call_fails(name, first, driver, tmp_path):
    check(driver, [(at, CODES[name]) for at in range(first, first + 3)], tmp_path)
