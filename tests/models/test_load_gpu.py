"""Loading for a GPU: layouts, few large copies, what is made on the host; on a CPU device that calls itself a GPU, and on
the CUDA device over the fake driver of tests/runtime."""

import json
import sys
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import test_gpt_oss
import tiny
import tiny_families
from formats_build import safetensors

from zse.errors import UnsupportedError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.formats.source import rope_row_order
from zse.models import expert_places, registry
from zse.models import load as model_load
from zse.models.load import FileCopy, load_model, merge, plan_model
from zse.models.weight_plan import place_host_layers
from zse.quant.pack import bf16_to_f32, e4m3_to_f32
from zse.runtime.buffer import Account, Buffer
from zse.runtime.cpu import CPUDevice
from zse.tensor import Tensor


class PretendGPU(CPUDevice):
    kernels, repacks = "gpu", False


@pytest.fixture(scope="module", params=["pretended", "fake driver"])
def gpu(request, tmp_path_factory):
    """A device whose num_jobs is the number of jobs of the last load."""
    if request.param == "pretended":
        device = PretendGPU(threads=2)
    else:
        sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
        from gpu_fixtures import Fake, compile_driver, kernels

        from zse.runtime.bindings.cuda import CUDADriver
        from zse.runtime.cuda import CUDADevice

        fake = Fake(compile_driver(tmp_path_factory.mktemp("driver")), tmp_path_factory.mktemp("copy"))
        device = CUDADevice(0, CUDADriver(fake.path), kernels())
    load = device.load

    def counted(jobs, threads=None):
        device.num_jobs = len(jobs)
        return load(jobs, threads)

    device.load = counted
    with device:
        yield device


def values_of(device, weight) -> np.ndarray:
    """f32 [N, K] of a loaded Weight."""
    dtypes = {"u8": np.uint8, "e4m3": np.uint8, "f16": np.float16, "f32": np.float32, "bf16": np.uint16}
    planes = {}
    for name, tensor in weight.planes.items():
        planes[name] = np.frombuffer(device.read(tensor), dtypes[tensor.dtype]).reshape(tensor.shape)
    assert weight.layout == ("r16" if weight.scheme.kind == "affine" else "rows")
    return weight.scheme.dequantize(planes, *weight.shape, weight.layout)


def load(device, path, **options):
    source = open_model(path)
    model = load_model(device, plan_model(source, family="gpu", **options))
    model.wait()
    return model


def check(device, model, expected, tolerance=0.0):
    """Every weight and vector of the model against arrays by role."""
    seen = set()
    for name, weight in model.weights.items():
        base, _, short = name.rpartition(".")
        members = {"qkv": "q k v", "gate_up": "gate up"}.get(short, short).split()
        roles = [f"{base}.{member}" if base else member for member in members]
        seen |= set(roles)
        wanted = np.concatenate([expected[role] for role in roles])
        got = values_of(device, weight)
        if tolerance:
            np.testing.assert_allclose(got, wanted, atol=tolerance * np.abs(wanted).max(), err_msg=name)
        else:
            np.testing.assert_array_equal(got, wanted, err_msg=name)
    for name, tensor in model.vectors.items():
        base, _, short = name.rpartition(".")
        members = ["q_bias", "k_bias", "v_bias"] if short == "qkv_bias" else [short]
        roles = [f"{base}.{member}" if base else member for member in members]
        seen |= set(roles)
        np.testing.assert_array_equal(
            np.frombuffer(device.read(tensor), np.float32), np.concatenate([expected[role] for role in roles])
        )
    assert seen == set(expected)


def config_of(path):
    with open_model(path) as source:
        return plan_model(source).config


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_directory_of_plain_rows_is_copied(family, dtype, gpu, tmp_path):
    path = tiny.write(family, tmp_path, dtype)
    expected = tiny.by_role(family, config_of(path))
    if dtype == "BF16":
        plus = 1 if family == "gemma3" else 0
        for name, values in expected.items():
            shift = plus if "norm" in name else 0
            expected[name] = bf16_to_f32(tiny.to_bf16(values - np.float32(shift))) + np.float32(shift)
            if shift:
                original = tiny.weights(family)[registry.architecture(config_of(path).architecture).hf_name(name)]
                expected[name] = bf16_to_f32(tiny.to_bf16(original)) + np.float32(1)
    check(gpu, load(gpu, path), expected)


@pytest.mark.parametrize(
    "quant, layout",
    [("int4", "r16"), ("int8", "r16"), ("fp8", "r16"), ("bf16", "rows"), ("bf16", "r16"), ("f16", "rows")],
)
@pytest.mark.parametrize("family", ["wide", "qwen2"])
def test_a_converted_file_is_one_copy(family, quant, layout, gpu, tmp_path):
    (tmp_path / "hf").mkdir()
    path = tiny.write(family, tmp_path / "hf")
    out = tmp_path / "m.zse"
    convert(path, out, quant, layout=layout)
    config = config_of(path)
    model = load(gpu, out)
    tolerance = {"int4": 0.13, "int8": 0.006, "fp8": 0.07, "bf16": 0.004, "f16": 5e-4}[quant]
    check(gpu, model, tiny.by_role(family, config), tolerance)
    # Everything lies in the file as in memory, or all matrices are made on the host and the vectors are one copy.
    assert gpu.num_jobs == 1
    assert {weight.layout for weight in model.weights.values()} <= {"r16", "rows"}


@pytest.mark.parametrize("quantize, scheme", [("int4", "int4-g128"), ("int4-g32", "int4-g32")])
def test_quantizing_on_load(quantize, scheme, gpu, tmp_path):
    path = tiny.write("wide", tmp_path)
    model = load(gpu, path, quantize=quantize)
    assert model.weights["layers.0.qkv"].scheme.name == scheme
    with open_model(path) as source:
        planned = plan_model(source, family="gpu", quantize=quantize).memory_bytes
    assert model.buffer.nbytes == sum(planned.values())
    check(gpu, model, tiny.by_role("wide", model.config), 0.16)


@pytest.mark.parametrize("way", ["copied", "repacked", "converted"])
def test_layers_are_loaded_into_host_memory(way, gpu, tmp_path):
    """As they lie in the file, by NumPy, and from a `.zse`: what is stored there is what a step copies."""
    path = tiny.write("wide", tmp_path)
    if way == "converted":
        convert(path, tmp_path / "m.zse", "int4", layout="r16")
        path = tmp_path / "m.zse"
    with open_model(path) as source:
        plan = plan_model(source, family="gpu", quantize="int4" if way == "repacked" else None).with_host_layers(1)
        model = load_model(gpu, plan)
        model.wait()
        (layer,) = plan.host_layers
        assert model.host_layers.memory.nbytes == plan.host_bytes == plan.layer_bytes[layer] == plan.slot_bytes
        recorder = gpu.record()
        model.host_layers.begin(recorder)
        assert [(launch.symbol, launch.source.nbytes) for launch in recorder.launches] == [("fetch", plan.host_bytes)]
        stored = place_host_layers(plan, model.host_layers.memory, model.weights)
        assert {name.rpartition(".")[0] for name in stored} == {f"layers.{layer}"}
        model.weights.update(stored)
        check(gpu, model, tiny.by_role("wide", plan.config), 0 if way == "copied" else 0.16)


@pytest.mark.parametrize("way", ["copied", "repacked", "converted"])
def test_experts_are_loaded_into_host_memory(way, gpu, tmp_path):
    """Likewise: the planes that all experts have where they are all on the device."""
    path, quantize = tiny_families.write("qwen3_moe", tmp_path, "BF16"), "int4" if way == "repacked" else None
    if way == "converted":
        convert(path, tmp_path / "m.zse", "int4", layout="r16")
        path = tmp_path / "m.zse"
    with open_model(path) as source:
        plan = plan_model(source, family="gpu", quantize=quantize)
        whole = load_model(gpu, plan)
        whole.wait()
        least = expert_places.places_bytes(plan, expert_places.groups_of(plan), 1)
        fewer = expert_places.with_expert_memory(plan, least)
        model = load_model(gpu, fewer)
        model.wait()
    experts = model.host_experts
    assert experts.memory.nbytes == expert_places.host_bytes(fewer) and fewer.expert_slots == 1
    stored = experts.stored.beside(model.weights, model.vectors)
    assert {name for name in whole.weights if name.endswith("_exps")} == set(experts.stored.weights)
    for name, weight in whole.weights.items():
        assert stored.weights[name].shape == weight.shape == model.weights[name].shape
        for plane, tensor in weight.planes.items():
            assert gpu.read(stored.weights[name].planes[plane]) == gpu.read(tensor), (name, plane)


@pytest.mark.parametrize("type", ["Q4_1", "Q8_0", "Q6_K", "F16", "BF16"])
def test_gguf_is_repacked_on_the_host(type, gpu, tmp_path):
    from formats_build import Tensor as GGUFTensor
    from formats_build import gguf, llama_metadata

    from zse.formats.matrix import Rows

    hidden = 256
    shapes = {
        "token_embd": (64, hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (128, hidden),
        "blk.0.attn_v": (128, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (512, hidden),
        "blk.0.ffn_up": (512, hidden),
        "blk.0.ffn_down": (hidden, 512),
    }
    tensors = [GGUFTensor(f"{name}.weight", type, shape) for name, shape in shapes.items()]
    tensors += [
        GGUFTensor(f"{name}.weight", "F32", (hidden,)) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")
    ]
    sizes = {"llama__embedding_length": ("u32", hidden), "llama__feed_forward_length": ("u32", 512)}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(llama_metadata(**sizes), tensors))
    config, expected = config_of(path), {}
    with open_model(path) as source:
        family = registry.architecture(config.architecture)
        for role in family.roles(config):
            info = source.tensors[family.gguf_name(role.name)]
            raw = source.read(info)
            if len(info.shape) == 1:
                expected[role.name] = np.frombuffer(raw, np.float32)
                continue
            order = rope_row_order(role.heads, config.head_dim) if role.heads else None
            expected[role.name] = Rows(source, info, 0, info.shape[0], order, len(order) if order else 1).f32()
            if type in ("Q6_K",):  # its scales are rounded to f16 in a GPU's memory
                from zse.formats.matrix import Rows

                expected[role.name] = (
                    Rows(source, info, 0, info.shape[0], order, len(order) if order else 1)
                    .arrays()
                    .narrowed()
                    .dequantize()
                )
    check(gpu, load(gpu, path), expected)


def test_merge_joins_neighbours_only():
    class File:
        path = "f"

        def __init__(self, fd):
            self.fd = fd

    one, two = File(3), File(4)

    def copy(at, nbytes, source):
        return FileCopy(Tensor(None, (nbytes,), "u8", at), source, "t")

    def spans(copies):
        return [(job.fd, job.offset, job.args["destination"].offset, job.nbytes) for job in merge(copies)]

    three = [copy(0, 100, (one, 4096)), copy(256, 50, (one, 4352)), copy(306, 10, (one, 4402))]
    assert spans(three) == [(3, 4096, 0, 316)]
    assert spans([copy(256, 50, (one, 4352)), copy(0, 100, (one, 4096))]) == [(3, 4096, 0, 306)], "any order"
    assert len(spans([copy(0, 100, (one, 4096)), copy(256, 50, (one, 4360))])) == 2, "another distance"
    assert len(spans([copy(0, 100, (one, 4096)), copy(256, 50, (two, 4352))])) == 2, "another file"
    assert len(spans([copy(0, 100, (one, 4096)), copy(512, 50, (one, 4608))])) == 2, "room for another plane between"
    # What is made on the host lies between: the padding must not be copied over it.
    assert len(spans([copy(0, 64, (one, 0)), copy(64, 64, None), copy(128, 64, (one, 128))])) == 2


@pytest.mark.parametrize("quant", ["int4", "fp8", "bf16"])
def test_a_stack_of_experts_is_the_same_jobs_as_its_experts(quant, tmp_path, monkeypatch):
    (tmp_path / "hf").mkdir()
    path = tiny_families.write("qwen3_moe", tmp_path / "hf")
    convert(path, tmp_path / "m.zse", quant)

    def jobs() -> list:
        found = []

        class Recording(PretendGPU):
            def load(self, jobs, **options):
                found.extend((job.offset, job.nbytes, job.args["destination"].offset) for job in jobs)
                return super().load(jobs, **options)

        with Recording() as gpu:
            load(gpu, tmp_path / "m.zse")
        return found

    monkeypatch.setattr(model_load, "MANY_PARTS", 2)
    together = jobs()
    monkeypatch.setattr(model_load, "MANY_PARTS", 1 << 30)
    assert together and together == jobs()


@pytest.mark.parametrize("block", [None, [128, 128]])
def test_fp8_rows_in_pairs_are_put_in_order(block, gpu, tmp_path):
    """A Cohere checkpoint in fp8: the numbers of q and k in another order, with the scales of their rows or blocks."""
    rng = np.random.default_rng(3)
    config = tiny_families.CONFIGS["cohere"] | dict(
        attention_bias=False,
        quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}
        | ({"weight_block_size": block} if block else {}),
    )
    entries, wide = {}, {}
    for name, shape in tiny_families.shapes_of(config).items():
        if len(shape) == 1 or "proj" not in name:
            values = rng.standard_normal(shape).astype(np.float32)
            entries[name], wide[name] = ("F32", shape, values.tobytes()), values
            continue
        codes = rng.integers(0, 0x70, shape).astype(np.uint8)
        blocks = tuple(-(-size // 128) for size in shape) if block else (shape[0], 1)
        scale = (0.5 + rng.random(blocks)).astype(np.float32)
        entries[name] = "F8_E4M3", shape, codes.tobytes()
        entries[name + ("_scale_inv" if block else "_scale")] = "F32", blocks, scale.tobytes()
        spread = np.kron(scale, np.ones((128, 128), np.float32))[: shape[0], : shape[1]] if block else scale
        wide[name] = e4m3_to_f32(codes) * spread
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(safetensors(entries, {"format": "pt"}))
    model = load(gpu, str(tmp_path))
    family, expected = registry.architecture("cohere"), {}
    for role in family.roles(model.config):
        values = wide[family.hf_name(role.name)]
        order = rope_row_order(role.heads, model.config.head_dim) if role.heads else slice(None)
        expected[role.name] = values[order]
    check(gpu, model, expected)


def test_the_plan_must_be_for_the_device(gpu, tmp_path):
    with open_model(tiny.write("llama", tmp_path)) as source, pytest.raises(ValueError, match="a plan for cpu"):
        load_model(gpu, plan_model(source))


class Asked:
    """A GPU that keeps the jobs of its load and runs none."""

    kernels, repacks = "gpu", True

    def alloc(self, nbytes: int, label: str) -> Buffer:
        return Buffer(nbytes, label, Account())

    def write(self, tensor, data) -> None:
        pass

    def load(self, jobs, sums=False):
        self.jobs = jobs


def jobs_of(path, **options):
    """(first byte, end, job) of all that a load writes into the weights, in order. options: of plan_model()."""
    device = Asked()
    with open_model(path) as source:
        plan = plan_model(source, family="gpu", **options)
        buffer = device.alloc(sum(plan.memory_bytes.values()), "weights")
        model_load.Loader(device, plan, *model_load.place(plan, buffer)).load_gpu()
    outputs = [(tensor, job.field) for job in device.jobs for tensor in job.args.values()]
    return sorted(
        (t.offset, t.offset + t.nbytes, field) for t, field in outputs if getattr(t, "buffer", None) is buffer
    )


@pytest.mark.parametrize("family", [*tiny_families.FAMILIES, "gpt_oss"])
def test_no_two_jobs_write_the_same_bytes(family, tmp_path):
    """Jobs end in any order, and a GPU is sent all bytes of an output: biases of gpt-oss's experts, tensors of one each,
    were sent as large as all of them, so that what came last stood over others and over the final norm."""
    if family == "gpt_oss":
        path = test_gpt_oss.write_folder(tmp_path, "MXFP4")
    else:
        path = tiny_families.write(family, tmp_path, "BF16")
    for options in ({}, dict(quantize="int8"), dict(rank=1, ranks=2)):
        with suppress(UnsupportedError) if "rank" in options else nullcontext():
            jobs = jobs_of(str(path), **options)
            assert len(jobs) > 4
            assert not [pair for pair in pairwise(jobs) if pair[1][0] < pair[0][1]]
