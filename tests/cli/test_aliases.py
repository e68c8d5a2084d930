"""Options by the names of vLLM, llama.cpp and infer."""

import pytest

from zse.cli import aliases, main, reference
from zse.errors import ConfigError


def options_of(command: str) -> set[str]:
    return {name for action in main.parser_of(command)._all_actions() for name in action.option_strings}


SERVE, RUN = options_of("serve"), options_of("run")


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("m.gguf --max-num-seqs 8 --port 1", "m.gguf --max-rows 8 --port 1"),
        ("m.gguf --max-num-batched-tokens=512", "m.gguf --max-tokens-per-step 512"),
        ("--port 1 -m m.gguf -c 4096 -ngl 99 -t 4", "m.gguf --port 1 --max-context 4096 --threads 4"),
        ("m -c 0 -ngl 0 -fa --port 1", "m --device cpu --port 1"),
        ("m -fa on -np 4 --alias x", "m --max-rows 4 --model-name x"),
        ("-hf org/name:Q4_K_M", "hf:org/name:Q4_K_M"),
        ("--model m --served-model-name x --dtype bfloat16", "m --model-name x --activations bf16"),
        ("m --kv-cache-dtype fp8 --block-size 32", "m --kv-dtype fp8 --page-size 32"),
        ("m --kv-cache-dtype fp8_e4m3 --swap-space 4", "m --kv-dtype fp8 --cache-host-memory 4G"),
        ("m --data-parallel-size 1 --enable-prefix-caching --enforce-eager", "m --no-graphs"),
        ("m -tp 2 --tensor-parallel-size 2", "m --tensor-parallel-size 2 --tensor-parallel-size 2"),
        ("m --quantization awq --no-enable-prefix-caching", "m --no-prefix-cache"),
        ("m --quantization fp8 --seed 1", None),
        ("m --dtype float16", None),
        ("m --trust-remote-code", None),
        ("m -ngl 20", None),
        ("m --max-batch-size 8 --kv-cache-backend paged --spec-length 3", "m --max-rows 8 --kv-layout paged --draft-tokens 3"),
        ("m --bogus -- -m x", "m --bogus -- -m x"),
    ],
)  # fmt: skip
def test_serve_takes_the_names_that_people_type(typed, ours):
    if ours is not None:
        assert aliases.translate(typed.split(), SERVE) == ours.split()
        return
    with pytest.raises(ConfigError, match="is not taken: ") as caught:
        aliases.translate(typed.split(), SERVE)
    assert "\n" not in str(caught.value)


def test_a_command_takes_the_names_that_it_has_options_for():
    assert aliases.translate(["m", "--temp", "0", "-n", "5", "-s", "1"], RUN) == [
        "m", "--temperature", "0", "--max-tokens", "5", "--seed", "1",
    ]  # fmt: skip
    assert aliases.translate(["m", "--max-num-seqs", "5"], RUN) == ["m", "--max-num-seqs", "5"]  # unknown there
    assert aliases.translate(["x", "-q"], options_of("pull")) == ["x", "-q"]
    assert aliases.translate(["x", "-m", "y"], options_of("rm")) == ["x", "-m", "y"]
    with pytest.raises(ConfigError, match="expected one argument"):
        aliases.translate(["m", "--max-num-seqs"], SERVE)


def test_the_parser_reads_them():
    args = main.parser_of("serve").parse_strict(["-m", "x.gguf", "--max-num-seqs", "7", "--no-enable-chunked-prefill"])
    assert args.models == ["x.gguf"] and args.max_rows == 7 and args.chunked_prefill is False
    args = main.parser_of("run").parse_strict(["hi", "-m", "x.gguf", "-c", "512"])
    assert args.model == "x.gguf" and args.prompt == ["hi"] and args.max_context == 512


def test_every_alias_becomes_options_that_serve_run_or_chat_have():
    known = SERVE | RUN
    for alias in aliases.ALIASES:
        assert aliases._fits(alias, known) or alias.why, alias.names
        assert alias.why or alias.becomes, alias.names
        assert not set(alias.names.split()) & SERVE, "an option of ours already"
        if alias.becomes:
            assert ("{}" in alias.becomes or "{}G" in alias.becomes) is not alias.is_flag
    assert set(aliases.SAME) <= SERVE
    every = [name for alias in aliases.ALIASES for name in alias.names.split()]
    assert len(every) == len(set(every))


def test_the_documentation_lists_them():
    page = reference.text()
    assert "## Names from other programs" in page
    for alias in aliases.ALIASES:
        for name in alias.names.split():
            assert f"`{name}`" in page
