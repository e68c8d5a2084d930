"""`zse serve` of a model whose chat template is refused: completions are served, a chat is a 400 that says why."""

import json
import sys
from pathlib import Path

import pytest
from test_embedding_models import serve
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from zse.errors import FormatError
from zse.formats.opening import open_model
from zse.tokenizer import chat_template
from zse.tokenizer.load import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import tiny_model  # noqa: E402

REFUSED = "{% import 'os' as os %}{{ os.name }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = Path(tiny_model.write(tmp_path_factory.mktemp("refused")))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: tiny_model.VOCAB - 3]
    tokens = {token: id for id, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    made = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": REFUSED}))
    return path


@pytest.fixture(scope="module")
def client(folder):
    yield from serve(folder)


def test_completions_are_served(client):
    answer = client.post("/v1/completions", prompt="abc", max_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3


def test_a_chat_is_told_why(client):
    error = client.refused("/v1/chat/completions", messages=[{"role": "user", "content": "abc"}])
    assert error["code"] == "no_chat_template" and "import" in error["message"]
    assert "/v1/completions" in error["message"] and "chat_template" not in error["message"]


def test_what_the_command_line_says_names_both_ways(folder):
    with open_model(folder) as source, pytest.raises(FormatError, match=r"zse run --raw, and /v1/completions"):
        chat_template.load_chat_template(source, load_tokenizer(source))
