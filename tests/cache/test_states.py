"""The state cache: where parts of recurrent layers lie, and what says that a model has some."""

import pytest

from zse.cache.groups import group_layers
from zse.cache.layout import KVCache
from zse.cache.states import ALIGN, LEAST_KEPT, StateCache, StateLayout, StateSlots, layers_parts
from zse.models.config import ModelConfig
from zse.models.config_parts import RopeConfig
from zse.models.decoder import Decoder
from zse.runtime.null import NullDevice

PARTS = ((("conv", (6, 3)), ("delta", (2, 4, 4))), (), (("conv", (5, 2)),))


def test_parts_lie_one_behind_the_other_in_a_slot():
    layout = StateLayout(PARTS)
    states = StateCache(NullDevice(), layout, 4)
    places = [states.part(layer, name) for layer, name in ((0, "conv"), (0, "delta"), (2, "conv"))]
    # 18, 32 and 10 numbers, each from a multiple of ALIGN bytes on.
    assert [part.place for part in places] == [0, 32, 64] and layout.nbytes == 4 * 80 == 4 * states.part(
        0, "conv"
    ).stride
    assert all(4 * part.place % ALIGN == 0 and part.tensor.shape == (4, 80) for part in places)
    assert states.address(3) - states.address(0) == 3 * layout.nbytes and states.buffer.nbytes == 4 * layout.nbytes
    with pytest.raises(KeyError):
        states.part(1, "conv")


def hybrid(mixers: str) -> ModelConfig:
    """A model of one layer a letter: a(ttention), c(onv), n(one)."""
    names = {"a": "attention", "c": "conv", "n": "none"}
    sizes = dict(vocab_size=64, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32)
    more = dict(norm_eps=1e-5, max_context=64, rope=RopeConfig(theta=1e4), query_scale=0.25)
    return ModelConfig(
        architecture="x", num_layers=len(mixers), mixers=tuple(names[letter] for letter in mixers), **sizes, **more
    )


class Hybrid(Decoder):
    @classmethod
    def state_parts(cls, config, layer):
        return (("conv", (32, 2)),) if config.mixer(layer) == "conv" else ()


def test_layers_without_attention_have_no_keys():
    config = hybrid("ccanca")
    kv = KVCache(NullDevice(), config, 2, "f32")
    assert group_layers(config) == ((2, 5),) and kv.group_of == [-1, -1, 0, -1, -1, 0]
    assert [tensor is not None for tensor in kv.keys] == [False, False, True, False, False, True]
    assert kv.page_nbytes == 2 * 2 * 16 * 16 * 4  # K and V of two layers
    assert [config.kv_layer(layer) for layer in range(6)] == [-1, -1, 2, -1, -1, 5]


def test_parts_and_mixers_say_the_same():
    config = hybrid("can")
    assert config.has_state and not hybrid("aan").has_state
    assert layers_parts(Hybrid(config)) == [(("conv", (32, 2)),), (), ()]
    with pytest.raises(ValueError, match=r"layer 0 \(conv\) has the state parts \(\)"):
        layers_parts(Decoder(config))
    for mixers, error in (("cc", "no layer has attention"), ("", "num_layers")):
        with pytest.raises(ValueError, match=error):
            hybrid(mixers)


def test_states_behind_drafts():
    """Wherever drafts end the state there is the live one, without a copy, and all other slots are free again."""
    for accepted in range(6):
        copies: list = []
        slots = StateSlots(16, 512, transfer=copies.append, page_size=16)
        slots.begin(1)
        live, kept = slots.live[1], slots.save(1, 9)
        assert len(kept) == LEAST_KEPT == slots.num_saved and slots.save(2, 1) == [] and not slots.check_integrity()
        assert slots.live[1] == live not in kept
        slots.settle(1, accepted)
        assert slots.live[1] == [live, *kept, live][accepted]
        assert not slots.num_saved and not slots.check_integrity() and not copies
        slots.give(slots.detach(1))
        assert not slots.check_integrity() and sum(count for _, count in slots.free_runs()) == 16


def test_slots_of_a_run_in_flight_are_nobody_s():
    slots = StateSlots(6, 512)
    slots.begin(1)
    kept = slots.save(1, 3)
    slots.give(slots.detach(1))
    assert not slots.check_integrity() and sum(count for _, count in slots.free_runs()) == 3
    slots.settle(1)
    assert len(kept) == 3 and sum(count for _, count in slots.free_runs()) == 6


def test_at_most_a_quarter_of_slots_beside_prefixes():
    assert (
        StateSlots(64, 512, page_size=16).most_kept == 16 and StateSlots(5, 512, page_size=16).most_kept == LEAST_KEPT
    )
    slots = StateSlots(3, 512)
    for sequence in (1, 2):
        slots.begin(sequence)
    assert len(slots.save(1, 3)) == 1 and slots.save(2, 3) == []
