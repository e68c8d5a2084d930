import msgspec
import pytest

from zse.cache.groups import PageGeometry
from zse.cli.options import words_of
from zse.engine.config import EngineConfig, resolve, settle
from zse.errors import ConfigError

GIB = 1 << 30


BLOCK_BYTES = 16 * 11520 * 2  # SmolLM2 in f16


def resolved(model_context=8192, block_bytes=BLOCK_BYTES, memory=8 * GIB, **options):
    config = EngineConfig(model="m.gguf", **options)
    return resolve(
        config,
        settle(config, "cpu"),
        device="cpu",
        model_context=model_context,
        block_bytes=block_bytes,
        threads=2,
        memory_bytes=memory,
    )


def test_settings_by_family():
    config = EngineConfig(model="m")
    cpu, gpu = settle(config, "cpu"), settle(config, "gpu", weight_bytes=4 * GIB, token_bytes=lambda: 60_000)
    assert (cpu.max_rows, cpu.max_tokens_per_step, cpu.activations, cpu.kv_dtype) == (64, 256, "int8", "f16")
    assert (gpu.max_rows, gpu.max_tokens_per_step, gpu.activations, gpu.kv_dtype) == (64, 2048, "fp8", "bf16")
    # 4 % of the weights, from 512 to 2048 tokens.
    assert settle(config, "gpu", weight_bytes=1, token_bytes=lambda: 60_000).max_tokens_per_step == 512
    assert settle(config, "gpu", weight_bytes=1 << 40, token_bytes=lambda: 60_000).max_tokens_per_step == 2048
    assert settle(EngineConfig(model="m", max_rows=600), "gpu").max_tokens_per_step == 600
    assert settle(EngineConfig(model="m", max_rows=300), "cpu").max_tokens_per_step == 300
    assert settle(EngineConfig(model="m", max_tokens_per_step=4), "cpu").max_rows == 4
    for values, family in (
        ({"activations": "int8"}, "gpu"),
        ({"kv_dtype": "f16"}, "gpu"),
        ({"kv_dtype": "bf16"}, "cpu"),
    ):
        with pytest.raises(ConfigError, match="is not for this device"):
            settle(EngineConfig(model="m", **values), family)
    for kv_dtype in ("int8", "fp8"):
        assert {settle(EngineConfig(model="m", kv_dtype=kv_dtype), family).kv_dtype for family in ("cpu", "gpu")} == {
            kv_dtype
        }


def test_auto_takes_the_models_context_for_every_row():
    config = resolved(max_rows=8)
    assert (config.max_context, config.num_pages, config.threads) == (8192, 8 * 512, 2)
    assert config.kv_bytes == 8 * 512 * BLOCK_BYTES
    assert "num_pages=4096" in config.describe()


def test_the_cache_keeps_to_a_quarter_of_the_memory_but_holds_one_context():
    config = resolved(memory=4 * GIB)
    assert config.max_context == 8192 and config.kv_bytes <= GIB < config.kv_bytes + BLOCK_BYTES
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
        resolved(num_pages=1 << 22, block_bytes=16 * 16875 * 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 0),
        ("threads", "2"),
        ("max_context", 1),
        ("max_rows", 0),
        ("max_rows", True),
        ("num_pages", -1),
        ("max_tokens_per_step", 0),
        ("activations", "int4"),
        ("device", "gpu"),
        ("device", "cuda:x"),
        ("kv_dtype", "f64"),
        ("page_size", 8),
        ("page_size", 48),
        ("page_size", "auto"),
        ("page_size", True),
        ("kv_layout", "pages"),
        ("max_waiting", 0),
        ("max_memory", 0),
    ],
)
def test_bad_values_name_their_field(name, value):
    with pytest.raises(ConfigError, match=name):
        EngineConfig(model="m", **{name: value})


@pytest.mark.parametrize(
    ("context", "size"),
    [(2, 16), (8192, 16), (8193, 32), (32768, 32), (32769, 64), (131072, 64), (131073, 128), (1 << 20, 128)],
)
def test_pages_grow_with_the_context(context, size):
    config = resolved(model_context=context, block_bytes=1 << 10, max_rows=4)
    assert (config.page_size, config.max_context, config.num_pages) == (size, context, 4 * -(-context // size))
    assert config.kv_bytes == config.num_pages * size // 16 * 1024
    for other in (16, 32, 64, 128):  # what is asked for is taken
        assert resolved(model_context=context, block_bytes=1 << 10, page_size=other).page_size == other


def test_the_option_of_the_page_size():
    from argparse import ArgumentTypeError

    from zse.cli.main import parser_of
    from zse.cli.serve import _engine_arguments

    parser = parser_of("serve")
    for text, size in (("auto", 0), ("16", 16), ("128", 128)):
        args = parser.parse_args(["--page-size", text])
        assert EngineConfig.from_arguments(_engine_arguments(args, "m")).page_size == size
    option = next(action for action in parser._actions if action.dest == "page_size")
    for text in ("0", "8", "48", "256", "", "large"):
        with pytest.raises(ArgumentTypeError, match="is not auto, 16, 32, 64 or 128"):
            option.type(text)


def test_pages_stay_small_in_a_small_pool():
    """A request for each of 64 rows wastes half a page: at most 2 % of the pool."""
    for pages, size in ((64 * 25 * 8, 128), (64 * 25 * 8 - 8, 64), (64 * 25 * 4 - 4, 32), (64 * 25 * 2 - 2, 16)):
        config = resolved(
            model_context=1 << 20,
            max_context=200_000 if pages * 16 > 200_000 else None,
            num_pages=pages,
            block_bytes=1024,
        )
        assert config.num_pages * config.page_size == 16 * pages and config.kv_bytes == 1024 * pages
        expected = size if config.max_context > 131072 else min(size, 64 if config.max_context > 32768 else 32)
        assert config.page_size == expected, pages
    assert resolved(model_context=131072, memory=8 * GIB, block_bytes=1 << 21, max_rows=64).page_size == 16


def test_pages_stay_small_beside_a_window():
    def size(window: int, **options) -> int:
        def geometry(page_size: int) -> PageGeometry:
            return PageGeometry(5, window, -(-(window + 255) // page_size) + 1, page_size=page_size)

        config = EngineConfig(model="m", max_rows=4, **options)
        return resolve(
            config,
            settle(config, "cpu"),
            device="cpu",
            model_context=131072,
            block_bytes=1024,
            threads=1,
            memory_bytes=64 * GIB,
            geometry=geometry,
        ).page_size

    assert [size(window) for window in (512, 1023, 1024, 2048, 4096)] == [16, 16, 32, 64, 64]
    assert size(512, page_size=128) == 128


def test_num_pages_has_one_meaning_in_every_page_size():
    """Pages of 16 tokens: the memory that it asks for does not depend on --page-size."""
    for size in (16, 32, 64, 128):
        config = resolved(num_pages=80, page_size=size, block_bytes=1000)
        assert (config.max_context, config.num_pages, config.kv_bytes) == (1280, 1280 // size, 80_000)
    assert resolved(num_pages=83, page_size=64).max_context == 20 * 64
    with pytest.raises(ConfigError, match="num_pages 10 holds 128 tokens in pages of 64, less than max_context 160"):
        resolved(num_pages=10, page_size=64, max_context=160)
    with pytest.raises(ConfigError, match="num_pages 7 is too few: this model needs 8 for a token in pages of 128"):
        resolved(num_pages=7, page_size=128)
    # Auto takes no size in which the context does not fit.
    config = resolved(model_context=1 << 20, num_pages=2501, max_context=40016, max_rows=1)
    assert config.page_size == 16 and config.num_pages == 2501
    assert resolved(model_context=1 << 20, num_pages=2500, max_context=40000, max_rows=1).page_size == 64


def test_host_memory_is_given_in_pages():
    config = resolved(page_size=64, block_bytes=1000, cache_host_memory=50_000)
    assert config.host_slots == 12 and config.policy.page_transfer_s > 0
    assert resolved(page_size=64, cache_disk="/x").host_slots == 2048 // 64


def test_rows_must_fit_a_step():
    with pytest.raises(ConfigError, match="below max_rows 8"):
        EngineConfig(model="m", max_tokens_per_step=4, max_rows=8)


def test_arguments_round_trip():
    for config in (
        EngineConfig(model="a b.gguf"),
        EngineConfig(model="m", threads=3, max_context=77, num_pages=9, activations="f32", kv_dtype="f32"),
        EngineConfig(model="m", device="cuda:1", max_memory=5 << 30, page_size=64),
    ):
        assert EngineConfig.from_arguments(words_of(msgspec.structs.asdict(config))) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model"], "--model needs a value"),
        (["--modle", "x"], "unknown engine option --modle; known: --model, "),
        (["--threads", "2"], "--model is missing"),
        (["--model", "m", "--threads", "two"], "'two' is not a whole number"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_arguments(arguments)


def test_every_field_is_an_option_of_zse_serve():
    """Named in `zse serve --help`, handed to the engine, with the engine's own default."""
    from zse.cli.main import parser_of
    from zse.cli.serve import _engine_arguments

    parser = parser_of("serve")
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
