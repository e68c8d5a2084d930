def test_the_reply_is_streamed_with_the_given_options(zse):
    done = zse(
        "run",
        "echo",
        "hello",
        "there",
        "--temperature",
        "0",
        "--max-tokens=7",
        "--seed",
        "3",
        "--threads",
        "2",
        fake=True,
    )
    assert done.stdout == "<> turn 1, you said: hello there [t=0.0 n=7 seed=3 threads=2]\n" and done.stderr == ""


def test_system_and_raw(zse):
    assert zse("run", "echo", "hi", "--system", "be brief", fake=True).stdout.startswith(
        "<be brief> turn 1, you said: hi "
    )
    assert zse("run", "echo", "hi", "--raw", fake=True).stdout.startswith("raw: hi ")
    assert zse("run", "base", "hi", fake=True).stdout.startswith("raw: hi ")
    assert "exclude each other" in zse("run", "echo", "hi", "--raw", "--system", "x", code=2, fake=True).stderr
    assert "base model" in zse("run", "base", "hi", "--system", "x", code=2, fake=True).stderr


def test_the_form_of_the_reply(zse, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    for options, kind in (
        (["--json-schema", str(schema)], "json_schema"),
        (["--json-schema", "-"], "json_object"),
        (["--regex", "a+"], "regex"),
        (["--choice", "a", "--choice", "b"], "choice"),
    ):
        assert zse("run", "echo", "--raw", "hi", *options, fake=True).stdout.endswith(f" as {kind}\n")
    assert "not allowed with" in zse("run", "echo", "hi", "--regex", "a", "--choice", "b", code=2, fake=True).stderr
    assert "No such file" in zse("run", "echo", "hi", "--grammar", str(tmp_path / "none"), code=2, fake=True).stderr
    schema.write_text("{")
    assert "is not JSON" in zse("run", "echo", "hi", "--json-schema", str(schema), code=1, fake=True).stderr


def test_options_may_stand_anywhere(zse):
    for words in (["echo", "--raw", "a", "b"], ["--raw", "echo", "a", "b"], ["echo", "a", "--raw", "b"]):
        assert zse("run", *words, fake=True).stdout.startswith("raw: a b [")
    assert zse("run", "echo", "--raw", "--", "--seed", fake=True).stdout.startswith("raw: --seed [")
    assert zse("run", "echo", "-5 degrees", fake=True).stdout.startswith("<> turn 1, you said: -5 degrees [")


def test_standard_input_is_the_prompt_or_a_part_of_it(zse):
    assert "you said: from a pipe [" in zse("run", "echo", input="from a pipe\n", fake=True).stdout
    assert "you said: Sum:\n\ntext [" in zse("run", "echo", "Sum:", "-", input="text\n", fake=True).stdout
    assert "you said: only this [" in zse("run", "echo", "only this", input="ignored", fake=True).stdout
    assert "the prompt is empty" in zse("run", "echo", code=2, fake=True).stderr


def test_stats_go_to_stderr(zse):
    done = zse("run", "echo", "hi", "--stats", fake=True)
    for words in ("exec to first token", "tok/s", "peak memory", "model opened"):
        assert words in done.stderr
    assert "peak" not in done.stdout


def test_stop_texts_are_limited(zse):
    assert "at most 16" in zse("run", "echo", "hi", *["--stop", "x"] * 17, code=2, fake=True).stderr


def test_the_start_path_imports_nothing_heavy(zse, tmp_path):
    """asyncio, numpy and the like cost more than the model's first token."""
    import subprocess
    import sys
    from pathlib import Path

    from cli_process import ENVIRONMENT

    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport types, fake_llm\n"
        "m = types.ModuleType('zse.engine.llm'); m.LLM = fake_llm.EchoLLM; sys.modules['zse.engine.llm'] = m\n"
        "from zse.cli.main import main\nassert main(['run', 'echo', 'hi']) == 0\n"
        "heavy = "
        "{'numpy', 'asyncio', 'tokenizers', 'huggingface_hub', 'uvicorn', 'subprocess',"
        " 'zse.formats.hub', 'zse.formats.catalog',"
        " 'http.client', 'shutil', 'tempfile'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    import os

    subprocess.run([sys.executable, "-c", script], env={**ENVIRONMENT, "ZSE_HOME": os.environ["ZSE_HOME"]}, check=True)
