"""Towers against transformers' image features."""

import json

import numpy as np
import pytest
import tiny_deepseek_vl2
import tiny_vision as tiny
import tiny_vision_gguf

from zse.engine.image_encoder import ImageEncoder
from zse.errors import FormatError, UnsupportedError
from zse.formats.opening import open_model
from zse.models.vision.load import plan_tower
from zse.models.vision.tower import TowerReader
from zse.models.weight_plan import read_config
from zse.runtime.opening import open_device

REFERENCES = np.load(tiny.PATH)


def embeddings(source, beside=None, *, quantize=None, family: str = "gemma3") -> list[np.ndarray]:
    """Of two images."""
    plan = plan_tower(source, beside, read_config(source), quantize=quantize, family="cpu")
    assert plan is not None
    device = open_device("cpu", threads=2)
    encoder = ImageEncoder(device, plan, kv_dtype="f32")
    try:
        encoder.load()
        found = []
        for number in range(2):
            height, width, pixels = tiny.image(family, number)
            *between, last = encoder.encode(pixels, height, width)
            assert set(between) == {None} and len(between) == plan.forward.config.num_layers + 2
            found.append(last)
        return found
    finally:
        encoder.close()
        device.close()


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_embeddings_equal_transformers(family, tmp_path):
    """Sums of some hundred f32 products in another order, through three layers."""
    with open_model(str(tiny.write(family, tmp_path))) as source:
        for number, found in enumerate(embeddings(source, family=family)):
            np.testing.assert_allclose(found, REFERENCES[f"{family} image {number}"], rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize(
    ("family", "swapped"), [("gemma3", True), *((family, False) for family in tiny_vision_gguf.KINDS)]
)
def test_an_mmproj_file_gives_the_same(family, swapped, tmp_path):
    """Old converters wrote ffn_up and ffn_down under each other's names."""
    text, tower = tiny_vision_gguf.write_gguf(tmp_path, family, swapped)
    text = text if family in tiny_vision_gguf.TEXT else tiny.write(family, tmp_path)
    with open_model(str(text)) as source, open_model(str(tower)) as beside:
        for number, found in enumerate(embeddings(source, beside, family=family)):
            np.testing.assert_allclose(found, REFERENCES[f"{family} image {number}"], rtol=1e-4, atol=3e-5)


def test_fewer_bits_are_near(tmp_path):
    """f16 of a file, and int8 made while loading, through three layers."""
    text, tower = tiny_vision_gguf.write_gguf(tmp_path, kind="F16")
    wanted = REFERENCES["gemma3 image 0"][0]
    with open_model(str(text)) as source, open_model(str(tower)) as beside:
        for quantize, most in ((None, 0.01), ("int4", 0.1)):
            found = embeddings(source, beside, quantize=quantize)[0][0]
            assert np.abs(found - wanted).max() < most * np.abs(wanted).max()


@pytest.mark.parametrize("family", ["mistral3", "qwen2_5_vl", "qwen3_vl", "gemma4_moe", "deepseek_vl2"])
def test_int8_is_near(family, tmp_path):
    """Heads of 16 and 24 columns are 32 wide: what attention gives is quantized by 32."""
    with open_model(str(tiny.write(family, tmp_path))) as source:
        wanted = REFERENCES[f"{family} image 1"]
        found = embeddings(source, quantize="int8", family=family)[1]
        assert np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(position_embedding_size=100), "position_embedding_size.*100 rows and columns.*210"),
        (dict(head_dim=48), "head_dim"),
        (dict(standardize=True), "std_bias.*missing"),
        (dict(num_hidden_layers=4), "layers.3.input_layernorm.weight.*missing"),
    ],
)
def test_what_gemma4_cannot_be_is_refused(changes, reason, tmp_path):
    folder = tiny.write("gemma4", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with open_model(str(folder)) as source, pytest.raises(FormatError, match=reason):
        plan_tower(source, None, read_config(source), quantize=None, family="cpu")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [(dict(output_proj_dims=32), "output_proj_dims"), (dict(mm_posemb_size=60), "mm_posemb_size.*60 rows")],
)
def test_what_gemma4_unified_cannot_be_is_refused(changes, reason, tmp_path):
    folder = tiny.write("gemma4_unified", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with open_model(str(folder)) as source, pytest.raises(FormatError, match=reason):
        plan_tower(source, None, read_config(source), quantize=None, family="cpu")


@pytest.mark.exhaustive("beside PyTorch")
def test_six_tiles_of_deepseek(tmp_path):
    """Two rows of three, of other images than those of the references."""
    torch = pytest.importorskip("torch")
    height, width = 56, 84
    folder = tiny.write("deepseek_vl2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["candidate_resolutions"].append([width, height])
    (folder / "config.json").write_text(json.dumps(config))
    state = {name: torch.from_numpy(values) for name, values in tiny.weights("deepseek_vl2").items()}
    with open_model(str(folder)) as source, open_device("cpu", threads=2) as device:
        plan = plan_tower(source, None, read_config(source), quantize=None, family="cpu")
        assert plan is not None
        count = 3 * plan.vision.num_pixels(height, width)
        encoder = ImageEncoder(device, plan, kv_dtype="f32")
        encoder.load()
        pixels = np.random.default_rng().integers(0, 256, count, np.uint8).tobytes()
        *_, found = encoder.encode(pixels, height, width)
        encoder.close()
        mean, std = plan.vision.mean, plan.vision.std
    wanted = tiny_deepseek_vl2.embedded(state, pixels, height, width, mean, std)
    np.testing.assert_allclose(found[0], wanted.numpy(), rtol=1e-4, atol=3e-5)


def test_what_deepseek_s_processor_config_says(tmp_path):
    """Its folders have no preprocessor_config.json."""
    folder = tiny.write("deepseek_vl2", tmp_path)
    (folder / "preprocessor_config.json").unlink()
    about = {"candidate_resolutions": [[28, 28]], "image_mean": [0.25, 0.5, 0.75], "image_std": [0.5, 0.25, 0.5]}
    (folder / "processor_config.json").write_text(json.dumps(about))
    with open_model(str(folder)) as source:
        assert source.architecture == "DeepseekVLV2ForCausalLM"
        plan = plan_tower(source, None, read_config(source), quantize=None, family="cpu")
    assert plan is not None and plan.vision.mean == (0.25, 0.5, 0.75) and plan.vision.std == (0.5, 0.25, 0.5)
    assert len(plan.vision.tilings) == 4 and plan.vision.fill == (63, 127, 191)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(vision_config=dict(class_token=True)), "class_token"),
        (dict(projector_config=dict(projector_type="linear")), "projector_type"),
        (dict(projector_config=dict(input_dim=64)), "input_dim: 64, the tower has 96"),
        (dict(projector_config=dict(n_embed=96)), "projector.layers.0.*|projection"),
    ],
)
def test_what_deepseek_cannot_be_is_refused(changes, reason, tmp_path):
    folder = tiny.write("deepseek_vl2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for name, values in changes.items():
        config[name] |= values
    (folder / "config.json").write_text(json.dumps(config))
    with open_model(str(folder)) as source, pytest.raises(FormatError, match=reason):
        plan_tower(source, None, read_config(source), quantize=None, family="cpu")


def test_bounds_that_leave_out_the_zeros_behind_a_head_are_refused(monkeypatch, tmp_path):
    """Heads of 16 columns are 64 wide on a GPU."""
    plain = tiny.weights

    def above_zero(family, named=None):
        found = plain(family, named)
        name = next(name for name in found if name.endswith("layers.1.self_attn.k_proj.output_min"))
        return found | {name: np.float32(0.125)}

    monkeypatch.setattr(tiny, "weights", above_zero)
    with open_model(str(tiny.write("gemma4", tmp_path))) as source:
        for family, refused in (("cpu", False), ("gpu", True)):
            plan = plan_tower(source, None, read_config(source), quantize=None, family=family)
            assert plan is not None
            reader = TowerReader(source, type(plan.forward))
            (weight,) = (each for each in plan.forward.weights("hf") if each.name == "layers.1.k_bounds")
            if refused:
                with pytest.raises(FormatError, match="layers.1.self_attn.k_proj.output_min.*leave out 0"):
                    reader.read(weight)
            else:
                assert reader.read(weight)[2] == np.float32(0.125)


def test_a_tower_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "hf").mkdir()
    text, _ = tiny_vision_gguf.write_gguf(tmp_path)
    changed = {"clip.projector_type": ("string", "ldp"), "clip.vision.block_count": ("u32", 4)}
    reasons = {"clip.projector_type": "ldp", "clip.vision.block_count": "v.blk.3.ln1.weight.*missing"}
    for key, reason in reasons.items():
        _, tower = tiny_vision_gguf.write_gguf(tmp_path, **{key: changed[key]})
        with open_model(str(text)) as source, open_model(str(tower)) as beside:
            with pytest.raises((FormatError, UnsupportedError), match=reason):
                plan_tower(source, beside, read_config(source), quantize=None, family="cpu")
    with open_model(str(tiny.write("gemma3", tmp_path / "hf"))) as source:
        name = next(name for name in source.tensors if name.endswith("layers.1.mlp.fc1.bias"))
        source.tensors[name] = source.tensors[name]._replace(shape=(103,))
        with pytest.raises(FormatError, match=r"fc1.bias.*\[103\], expected \[104\]"):
            plan_tower(source, None, read_config(source), quantize=None, family="cpu")
        del source.tensors[name]
        with pytest.raises(FormatError, match="fc1.bias.*missing"):
            plan_tower(source, None, read_config(source), quantize=None, family="cpu")
