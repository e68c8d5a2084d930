"""The planner: places never overlap, layers that are alike share a trace, what cannot be computed is said at plan time."""

import random
import time

import pytest
import tiny
from null_source import source_of

from zse.cache.layout import KVCache
from zse.models.decoder import Decoder
from zse.models.load import load_model, plan_model
from zse.models.registry import forward_of
from zse.plan.forms import form_of
from zse.plan.place import ALIGN, Life, place
from zse.plan.record import Planner, StepBuffers
from zse.plan.trace import PlanError
from zse.quant.scheme import parse_scheme
from zse.runtime.counting import CountingDevice
from zse.runtime.null import NullDevice, NullGPU

INT4 = {"embed": "int8-g32-sym", "lm_head": "int8-g32-sym", "": "int4-g32"}


def planner_of(forward=None, device=None, layers=2, schemes=INT4, **changes):
    """A Planner of a Llama, or of a Decoder's class, on a device that only counts."""
    device = CountingDevice(device or NullDevice(2))
    config = tiny.config("llama") | dict(num_hidden_layers=layers, hidden_size=256, intermediate_size=512) | changes
    plan = plan_model(source_of(config, schemes), family=device.kernels)
    model = load_model(device, plan, start=False)
    kv = KVCache(device, plan.config, 8, "f16" if device.shares_memory else "bf16")
    buffers = StepBuffers.allocate(device, plan.config, max_tokens=512, max_rows=16, max_pages=8)
    return Planner(device, (forward or forward_of)(plan.config), model, kv, buffers)


def test_places_do_not_overlap_while_both_live():
    rng = random.Random(1)
    for _ in range(300):
        lives = []
        for _ in range(rng.randrange(1, 12)):
            first = rng.randrange(10)
            lives.append(Life(rng.choice((0, 1, 100, 5000, 4096)), first, first + rng.randrange(5)))
        offsets, total = place(lives)
        for a, (at, life) in enumerate(zip(offsets, lives, strict=True)):
            assert at % ALIGN == 0 and at + life.nbytes <= total
            for b in range(a):
                other = lives[b]
                if life.first <= other.last and other.first <= life.last and life.nbytes and other.nbytes:
                    assert at + life.nbytes <= offsets[b] or offsets[b] + other.nbytes <= at
        most = max(sum(life.nbytes for life in lives if life.first <= at <= life.last) for at in range(15))
        assert total >= most


def test_one_after_another_share_a_place():
    offsets, total = place([Life(1000, 0, 1), Life(1000, 2, 3), Life(500, 1, 2)])
    assert offsets == [0, 0, 1024] and total == 1024 + 512


@pytest.mark.parametrize("head", ["int4-g128", "fp8-row", "fp8-block"])
def test_a_head_with_an_odd_number_of_rows_takes_bf16(head):
    """The products that take e4m3 activations write columns in pairs."""
    device, scheme = NullGPU(), parse_scheme(head)
    taken = "fp8_sums" if head.startswith("int4") else "fp8"
    assert [form_of(device, "fp8", [(scheme, rows)], 16, False) for rows in (160, 161)] == [taken, "bf16"]
    planner = planner_of(device=device, schemes={"lm_head": head, "": "int4-g128"}, vocab_size=161)
    planner.record(planner.device.record(), max_tokens=64, every_token=True)


def test_layers_of_a_kind_are_traced_once():
    calls = []

    class Counted(Decoder):
        def kind(self, i):
            return i % 2

        def layer(self, x, i):
            calls.append(i)
            q, k, v = self.qkv(self.norm(x, "attn_norm", i), i)
            x = x + self.linear(self.attention(q, k, v, i), "o", i)
            return x + self.mlp(self.norm(x, "mlp_norm", i), i)

    planner_of(Counted, layers=9)
    # The first layer begins with nothing to be added, so the third is not like it; the last is in two parts as well.
    assert calls == [0, 1, 2, 8]
    calls.clear()
    planner_of(Counted, NullGPU(), layers=9)
    assert calls == [0, 1, 8]


def test_the_stream_before_an_addition_is_gone():
    class Stale(Decoder):
        def layer(self, x, i):
            q, k, v = self.qkv(self.norm(x, "attn_norm", i), i)
            y = x + self.linear(self.attention(q, k, v, i), "o", i)
            return y + self.mlp(self.norm(x, "mlp_norm", i), i)

    for device in (NullDevice(2), NullGPU()):
        with pytest.raises(PlanError, match="reads the stream as it was before an addition"):
            planner_of(Stale, device)


def test_a_last_layer_in_two_parts():
    """All but attention is computed of the wanted rows; a layer that adds to the stream before it reads other tokens is left whole,
    and so is one of a model whose stream is read behind a step."""

    class Turned(Decoder):
        def layer(self, x, i):
            x = x + self.mlp(self.norm(x, "mlp_norm", i), i)
            q, k, v = self.qkv(self.norm(x, "attn_norm", i), i)
            return x + self.linear(self.attention(q, k, v, i), "o", i)

    for device in (NullDevice(2), NullGPU()):
        planner = planner_of(None, device)
        first, rest = planner._last
        assert "attend" in [node.op for node in first.nodes] and {node.op for node in first.nodes[-2:]} == {"wanted"}
        assert not {"attend", "heads", "wanted"} & {node.op for node in rest.nodes}
        products = [node.weights["weight"] for node in rest.nodes if node.op in ("linear", "gated_product")]
        assert products == ["o", "gate_up", "down"]
        assert planner_of(Turned, device)._last is None
        whole = Planner(device, planner.forward, planner.model, planner.kv, planner.buffers, whole_stream=True)
        assert whole._last is None
        # On a CPU the rows lie in what is carried to the layer; no GPU's layers carry anything here.
        assert (whole.scratch.nbytes == planner.scratch.nbytes) == (device.kernels == "cpu")


def test_a_weight_that_is_not_there():
    class Wrong(Decoder):
        def layer(self, x, i):
            return x + self.mlp(self.norm(x, "attention_norm", i), i)

    with pytest.raises(PlanError, match="uses 'attention_norm', which this model does not have"):
        planner_of(Wrong)


def test_what_no_launch_computes_is_said_at_plan_time():
    class Doubled(Decoder):
        def layer(self, x, i):
            h = self.norm(x, "mlp_norm", i)
            return x + self.mlp(h, i) * 2.0

    class Sum(Decoder):
        def layer(self, x, i):
            h = self.norm(x, "mlp_norm", i)
            down = self.mlp(h, i)
            return x + (down + down)

    class Unturned(Decoder):
        def layer(self, x, i):
            h = self.norm(x, "attn_norm", i)
            q, k, v = (self.linear(h, name, i) for name in "qkv")
            return x + self.linear(self.attention(q, k, v, i), "o", i)

    for wrong, message in (
        (Doubled, "scale_logits.*no launch"),
        (Sum, "what is not the residual stream"),
        (Unturned, "attention takes what rotate gives"),
    ):
        for device in (NullDevice(2), NullGPU()):
            with pytest.raises(PlanError, match=message):
                planner_of(wrong, device)


@pytest.mark.timed
@pytest.mark.parametrize("device", [NullDevice(2), NullGPU()], ids=["cpu", "gpu"])
def test_28_layers_are_planned_in_10_ms(device):
    planner = planner_of(None, device, layers=28)

    def plan_ms() -> float:
        start = time.process_time()
        Planner(planner.device, forward_of(planner.config), planner.model, planner.kv, planner.buffers)
        return 1e3 * (time.process_time() - start)

    assert min(plan_ms() for _ in range(5)) < 10
