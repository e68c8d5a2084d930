"""What of an agent's prompts a server computes again: 20 turns with tools, whose client strips what was thought.

    python benchmarks/agent_trace.py MODEL [--turns 20] [--tokens 32000] [-- options of zse serve]
    python benchmarks/agent_trace.py --url http://127.0.0.1:8080 [--model NAME]        # any server of the API, llama-server too

Each turn sends the whole conversation: a system message with the tools, the user's task, then in turns what the assistant answered and what its
tool returned. Every fourth turn is a new message of the user. The client keeps of an answer only what stands behind its thoughts, so the answer in
the next prompt is not what the model wrote: from there on nothing that was cached while it answered fits. Texts are random words, the same for every server; the
model's own words are not sent back. Prints for each turn the prompt's tokens, those that are new since the turn before, those that were not
cached, and the seconds to the first token; last the sum of tokens computed over the sum of new ones (at best 1).
"""

import argparse
import json
import random
import subprocess
import sys
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

SYLLABLES = "ba be bi bo da de di do ka ke ki ko la le li lo ma me mi mo na ne ni no ra re ri ro sa se si so ta te ti to".split()
ANSWER_TOKENS = 24  # that the model writes each turn


def words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices(SYLLABLES, k=rng.randrange(1, 4))) for _ in range(count))


def conversation(turns: int, count: int, seed: int):
    """Yields the messages of each turn, `count` words in the last."""
    rng, share = random.Random(seed), int(count / (turns * 1.17 + 3.5))
    messages = [
        {"role": "system", "content": f"You call tools.\n{words(rng, 3 * share)}"},
        {"role": "user", "content": words(rng, share // 2)},
    ]
    for turn in range(turns):
        yield list(messages)
        messages.append({"role": "assistant", "content": f"I call tool {turn}: {words(rng, share // 6)}"})
        if turn % 4 == 3:
            messages.append({"role": "user", "content": f"Then {words(rng, share)}"})
        else:
            messages.append({"role": "user", "content": f"<tool_response>{words(rng, share)}</tool_response>"})


def ask(url: str, model: str, messages: list[dict]) -> tuple[int, int, float]:
    """(tokens of the prompt, those of them that were cached, seconds to the first event)."""
    body = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    connection = HTTPConnection(urlsplit(url).netloc, timeout=900)
    begin, first, usage = time.perf_counter(), None, None
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{answer.status} {answer.read()!r}")
    while line := answer.readline():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if first is None and event["choices"] and event["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - begin
            usage = event.get("usage") or usage
    connection.close()
    assert usage is not None, "the server tells no usage"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return usage["prompt_tokens"], cached, first or time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--url")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32_000, help="of the last prompt, about")
    parser.add_argument("--seed", type=int, default=16)
    args, options = parser.parse_known_args()
    server, url = None, args.url
    if url is None:
        command = [sys.executable, "-m", "zse", "serve", args.model, "--served-model-name", "m", "--port", "0"]
        command += [option for option in options if option != "--"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert server.stdout is not None
        url = server.stdout.readline().split(" on ")[1].split()[0]
    model = "m" if args.url is None else args.model or "default"
    computed = new = before = 0
    try:
        rng = random.Random(args.seed + 1)
        few, many = (ask(url, model, [{"role": "user", "content": words(rng, count)}])[0] for count in (100, 500))
        count = int(args.tokens / ((many - few) / 400))
        for turn, messages in enumerate(conversation(args.turns, count, args.seed)):
            total, cached, first_s = ask(url, model, messages)
            row = {"turn": turn, "prompt": total, "new": total - before, "computed": total - cached}
            print(json.dumps(row | {"first token, s": round(first_s, 3)}), flush=True)
            computed, new, before = computed + total - cached, new + total - before, total
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    print(json.dumps({"tokens": before, "computed / new": round(computed / new, 3)}))


if __name__ == "__main__":
    main()
