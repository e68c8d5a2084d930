"""Token ids and text as llama.cpp makes them, for the two public models."""

import pytest

from zse.formats.opening import open_model
from zse.tokenizer.bpe import from_section
from zse.tokenizer.load import load_tokenizer

MODELS = ("smollm2", "gemma3-270m")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stored", [False, True], ids=["arrays", "section"])
def test_equal_to_llama_cpp(real_models, golden_cases, model, stored):
    tokenizer = load_tokenizer(open_model(real_models[model]))
    if stored:
        tokenizer = from_section(tokenizer.to_section())
    assert len(golden_cases[model]) >= 16
    for case in golden_cases[model]:
        assert tokenizer.encode(case["text"], special=True) == case["ids_special"], case["text"]
        assert tokenizer.encode(case["text"], add_bos=False) == case["ids_plain"], case["text"]
        assert tokenizer.decode(case["ids_plain"]) == case["detok_plain"]


@pytest.mark.parametrize("stored", [False, True], ids=["arrays", "section"])
def test_what_the_models_say(real_tokenizers, stored):
    smollm, gemma = real_tokenizers["smollm2"], real_tokenizers["gemma3-270m"]
    if stored:
        smollm, gemma = from_section(smollm.to_section()), from_section(gemma.to_section())
    assert (smollm.vocab_size, smollm.bos_id, smollm.eos_id, smollm.adds_bos) == (49152, 1, 2, False)
    assert smollm.eos_ids == {smollm.find("<|im_end|>"), smollm.find("<|endoftext|>")} == {2, 0}
    assert (gemma.vocab_size, gemma.bos_id, gemma.eos_id, gemma.adds_bos) == (262144, 2, 1, True)
    assert gemma.eos_ids == {gemma.find("<eos>"), gemma.find("<end_of_turn>")} == {1, 106}
    assert gemma.is_special(106) and not gemma.is_special(107) and gemma.token_bytes(107) == b"\n"
    assert smollm.text_of(smollm.bos_id) == "<|im_start|>"
    assert len(smollm.control_texts()) == 17 and len(gemma.control_texts()) == 6249


def test_gemma_equals_its_definition_on_random_texts(real_tokenizers, real_fields):
    """Merging the best-scored neighbours of the whole text one at a time, on the real 262k vocabulary."""
    import random

    fields = real_fields["gemma3-270m"]
    names = [token.decode() for token in fields["tokenizer.ggml.tokens"]]
    types = fields["tokenizer.ggml.token_type"].tolist()
    scores = fields["tokenizer.ggml.scores"].tolist()
    ids = {name: id for id, name in enumerate(names) if types[id] == 1}
    pool = random.Random(3)
    words = [names[pool.randrange(len(names))].replace("▁", " ") for _ in range(3000)]
    for _ in range(300):
        text = "".join(pool.choices(words, k=pool.randint(1, 6))).replace("<", "‹").replace("\n", "").replace("\t", "")
        text = "".join(part for part in text.replace("  ", " ").split("  "))
        if "  " in text or "[multimodal]" in text:
            continue
        parts = list(text.replace(" ", "▁"))
        while True:
            pairs = [
                (-scores[ids[a + b]], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in ids
            ]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        expected = []
        for part in parts:
            expected += [ids[part]] if part in ids else [238 + byte for byte in part.encode()]
        assert real_tokenizers["gemma3-270m"].encode(text, add_bos=False) == expected, text
