"""Models whose ranks are threads with a device of their own each: logits of all families are those of one process."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import test_gpt_oss as test_gpt_oss_of
import tiny
import tiny_families
import tiny_hybrids
from session import Session
from test_act_order import write as write_gptq
from test_lut4 import CONFIG as WIDE_GGUF
from test_lut4 import gguf_of

from zse.errors import UnsupportedError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.models import quantize_load
from zse.models.load import load_model, plan_model
from zse.parallel.collectives.host import HostCollectives
from zse.parallel.group import RankGroup
from zse.quant.superblock import SuperblockScheme
from zse.runtime.cpu import CPUDevice
from zse.runtime.opening import open_device
from zse.tensor import Tensor

REFERENCES = np.load(Path(__file__).with_name("references.npz"))
# Sums of up to 128 f32 products in another order, of ranks apart, through up to 4 layers, with logits up to 10.
NEAR = dict(rtol=2e-5, atol=8e-5)
NARROW = "columns of down_exps in groups of 32 32 is not supported; supported: at least 64"
REFUSED = {
    **dict.fromkeys(("qwen3_moe", "qwen3_moe_dense", "qwen2_moe", "glm4_moe", "gemma4_moe"), NARROW),
    **dict.fromkeys(("lfm2_moe", "qwen3_next", "qwen3_5_moe", "nemotron_h_moe", "nemotron_h_latent"), NARROW),
    **dict.fromkeys(("deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "mistral4", "glm4_moe_lite"), NARROW),
}


def on_ranks(size: int, rank_of):
    """What rank 0 of `size` returns, a thread each: rank_of(its RankGroup), or of one process rank_of(None)."""
    if size == 1:
        return rank_of(None)
    groups = [RankGroup.create(size)]
    groups += [RankGroup.join(rank, size, os.dup(groups[0].descriptor)) for rank in range(1, size)]
    try:
        with ThreadPoolExecutor(size) as pool:
            return [done.result() for done in [pool.submit(rank_of, group) for group in groups]][0]
    finally:
        for group in groups:
            group.close()


def logits_of(path, tokens, size: int, sizes=None, quantize=None, activations=None, whole_experts=False):
    """Rank 0's logits of a sequence, in steps of `sizes` tokens. size 1: of one process."""

    def rank_of(group: RankGroup | None):
        with open_device("cpu", threads=1) as device, open_model(str(path)) as source:
            if group is not None:
                group.connect(device)
            rank = group.rank if group else 0
            plan = plan_model(source, quantize=quantize, rank=rank, ranks=size, whole_experts=whole_experts)
            model = load_model(device, plan)
            model.wait()
            return Session(device, model, group=group, activations=activations).run(tokens, sizes)

    return on_ranks(size, rank_of)


FAMILIES = [*tiny.FAMILIES, *tiny_families.FAMILIES]
# Experts, and shared experts, that are too narrow to be cut in the tiny models.
WIDE = {
    "qwen3_moe": dict(moe_intermediate_size=96),
    "qwen3_moe_dense": dict(moe_intermediate_size=64),
    "qwen2_moe": dict(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=128,
    ),
    "glm4_moe": dict(moe_intermediate_size=96, use_qk_norm=False),
    "gemma4_moe": dict(moe_intermediate_size=64),
    "deepseek_v2_lite": dict(moe_intermediate_size=96),
    "deepseek_v3": dict(moe_intermediate_size=64),
    "mistral4": dict(moe_intermediate_size=64),
    "lfm2_moe": dict(moe_intermediate_size=64),
    "qwen3_next": dict(moe_intermediate_size=96, shared_expert_intermediate_size=96),
    "qwen3_5_moe": dict(moe_intermediate_size=64),
    "nemotron_h_moe": dict(moe_intermediate_size=96, moe_shared_expert_intermediate_size=96),
    "nemotron_h_latent": dict(moe_intermediate_size=64),
}
BIG = dict(num_attention_heads=8, num_key_value_heads=4, intermediate_size=320, hidden_size=256, head_dim=32)


def write(family: str, folder, monkeypatch=None, **changes):
    """A tiny model with changes of its configuration."""
    module = tiny if family in tiny.CONFIGS else tiny_families
    if changes:
        monkeypatch.setitem(module.CONFIGS, family, module.CONFIGS[family] | changes)
    folder.mkdir(exist_ok=True)
    return module.write(family, folder)


def same(found: np.ndarray, wanted: np.ndarray, bits: int = 32) -> None:
    """Logits that differ by the order of sums, which layers with large weights make 1e-4 of the largest at single places; with inputs of 8 bits, by a step of each number that stands on an
    edge between two, 1 % of the largest number of its group."""
    assert found.shape == wanted.shape
    off, size = np.abs(found - wanted), np.abs(wanted).max()
    most, mean = (2e-4, 2e-6) if bits == 32 else (2e-2, 5e-4)
    assert off.max() <= most * size and off.mean() <= mean * size, (off.max() / size, off.mean() / size)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_have_the_logits_of_transformers(family, tmp_path):
    path, tokens = write(family, tmp_path), tiny.tokens(family)
    with open_model(str(path)) as source:
        why = REFUSED.get(family)
        if why:
            with pytest.raises(UnsupportedError) as refused:
                plan_model(source, rank=1, ranks=2)
            assert "--tensor-parallel-size 2: " + why in str(refused.value)
            return
    np.testing.assert_allclose(logits_of(path, tokens, 2, [37, 1, 2]), REFERENCES[family], **NEAR)


CUTS = [
    (family, size) for family, wide in WIDE.items() for size in (2, 3) if wide["moe_intermediate_size"] >= 32 * size
]


@pytest.mark.parametrize("family, size", CUTS)
def test_experts_are_cut_within(family, size, tmp_path, monkeypatch):
    path, tokens = write(family, tmp_path, monkeypatch, **WIDE[family]), tiny.tokens(family)
    same(logits_of(path, tokens, size), logits_of(path, tokens, 1))


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
@pytest.mark.parametrize("size, heads, kv_heads", [(3, 8, 4), (3, 4, 2), (5, 8, 2), (4, 4, 1), (2, 6, 3)])
def test_shares_of_heads_are_uneven(size, heads, kv_heads, family, tmp_path, monkeypatch):
    """Whole groups of KV heads, or where there are more ranks the same KV head on several, which counts once in a norm over
    all heads together."""
    changes = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=192, vocab_size=384)
    if family == "olmo2":
        changes |= dict(hidden_size=32 * heads)
    path, tokens = write(family, tmp_path, monkeypatch, **changes), tiny.tokens(family)
    same(logits_of(path, tokens, size, [30, 10]), logits_of(path, tokens, 1))


@pytest.mark.parametrize("quantize, activations", [("int4", "int8"), ("int8", "int8"), ("int4", "f32")])
def test_weights_are_quantized_as_in_one_process(quantize, activations, tmp_path, monkeypatch):
    path, tokens = write("llama", tmp_path, monkeypatch, **BIG), tiny.tokens("llama")
    options = dict(quantize=quantize, activations=activations)
    bits = 8 if activations == "int8" else 32
    monkeypatch.setattr(quantize_load, "fill_parts", None)  # kernels cut the columns, not NumPy
    same(logits_of(path, tokens, 3, **options), logits_of(path, tokens, 1, **options), bits)


@pytest.mark.parametrize(
    "types, heads",
    [({"down": "Q4_K", "o": "Q6_K"}, 4), ({"gate": "Q8_0", "down": "IQ4_XS", "o": "Q5_1", "q": "Q4_K"}, 2)],
)
def test_gguf(types, heads, tmp_path, monkeypatch):
    """Blocks of 32 and of 256 numbers, whose cuts stand where a scale ends."""
    more = dict(num_attention_heads=WIDE_GGUF["num_attention_heads"] * heads // 2)
    monkeypatch.setitem(tiny.CONFIGS, "wide_qwen2", WIDE_GGUF | more)
    path = gguf_of("wide_qwen2", tmp_path, types)[0]
    tokens = tiny.tokens("qwen2")
    same(logits_of(path, tokens, 2, [39, 1]), logits_of(path, tokens, 1))


def test_a_cut_within_a_super_block_rounds_its_scales(tmp_path, monkeypatch):
    """Two ranks with half of Q6_K's 256 columns each have what one has with f16 scales."""
    monkeypatch.setitem(tiny.CONFIGS, "wide_qwen2", WIDE_GGUF)
    path = gguf_of("wide_qwen2", tmp_path, {"down": "Q4_K", "o": "Q6_K"})[0]
    tokens = tiny.tokens("qwen2")
    found = logits_of(path, tokens, 2, [39, 1])
    monkeypatch.setattr(SuperblockScheme, "loaded", lambda self, family: self.narrow if self.bits == 6 else self)
    same(found, logits_of(path, tokens, 1))


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq(symmetric, tmp_path, monkeypatch):
    monkeypatch.setitem(tiny.CONFIGS, "llama", tiny.CONFIGS["llama"] | BIG)
    path, _ = write_gptq(tmp_path / "gptq", trivial=True, symmetric=symmetric)
    same(logits_of(path, tiny.tokens("llama"), 2), logits_of(path, tiny.tokens("llama"), 1))


@pytest.mark.parametrize(
    "size, converted, options",
    [
        (2, False, {}),
        (3, False, dict(symmetric=False)),
        (2, False, dict(bits=3)),
        (2, False, dict(dense=("gate_proj",))),  # so down has an order, too
        (3, True, dict(dense=("gate_proj",))),
        (2, True, {}),
    ],
)
def test_columns_in_an_order_of_their_own(size, converted, options, tmp_path, monkeypatch):
    """A rank's columns of o, and of down, are anybody's inputs."""
    changes = BIG | dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=192) if size == 3 else BIG
    monkeypatch.setitem(tiny.CONFIGS, "llama", tiny.CONFIGS["llama"] | changes)
    path, _ = write_gptq(tmp_path / "gptq", **options)
    if converted:
        convert(path, path := str(tmp_path / "model.zse"))
        monkeypatch.setattr(quantize_load, "fill_parts", None)  # the loader's threads read the columns, not NumPy
    tokens = tiny.tokens("llama")
    gathered, record = [], HostCollectives.gather

    def count(self, recorder, x, out, widths, every=False):
        gathered.append(every and not self._group.rank)
        record(self, recorder, x, out, widths, every)

    monkeypatch.setattr(HostCollectives, "gather", count)
    found = logits_of(path, tokens, size, [33, 1, 6], activations="f32")
    assert sum(gathered) == 3 * (2 if "dense" in options else 1) * tiny.config("llama")["num_hidden_layers"]
    same(found, logits_of(path, tokens, 1, activations="f32"))
    same(logits_of(path, tokens, size, activations="int8"), logits_of(path, tokens, 1, activations="int8"), 8)


@pytest.mark.parametrize("experts", ["F32", "MXFP4", "folder F32", "folder MXFP4", "folder BF16"])
def test_gpt_oss(experts, tmp_path):
    """Sinks, biases of experts, rows of gate and up in turn, in folders matrices that are stored turned."""
    kind = experts.removeprefix("folder ")
    path = test_gpt_oss_of.write(tmp_path, kind) if kind == experts else test_gpt_oss_of.write_folder(tmp_path, kind)
    tokens = tiny.tokens("gpt-oss")
    same(logits_of(path, tokens, 2), logits_of(path, tokens, 1))


@pytest.mark.parametrize("quant", ["int4", "int6", "fp8", "bf16"])
def test_converted_files(quant, tmp_path, monkeypatch):
    path, tokens = write("qwen2", tmp_path / "hf", monkeypatch, **BIG), tiny.tokens("qwen2")
    convert(str(path), str(tmp_path / "model.zse"), quant=quant)
    if quant != "fp8":  # which becomes bf16 on a CPU
        monkeypatch.setattr(quantize_load, "fill_parts", None)  # the loader's threads read the columns, not NumPy
    same(logits_of(tmp_path / "model.zse", tokens, 3), logits_of(tmp_path / "model.zse", tokens, 1))


def recurrent_of(path, size: int) -> list:
    """Whether each rank has a part of the recurrent layers, and their sizes."""
    with open_model(str(path)) as source:
        plans = [plan_model(source, rank=rank, ranks=size) for rank in range(size)]
        return [("mix_out" in plan.share.partial, plan.config.recurrent) for plan in plans]


# (family, changes, ranks, heads of each, groups of each); None: every rank has all of these layers.
HYBRIDS = [
    ("qwen3_5", {}, 2, (3, 3), (1, 1)),
    ("qwen3_5", {}, 3, (3, 1, 2), (1, 1, 1)),  # more ranks than groups of keys
    ("qwen3_5", dict(linear_num_key_heads=4, linear_num_value_heads=8), 3, (2, 2, 4), (1, 1, 2)),
    ("nemotron_h", {}, 2, (3, 3), (1, 1)),
    ("nemotron_h", dict(n_groups=4, mamba_num_heads=8), 3, (2, 2, 4), (1, 1, 2)),
    ("nemotron_h", {}, 3, None, None),  # a norm's group would be on two ranks
    ("granite_hybrid", {}, 2, None, None),
    ("granite_hybrid", dict(mamba_n_groups=4), 2, (4, 4), (2, 2)),
]


@pytest.mark.parametrize("family, changes, size, heads, groups", HYBRIDS)
def test_heads_of_recurrent_layers(family, changes, size, heads, groups, tmp_path, monkeypatch):
    wide = dict(intermediate_size=192, shared_intermediate_size=192, vocab_size=384)
    if size == 3:
        wide |= dict(num_attention_heads=6, num_key_value_heads=3)
    path = write(family, tmp_path, monkeypatch, **wide | changes)
    found = recurrent_of(path, size)
    if heads is None:
        assert not any(cut for cut, _ in found)
    else:
        assert all(cut for cut, _ in found)
        assert (tuple(part.heads for _, part in found), tuple(part.groups for _, part in found)) == (heads, groups)
    tokens = tiny.tokens(family)
    same(logits_of(path, tokens, size, [33, 1, 6]), logits_of(path, tokens, 1))


def test_channels_of_short_convolutions(tmp_path):
    path, tokens = write("lfm2", tmp_path), tiny.tokens("lfm2")
    assert [part.width for _, part in recurrent_of(path, 2)] == [64, 64]
    same(logits_of(path, tokens, 2, [33, 1, 6]), logits_of(path, tokens, 1))


@pytest.mark.each()
@pytest.mark.parametrize("family", [each for each in tiny_hybrids.IN_GGUF if each not in REFUSED])
@pytest.mark.parametrize("size", [2, 3])
def test_hybrids_in_gguf(family, size, tmp_path, monkeypatch):
    """Heads of values in turn; vectors of other shapes."""
    heads = dict(num_attention_heads=2 * size, num_key_value_heads=size, vocab_size=384)
    changes = {
        "lfm2": dict(hidden_size=64 * size),
        "granite_hybrid": dict(
            hidden_size=64 * size, mamba_n_heads=4 * size, mamba_n_groups=size, shared_intermediate_size=192
        ),
        "qwen3_5": dict(head_dim=64, intermediate_size=192),
        "nemotron_h": dict(intermediate_size=192),
    }[family] | heads
    monkeypatch.setitem(tiny_hybrids.CONFIGS, family, tiny_hybrids.CONFIGS[family] | changes)
    monkeypatch.setitem(tiny_families.CONFIGS, family, tiny_hybrids.CONFIGS[family])
    path = tiny_families.write_gguf(family, tmp_path)
    tokens = tiny.tokens(family)
    same(logits_of(path, tokens, size, [33, 1, 6]), logits_of(path, tokens, 1))


def poisoned(monkeypatch) -> None:
    """Scratch begins with numbers that are none: what others' experts would have written must not be read."""
    alloc = CPUDevice.alloc

    def filled(device, nbytes, label="other"):
        buffer = alloc(device, nbytes, label)
        if label == "scratch":
            device.write(Tensor(buffer, (nbytes // 4,), "i32", 0), np.full(nbytes // 4, 0x7FC00000, np.int32))
        return buffer

    monkeypatch.setattr(CPUDevice, "alloc", filled)


WHOLE = [each for each in tiny_families.FAMILIES if "experts_per_tok" in str(tiny_families.CONFIGS[each])]


@pytest.mark.each()
@pytest.mark.parametrize("family", WHOLE)
@pytest.mark.parametrize("size", [2, 3])
def test_experts_are_whole_on_ranks(family, size, tmp_path, monkeypatch):
    """As many as there are on each, or one more."""
    poisoned(monkeypatch)
    config = tiny_families.CONFIGS[family]
    changes = dict(vocab_size=384)
    changes |= {key: 192 for key in ("intermediate_size", "moe_shared_expert_intermediate_size") if key in config}
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        changes |= {key: 96} if key in config else {}
    if config.get("n_shared_experts") and "moe_shared_expert_intermediate_size" not in config:
        changes |= dict(moe_intermediate_size=96)
    if size == 3:
        changes |= dict(num_attention_heads=6, num_key_value_heads=3)
        if "kv_lora_rank" in config:
            changes |= dict(num_key_value_heads=6)
        elif "head_dim" not in config:
            changes |= dict(hidden_size=192)
    path, tokens = write(family, tmp_path, monkeypatch, **changes), tiny.tokens(family)
    with open_model(str(path)) as source:
        own = [plan_model(source, rank=rank, ranks=size, whole_experts=True).config.moe.own for rank in range(size)]
    assert [first for first, _ in own] == [sum(count for _, count in own[:rank]) for rank in range(size)]
    assert max(count for _, count in own) - min(count for _, count in own) <= 1
    same(logits_of(path, tokens, size, [33, 1, 6], whole_experts=True), logits_of(path, tokens, 1))


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_whole_experts_are_quantized(quantize, tmp_path):
    path, tokens, options = (
        write("mixtral", tmp_path),
        tiny.tokens("mixtral"),
        dict(quantize=quantize, activations="f32"),
    )
    same(logits_of(path, tokens, 2, whole_experts=True, **options), logits_of(path, tokens, 1, **options))


def test_what_has_no_whole_experts_is_refused(tmp_path):
    for family, size, why in (
        ("llama", 2, "--expert-parallel: model 'without experts'"),
        ("mixtral", 5, "experts with --expert-parallel 4 is not"),
    ):
        (tmp_path / family).mkdir()
        with open_model(str(write(family, tmp_path / family))) as source:
            with pytest.raises(UnsupportedError, match=why):
                plan_model(source, rank=0, ranks=size, whole_experts=True)
