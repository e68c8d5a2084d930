"""What a row of the sampler owes to its neighbours: nothing. Shared by the tests of the CPU's kernel and the GPU's; `sampled` runs
one of them."""

import numpy as np

from zse.kernels.sample_cases import make_parameters


def check_a_row_depends_on_itself_only(sampled):
    rng = np.random.default_rng()
    rows, vocab = 6, 9001
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    params = make_parameters(
        rows,
        temperature=1.2,
        top_p=[1, 0.9, 1, 0.5, 1, 1],
        top_k=[0, 0, 9, 20, 0, 0],
        num_logprobs=3,
        repetition=1.1,
        seed=np.arange(rows),
        counter=7,
    )
    together = sampled(logits, params)
    for r in range(rows):
        alone = {name: value[r : r + 1] for name, value in params.items() if len(value) == rows}
        single = sampled(logits[r : r + 1], make_parameters(1) | alone)
        for name in ("tokens", "logprob", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(single[name][0], together[name][r])


def check_broken_neighbours_change_nothing(sampled, vocab):
    rng = np.random.default_rng()
    logits = (rng.standard_normal((3, vocab)) * 3).astype(np.float32)
    params = make_parameters(3, temperature=[1, 0, 1], num_logprobs=2, seed=5, counter=[1, 2, 3])
    clean = sampled(logits, params)
    logits[1, vocab // 3] = np.nan
    broken = sampled(logits, params)
    assert broken["status"].tolist() == [0, 1, 0]
    assert 0 <= broken["tokens"][1] < vocab
    for name in ("tokens", "logprob", "top_ids"):
        np.testing.assert_array_equal(clean[name][[0, 2]], broken[name][[0, 2]])
