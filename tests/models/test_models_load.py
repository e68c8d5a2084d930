"""The loader: row orders, added ones, mixed types, joined matrices, memory plan, refusals."""

import numpy as np
import numpy_model
import pytest
import tiny
from formats_build import Tensor as GGUFTensor
from formats_build import gguf, split_gguf
from session import Session, load

from zse.errors import ConfigError, FormatError, UnsupportedError
from zse.formats.gguf_blocks import dequantize
from zse.formats.opening import open_model
from zse.models import registry
from zse.models.load import plan_model, read_config, require_memory
from zse.models.registry import config_from_hf

ROPE_FREQS = "rope_freqs.weight"
TYPES = {"gemma3": {"q": "Q5_0", "k": "Q5_0", "v": "Q8_0", "o": "Q4_1", "gate": "Q4_0", "up": "Q5_1", "down": "Q8_0"}}


def gguf_of(family: str, tmp_path, types=None, extra=(), drop=(), metadata=(), parts=1, arch=None):
    """A GGUF file of a tiny model as llama.cpp's converter writes it (of several parts the first), and its weights by role as
    stored in it.

    types: role → tensor type; quantized tensors get random blocks instead of the model's weights."""
    config = config_from_hf("config.json", tiny.config(family))
    arch = arch or {"mistral": "llama"}.get(config.architecture, config.architecture)
    by_role, tensors = tiny.by_role(family, config), []
    model = registry.architecture(config.architecture)
    for role in model.roles(config):
        values, short = by_role[role.name], role.name.rpartition(".")[2]
        type = (types or {}).get(short, "F32")
        shape, data = values.shape, None
        if type == "F32":
            stored = values
            if arch == "llama" and role.heads:
                rest = values.shape[1:]
                stored = values.reshape(role.heads, 2, config.head_dim // 2, *rest).swapaxes(1, 2).reshape(values.shape)
            data = np.ascontiguousarray(stored, np.float32).tobytes()
        tensor = GGUFTensor(model.gguf_name(role.name), type, shape, data)
        if type != "F32":
            assert arch != "llama"
            by_role[role.name] = dequantize(type, bytes(tensor.data), shape) * np.float32(0.01)
        if tensor.name not in drop:
            tensors.append(tensor)
    keys = [("general.architecture", "string", arch)] + [
        (f"{arch}.{key}", type, value)
        for key, type, value in (
            ("block_count", "u32", config.num_layers),
            ("context_length", "u32", config.max_context),
            ("embedding_length", "u32", config.hidden_size),
            ("feed_forward_length", "u32", config.intermediate_size),
            ("attention.head_count", "u32", config.num_heads),
            ("attention.head_count_kv", "u32", config.num_kv_heads),
            ("attention.key_length", "u32", config.head_dim),
            ("attention.value_length", "u32", config.head_dim),
            ("attention.layer_norm_rms_epsilon", "f32", config.norm_eps),
            ("rope.freq_base", "f32", config.rope.theta),
            ("attention.sliding_window", "u32", config.sliding_window),
        )
    ]
    keys += [("tokenizer.ggml.bos_token_id", "u32", 1), ("tokenizer.ggml.eos_token_id", "u32", 2), *metadata]
    paths = [tmp_path / f"{family}-{number:05d}-of-{parts:05d}.gguf" for number in range(1, parts + 1)]
    made = split_gguf(parts, 1, keys, [*tensors, *extra]) if parts > 1 else [gguf(keys, [*tensors, *extra])]
    for path, data in zip(paths, made, strict=True):
        path.write_bytes(bytes(data))
    return str(paths[0]), config, by_role


@pytest.mark.parametrize(
    ("family", "arch"),
    [("llama", None), ("qwen2", None), ("mistral", None), ("gemma3", None), ("qwen2", "qwen2vl"), ("qwen3", "qwen3vl")],
)
def test_gguf_gives_the_logits_of_safetensors(family, arch, device, tmp_path):
    """Permuted q and k rows (llama), norms that hold their +1 (gemma3), biases (qwen2), the window pattern (gemma3).
    query_pre_attn_scalar is not in a GGUF, so Gemma's differs from the directory's."""
    path, config, by_role = gguf_of(family, tmp_path, arch=arch)
    model = load(device, path)
    assert model.config.sliding_layers == config.sliding_layers and model.config.local_rope == config.local_rope
    expected = numpy_model.forward(model.config, by_role, tiny.tokens(family))
    np.testing.assert_allclose(Session(device, model).run(tiny.tokens(family)), expected, rtol=2e-5, atol=5e-5)


def test_a_matrix_may_be_made_of_several_parts_of_a_gguf(device, tmp_path):
    path, config, by_role = gguf_of("qwen2", tmp_path, parts=7)
    model = load(device, path)
    with open_model(path) as source:
        plan = plan_model(source)
        assert any(len({part.info.file.path for part in matrix.parts}) > 1 for matrix in plan.matrices)
    expected = numpy_model.forward(model.config, by_role, tiny.tokens("qwen2"))
    np.testing.assert_allclose(Session(device, model).run(tiny.tokens("qwen2")), expected, rtol=2e-5, atol=5e-5)


def test_rope_freqs_tensor_is_llama3_scaling(device, tmp_path):
    scaled = config_from_hf("config.json", tiny.config("llama3"))
    plain = np.array(scaled.rope.theta ** (-np.arange(0, scaled.head_dim, 2) / scaled.head_dim))
    factors = (plain / np.array(scaled.rope.inv_freq(scaled.head_dim))).astype(np.float32)
    extra = [GGUFTensor(ROPE_FREQS, "F32", (scaled.head_dim // 2,), factors.tobytes())]
    path, config, by_role = gguf_of("llama3", tmp_path, extra=extra)
    model = load(device, path)
    np.testing.assert_allclose(model.config.rope.inv_freq(32), scaled.rope.inv_freq(32), rtol=1e-6)
    expected = numpy_model.forward(scaled, by_role, tiny.tokens("llama3"))
    np.testing.assert_allclose(Session(device, model).run(tiny.tokens("llama3")), expected, rtol=2e-5, atol=5e-5)


def test_every_part_of_a_fused_matrix_is_where_it_belongs(device, tmp_path):
    model = load(device, str(tiny.write("qwen2", tmp_path)))
    weights = tiny.by_role("qwen2", model.config)
    for name, roles in (("qkv", "qkv"), ("gate_up", ("gate", "up"))):
        rows = np.concatenate([weights[f"layers.1.{role}"] for role in roles])
        plane = model.weights[f"layers.1.{name}"].planes["w"]
        stored = np.frombuffer(plane.view(), np.float32).reshape(plane.shape)
        np.testing.assert_array_equal(stored.transpose(0, 2, 1).reshape(-1, rows.shape[1])[: len(rows)], rows)
    bias = np.concatenate([weights[f"layers.1.{role}_bias"] for role in "qkv"])
    np.testing.assert_array_equal(np.array(model.vectors["layers.1.qkv_bias"].view(), np.float32), bias)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_files_stay_as_they_are(dtype, device, tmp_path):
    model = load(device, str(tiny.write("llama", tmp_path, dtype)))
    assert {weight.scheme.dtype for weight in model.weights.values()} == {dtype.lower()}
    weights = tiny.by_role("llama", model.config)
    for name, values in weights.items():
        narrow = (
            values.astype(np.float16)
            if dtype == "F16"
            else (tiny.to_bf16(values).astype(np.uint32) << np.uint32(16)).view(np.float32)
        )
        weights[name] = narrow.astype(np.float32)
    ids = tiny.tokens("llama")
    expected = numpy_model.forward(model.config, weights, ids)
    np.testing.assert_allclose(Session(device, model).run(ids), expected, rtol=2e-5, atol=5e-5)


def test_matrices_of_different_types_stay_apart(device, tmp_path):
    path, _, _ = gguf_of("gemma3", tmp_path, TYPES["gemma3"])
    model = load(device, path)
    assert {"layers.0.q", "layers.0.k", "layers.0.v", "layers.0.gate", "layers.0.up"} <= set(model.weights)
    assert not any(name.endswith(("qkv", "gate_up")) for name in model.weights)
    weights = {}
    with open_model(path) as source:
        family = registry.architecture(model.config.architecture)
        for role in family.roles(model.config):
            info = source.tensors[family.gguf_name(role.name)]
            weights[role.name] = dequantize(info.type, source.read(info), info.shape)
    ids = tiny.tokens("gemma3")
    expected = numpy_model.forward(model.config, weights, ids)
    np.testing.assert_allclose(Session(device, model).run(ids), expected, rtol=1e-4, atol=2e-4 * np.abs(expected).max())


def test_gemma3_text_model_has_no_prefix(device, tmp_path):
    """Saved from the bare Gemma3TextModel, the tensors' names start at the layers."""
    model = load(device, str(tiny.write("gemma3", tmp_path, prefix="")))
    np.testing.assert_array_equal(
        np.array(model.vectors["final_norm"].view(), np.float32),
        tiny.weights("gemma3")["model.norm.weight"] + np.float32(1),
    )


def test_memory_is_planned_to_the_byte(device, tmp_path):
    with open_model(str(tiny.write("llama", tmp_path))) as source:
        plan = plan_model(source)
        assert sum(plan.memory_bytes.values()) >= sum(values.nbytes for values in tiny.weights("llama").values())
        from zse.models.load import load_model

        model = load_model(device, plan)
        model.wait()
        assert model.buffer.nbytes == sum(plan.memory_bytes.values())
        with pytest.raises(ConfigError, match="over --max-memory"):
            load_model(device, plan, max_memory=1 << 16)


def test_require_memory_names_the_parts():
    require_memory({"weights": 10, "kv cache": 10}, 20)
    require_memory({"weights": 1 << 60}, None)
    message = r"needs 30 MiB of memory \(layers 10 MiB, kv cache 20 MiB\), over --max-memory 25 MiB"
    with pytest.raises(ConfigError, match=message):
        require_memory({"layers": 10 << 20, "kv cache": 20 << 20}, 25 << 20)


def plan_of(path, **options):
    with open_model(path) as source:
        return plan_model(source, **options)


def test_missing_tensor_is_named(tmp_path):
    path, _, _ = gguf_of("llama", tmp_path, drop=["blk.1.ffn_up.weight"])
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_up\.weight: the tensor is missing"):
        plan_of(path)


def test_wrong_shape_is_named(tmp_path):
    extra = [GGUFTensor("output_norm.weight", "F32", (32,))]
    path, _, _ = gguf_of("llama", tmp_path, drop=["output_norm.weight"], extra=extra)
    with pytest.raises(FormatError, match=r"output_norm\.weight: has shape \[32\], expected \[64\]"):
        plan_of(path)


def test_bad_rope_freqs_are_refused(tmp_path):
    for values in (np.zeros(16, np.float32), np.full(16, np.nan, np.float32), np.ones(8, np.float32)):
        extra = [GGUFTensor(ROPE_FREQS, "F32", values.shape, values.tobytes())]
        path, _, _ = gguf_of("llama3", tmp_path, extra=extra)
        with (
            open_model(path) as source,
            pytest.raises(FormatError, match="rope_freqs|rope freq_factors: 8 values for 32"),
        ):
            read_config(source)


def test_quantizing_a_quantized_file_is_refused(tmp_path):
    types = dict.fromkeys(("embed", "q", "k", "v", "o", "gate", "up", "down"), "Q8_0")
    path, _, _ = gguf_of("gemma3", tmp_path, types)
    with pytest.raises(ConfigError, match="quantized already.*leave --quantize out"):
        plan_of(path, quantize="int4")


def test_unknown_quantization_lists_what_there_is(tmp_path):
    with pytest.raises(UnsupportedError, match="int4"):
        plan_of(str(tiny.write("llama", tmp_path)), quantize="int3")


def test_a_file_that_shrinks_while_loading_is_an_error(device, tmp_path):
    from zse.models.load import load_model

    path, _, _ = gguf_of("llama", tmp_path)
    with open_model(path) as source:
        plan = plan_model(source)
        with open(path, "r+b") as file:
            file.truncate(4096)
        with pytest.raises(FormatError):
            load_model(device, plan).wait()


def test_a_model_that_is_dropped_while_loading_stops_the_load(device, tmp_path):
    from zse.models.load import load_model

    with open_model(str(tiny.write("gemma3", tmp_path))) as source:
        plan = plan_model(source)
        model = load_model(device, plan)
        loading = model._loading
        del model
        assert loading._handle is None, "threads still write to memory that is gone"
