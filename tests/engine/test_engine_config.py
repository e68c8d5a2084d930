import pytest

from zse.engine.config import EngineConfig, resolve, settle
from zse.errors import ConfigError

GIB = 1 << 30


PAGE_BYTES = 16 * 11520 * 2   # SmolLM2 in f16


def resolved(model_context=8192, page_bytes=PAGE_BYTES, memory=8 * GIB, **options):
    config = EngineConfig(model="m.gguf", **options)
    return resolve(config, settle(config, "cpu"), device="cpu", model_context=model_context, page_bytes=page_bytes,
                   threads=2, memory_bytes=memory)


def test_settings_by_family():
    config = EngineConfig(model="m")
    cpu, gpu = settle(config, "cpu"), settle(config, "gpu", weight_bytes=4 * GIB, token_bytes=60_000)
    assert (cpu.max_rows, cpu.max_tokens_per_step, cpu.activations, cpu.kv_dtype) == (64, 256, "int8", "f16")
    assert (gpu.max_rows, gpu.max_tokens_per_step, gpu.activations, gpu.kv_dtype) == (64, 2048, "bf16", "bf16")
    # 4 % of the weights, from 512 to 2048 tokens.
    assert settle(config, "gpu", weight_bytes=1, token_bytes=60_000).max_tokens_per_step == 512
    assert settle(config, "gpu", weight_bytes=1 << 40, token_bytes=60_000).max_tokens_per_step == 2048
    assert settle(EngineConfig(model="m", max_rows=600), "gpu").max_tokens_per_step == 600
    assert settle(EngineConfig(model="m", max_rows=300), "cpu").max_tokens_per_step == 300
    assert settle(EngineConfig(model="m", max_tokens_per_step=4), "cpu").max_rows == 4
    for values, family in (({"activations": "int8"}, "gpu"), ({"kv_dtype": "f16"}, "gpu"),
                           ({"kv_dtype": "bf16"}, "cpu")):
        with pytest.raises(ConfigError, match="is not for this device"):
            settle(EngineConfig(model="m", **values), family)
    for kv_dtype in ("int8", "fp8"):
        assert {settle(EngineConfig(model="m", kv_dtype=kv_dtype), family).kv_dtype for family in ("cpu", "gpu")} == {kv_dtype}


def test_auto_takes_the_models_context_for_every_row():
    config = resolved(max_rows=8)
    assert (config.max_context, config.num_pages, config.threads) == (8192, 8 * 512, 2)
    assert config.kv_bytes == 8 * 512 * PAGE_BYTES
    assert "num_pages=4096" in config.describe()


def test_the_cache_keeps_to_a_quarter_of_the_memory_but_holds_one_context():
    config = resolved(memory=4 * GIB)
    assert config.max_context == 8192 and config.kv_bytes <= GIB < config.kv_bytes + PAGE_BYTES
    config = resolved(memory=512 << 20)
    assert config.max_context < 8192 and config.num_pages * 16 == config.max_context
    assert resolved(memory=512 << 20, max_context=8192).num_pages == 512


def test_given_pages_bound_the_context():
    assert resolved(num_pages=10).max_context == 160
    with pytest.raises(ConfigError, match="num_pages 10 holds 160 tokens, less than max_context 161"):
        resolved(num_pages=10, max_context=161)


def test_refusals():
    with pytest.raises(ConfigError, match="more than this model's context of 8192"):
        resolved(max_context=9000)
    with pytest.raises(ConfigError, match="takes 2160000 MiB, this machine has 8192 MiB"):
        resolved(num_pages=1 << 22, page_bytes=16 * 16875 * 2)


@pytest.mark.parametrize(("name", "value"), [
    ("threads", 0), ("threads", "2"), ("max_context", 1), ("max_rows", 0), ("max_rows", True), ("num_pages", -1),
    ("max_tokens_per_step", 0), ("activations", "int4"), ("device", "gpu"), ("device", "cuda:x"),
    ("kv_dtype", "f64"), ("kv_layout", "pages"), ("max_waiting", 0), ("max_memory", 0)])
def test_bad_values_name_their_field(name, value):
    with pytest.raises(ConfigError, match=name):
        EngineConfig(model="m", **{name: value})


def test_rows_must_fit_a_step():
    with pytest.raises(ConfigError, match="below max_rows 8"):
        EngineConfig(model="m", max_tokens_per_step=4, max_rows=8)


def test_arguments_round_trip():
    for config in (EngineConfig(model="a b.gguf"),
                   EngineConfig(model="m", threads=3, max_context=77, num_pages=9, activations="f32", kv_dtype="f32"),
                   EngineConfig(model="m", device="cuda:1", max_memory=5 << 30)):
        assert EngineConfig.from_arguments(config.to_arguments()) == config


@pytest.mark.parametrize(("arguments", "message"), [
    (["--model"], "--model needs a value"), (["--modle", "x"], "unknown engine option --modle; known: --model, "),
    (["--threads", "2"], "--model is missing"), (["--model", "m", "--threads", "two"], "'two' is not a whole number")])
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_arguments(arguments)


def test_every_field_is_an_option_of_zse_serve():
    """Named in `zse serve --help`, handed to the engine, with the engine's own default."""
    from zse.cli.parser import Parser
    from zse.cli.serve import _engine_arguments, add_arguments

    parser = Parser(prog="zse serve")
    add_arguments(parser)
    args = parser.parse_args([])
    config = EngineConfig.from_arguments(_engine_arguments(args, "m"))
    # The server bounds the queued tokens by itself, before they are tokens (--max-queue-tokens).
    renamed = {"max_waiting": "max_queue", "max_waiting_tokens": "max_queue_tokens", "model": "models"}
    text = parser.format_help()
    for name in EngineConfig.__struct_fields__:
        option = renamed.get(name, name)
        assert hasattr(args, option), name
        words = {word for action in parser._actions if action.dest == option for word in action.option_strings}
        assert name == "model" or words and all(word in text for word in words), name
        if name not in renamed:
            assert getattr(config, name) == getattr(EngineConfig(model="m"), name), name


def test_contiguous_rows_have_no_prefix_cache():
    config = resolved(kv_layout="contiguous", max_rows=2)
    assert not config.prefix_cache and config.kv_layout == "contiguous" and config.num_pages == 2 * 512
    assert resolved().prefix_cache
    with pytest.raises(ConfigError, match="cache_disk keeps the prefix cache"):
        resolved(kv_layout="contiguous", cache_disk="/x")


def test_grammars_are_warm_beside_large_weights():
    config = EngineConfig(model="m")
    assert not settle(config, "cpu", weight_bytes=100 << 20).warm_grammars
    assert settle(config, "cpu", weight_bytes=2 << 30).warm_grammars
    for wanted in (True, False):
        chosen = EngineConfig(model="m", warm_grammars=wanted)
        assert settle(chosen, "gpu", weight_bytes=2 << 30).warm_grammars is wanted


def test_masks_are_lazy_where_steps_do_not_run_ahead():
    config = EngineConfig(model="m")
    assert settle(config, "cpu").lazy_masks and not settle(config, "gpu").lazy_masks
    assert not settle(EngineConfig(model="m", lazy_masks=False), "cpu").lazy_masks
    with pytest.raises(ConfigError, match="no-lazy-masks"):
        settle(EngineConfig(model="m", lazy_masks=True), "gpu")
