"""What the host writes for the sampler, on a device that runs nothing."""

from array import array
from math import prod

import pytest

from zse.dtypes import ITEM_BYTES
from zse.kernels.feed import TokenHistory
from zse.kernels.sample import PARAMETERS, row_parameters, sample_tensors
from zse.runtime.null import NullDevice, NullGPU
from zse.sampling.params import FILTERS, SamplingParams
from zse.sampling.state import RESULTS, SamplerState, input_nbytes, result_nbytes
from zse.scheduler.request import Request
from zse.tensor import Tensor

VOCAB = 100


def make():
    return SamplerState(NullDevice(), VOCAB, max_rows=4, max_tokens=64)


def request(arrival, prompt=(1, 2, 3), seed=0, **params):
    return Request(
        arrival, list(prompt), SamplingParams(**params), seed=seed, stop_ids=frozenset(), max_len=60, arrival=arrival
    )


def views(state, *names):
    return {name: state._views[name].tolist() for name in names}


def seen(state, line):
    start, ids, counts = (state._views[name].tolist() for name in ("seen_start", "seen_ids", "seen_counts"))
    return dict(zip(ids[start[line] : start[line + 1]], counts[start[line] : start[line + 1]], strict=True))


def biases(state, line):
    start, ids, values = (state._views[name].tolist() for name in ("bias_start", "bias_ids", "bias_values"))
    return dict(zip(ids[start[line] : start[line + 1]], values[start[line] : start[line + 1]], strict=True))


def test_a_row_is_filtered_where_a_parameter_of_the_kernels_cuts():
    assert set(FILTERS) == {name for name, parameter in PARAMETERS.items() if parameter.cuts}
    assert not SamplingParams(temperature=0.3, seed=4, presence_penalty=1.0).is_filtered
    assert all(SamplingParams(**{name: 0.5}).is_filtered for name in FILTERS)


def test_lines_follow_their_requests():
    state = make()
    hot, cold = request(0, temperature=1.5, top_k=7, seed=2**64 - 1), request(1, temperature=0.0, logprobs=3)
    state.prepare([hot, cold])
    got = views(state, "temperature", "top_k", "num_logprobs", "counter", "seed")
    assert got["temperature"][:2] == [1.5, 0.0] and got["top_k"][:2] == [7, 0] and got["num_logprobs"][:2] == [-1, 3]
    assert got["counter"][:2] == [3, 3] and got["seed"][0] == 2**64 - 1
    cold.tokens.append(9)
    state.prepare([cold])
    got = views(state, "temperature", "num_logprobs", "counter")
    assert (got["temperature"][0], got["num_logprobs"][0], got["counter"][0]) == (0.0, 3, 4)


def test_penalties_count_the_reply_and_repetition_sees_the_prompt():
    state = make()
    plain, frequency = request(0), request(1, frequency_penalty=0.5)
    repetition = request(2, prompt=(5, 5, 6), repetition_penalty=1.2)
    state.prepare([plain, frequency, repetition])
    assert [seen(state, line) for line in range(3)] == [{}, {}, {5: 0, 6: 0}]
    for item in (plain, frequency, repetition):
        item.tokens.extend([5, 8, 8])
    state.prepare([repetition, frequency])
    assert [seen(state, line) for line in range(2)] == [{5: 1, 6: 0, 8: 2}, {5: 1, 8: 2}]
    state.prepare([plain])
    assert seen(state, 0) == {} and not state._histories
    state.prepare([plain, frequency])
    assert seen(state, 1) == {5: 1, 8: 2}


def test_no_penalty_is_zero_in_32_bits():
    """Logits divided by it would be no numbers."""
    state = make()
    state.prepare([request(0, repetition_penalty=1e-300), request(1, repetition_penalty=5e-324), request(2)])
    assert views(state, "repetition")["repetition"][:3] == pytest.approx([1e-30, 1e-30, 1.0])


def test_biases_come_and_go_with_their_request():
    state = make()
    plain, biased = request(0), request(1, logit_bias={4: 2.0, 7: -1.0})
    state.prepare([plain, biased])
    assert [biases(state, line) for line in range(2)] == [{}, {4: 2.0, 7: -1.0}]
    state.prepare([biased, plain])
    assert [biases(state, line) for line in range(2)] == [{4: 2.0, 7: -1.0}, {}]
    state.prepare([biased])
    state.prepare([plain])
    assert biases(state, 0) == {}
    # A batch that grows while nobody has a bias does not find old ones further down.
    state.prepare([plain, biased])
    state.prepare([plain])
    state.prepare([plain, plain, plain])
    assert [biases(state, line) for line in range(3)] == [{}, {}, {}]
    state.prepare([plain, plain, biased])
    assert [biases(state, line) for line in range(3)] == [{}, {}, {4: 2.0, 7: -1.0}]


def test_results_are_read_line_by_line():
    state = make()
    state.prepare([request(0), request(1, logprobs=2), request(2)])
    for name, values in (("tokens", [11, 12, 13]), ("status", [0, 0, 1]), ("logprob", [0.0, -0.5, 0.0])):
        state._views[name][:3] = _array(state._views[name].format, values)
    state._views["top_ids"][20:23] = _array("i", [12, 40, -1])
    state._views["top_logprobs"][20:23] = _array("f", [-0.5, -1.5, 0.0])
    assert state.read() == [(11, None), (12, (-0.5, [(12, -0.5), (40, -1.5)])), (-1, None)]


def on_gpu(**places):
    history = TokenHistory(Tensor(None, (8, 16), "i32"), Tensor(None, (4, 8), "i32"), 2)
    return SamplerState(NullGPU(), VOCAB, max_rows=4, max_tokens=64, history=history, **places)


def test_gpu_lines_name_the_history_and_its_length():
    places = {"inputs": (NullDevice().staging(4096), 256), "results": (NullDevice().staging(4096), 512)}
    plain, penalized = request(0), request(1, prompt=(1, 2), presence_penalty=1.0)
    penalized.row = 3
    for state in (on_gpu(), on_gpu(**places)):
        # A token more than the host knows: the batch in flight gives it.
        state._views["history_len"][:] = memoryview(array("i", [9] * 4))
        state.prepare([plain, penalized], [3, 7])
        got = views(state, "history_row", "history_len", "prompt_len", "counter")
        assert got["history_len"][:2] == [0, 7] and got["history_row"][1] == 3 and got["prompt_len"][1] == 2
        assert got["counter"][:2] == [3, 7]
        penalized.row = 0
        state.prepare([penalized])
        got = views(state, "history_row", "history_len", "counter")
        assert (got["history_row"][0], got["history_len"][0], got["counter"][0]) == (0, 2, 2)
        penalized.row = 3
    staging, offset = places["inputs"]
    assert bytes(staging.host[:offset]) == bytes(offset) and bytes(staging.host[offset:]) != bytes(4096 - offset)


def test_a_place_inside_a_staging_is_as_large_as_announced():
    for rows in (1, 3, 64):
        shapes = sample_tensors(rows, VOCAB, 1, 0, "gpu")
        for names, nbytes in ((row_parameters("gpu"), input_nbytes(rows)), (RESULTS, result_nbytes(rows))):
            least = sum(ITEM_BYTES[shapes[name][0]] * prod(shapes[name][1]) for name in names)
            assert least <= nbytes <= least + 16 * len(names)


def test_gpu_needs_a_history():
    with pytest.raises(ValueError, match="history"):
        SamplerState(NullGPU(), VOCAB, max_rows=4, max_tokens=64)


def _array(format, values):
    return memoryview(array(format, values))


def test_no_bias_stays_behind_for_a_later_longer_batch():
    state = make()
    biased = [request(line, logit_bias={7: 1.0 + line}) for line in range(4)]
    plain = [request(4 + line) for line in range(4)]
    state.prepare(biased)
    assert biases(state, 3) == {7: 4.0}
    state.prepare(plain[:1])
    state.prepare(plain)
    assert [biases(state, line) for line in range(4)] == [{}, {}, {}, {}]
