"""begin_token() beside NumPy."""

from zse.kernels.begin_token import Cutting, Places
from zse.kernels.feed import FEED_TOKENS, TokenHistory, make_history
from zse.kernels.gpu import attention_plan
from zse.kernels.kv_pages import BLOCK
from zse.kernels.op import EXACT, Case, OutputSpec
from zse.kernels.page_table import UPDATE_PAGES
from zse.kernels.rope import ROPE_TABLE
from zse.lazy import numpy as np


def reference(host, places, sampled, history, cut, inv_freq, mscale=1.0, temperature=(0.0, 1), plan=None, **_) -> dict:
    words = host.view(np.int32)
    id, position, row, source = words[places.token :]
    count = words[places.count : places.count + 1]
    index, value = (words[at : at + count[0]] for at in (places.index, places.value))
    table = UPDATE_PAGES.reference(count, index, value, history.page_table)["table"]
    one = [np.array([each]) for each in (id, source, position, row)]
    fed = FEED_TOKENS.reference(*one[:2], sampled, *one[2:], history._replace(page_table=table))
    here = host.copy()
    here[places.token] = fed["token_ids"][0]
    rotations = ROPE_TABLE.reference(one[2], inv_freq, mscale, temperature)
    written = {"history.tokens": fed["history.tokens"], "history.page_table": table}
    return {"here": here, **written, "plan": planned(plan, position, row, cut), **rotations}


def planned(plan, position: int, row: int, cut: Cutting):
    """As attention_plan() leaves it of one token, where its choice is not close."""
    form = attention_plan
    begin = max(position + 1 - cut.window, 0) // BLOCK * BLOCK if cut.window else 0
    keys, times = position + 1 - begin, {}
    for span in (0, form.SEGMENT, form.CHUNK):
        parts = -(-keys // span) if span else 1
        tasks, longest = parts * cut.heads, min(keys, span) if span else keys
        rounds = -(-tasks // cut.blocks)
        mean = keys / parts
        busy = max(tasks / (rounds * cut.blocks), form.ALONE)
        times[span] = rounds * (mean + form.TASK_KEYS) * busy + (longest - mean) * 0.5
    span = min(times, key=lambda each: times[each])
    parts = -(-keys // span) if span else 1
    plan = plan.copy()
    plan[:2] = parts, 0
    for which in range(parts):
        first = begin + which * span
        end = min(first + span, position + 1) if span else position + 1
        kind = parts | which << 12 | (1 << 24 if span == form.SEGMENT else 0)
        plan[form.HEADER + which * form.TASK :][: form.TASK] = 0, 1, row, position, first, end, 0, kind
    return plan


def cases(rng):
    near = next(iter(ROPE_TABLE.cases(rng))).outputs["out"].tolerance
    for position, updates, rotary, words, cut in (
        (0, 1, 64, 20, Cutting(0, 4, 132, 512)),
        (517, 0, 128, 600, Cutting(0, 4, 132, 512)),
        (1391, 9, 80, 6044, Cutting(1000, 8, 132, 512)),
    ):
        table, tokens = make_history(rng, [position + 1, 70], 90, 6, 99)
        host = rng.integers(0, 1 << 20, words).astype(np.uint32)
        places, source = Places(1, 2, 2 + updates, words - 4), int(rng.integers(-1, 3))
        index = rng.permutation(table.size)[:updates]
        host[1], host[2 : 2 + updates] = updates, index
        host[2 + updates : 2 + 2 * updates] = table.reshape(-1)[index]  # as they are, so that the token's is there
        table.reshape(-1)[index] = 0
        host[-4:] = np.array([777, position, 0, source], np.int32).view(np.uint32)
        inv_freq = (1e6 ** -(np.arange(0, rotary, 2) / rotary)).astype(np.float32)
        inputs = {"host": host, "sampled": rng.integers(1000, 2000, 3).astype(np.int32), "inv_freq": inv_freq}
        plan = rng.integers(0, 9, attention_plan.HEADER + 16 * attention_plan.TASK).astype(np.int32)
        exact = {"history.tokens": tokens, "history.page_table": table, "plan": plan, "here": np.zeros_like(host)}
        outputs = {name: OutputSpec(each.shape, str(each.dtype), EXACT, inout=each) for name, each in exact.items()}
        yield Case(
            f"position {position}, {updates} pages",
            inputs | {"history": TokenHistory(tokens, table, 6)},
            outputs | {"out": OutputSpec((1, rotary), "float32", near)},
            {"places": places, "cut": cut, "mscale": 1.25 if updates else 1.0, "temperature": (0.1, 512)},
        )
