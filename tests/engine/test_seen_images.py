"""Images in the engine, against transformers' logits: text before, between and behind, chunks of any size, prefixes, and
what is refused."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("models", "formats")]
import tiny_vision as tiny  # noqa: E402
import tiny_vision_gguf  # noqa: E402

del sys.path[:2]

from zse.engine.config import EngineConfig  # noqa: E402
from zse.engine.load import load_engine  # noqa: E402
from zse.engine.messages import Ask, ImageInput, image_key  # noqa: E402
from zse.engine.metrics import Phases  # noqa: E402
from zse.errors import RequestError  # noqa: E402
from zse.formats.convert import convert  # noqa: E402
from zse.sampling.params import BeamParams, SamplingParams  # noqa: E402
from zse.scheduler.options import RequestOptions  # noqa: E402

REFERENCES = np.load(tiny.PATH)
TOP = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: tiny.write(family, tmp_path_factory.mktemp(family)) for family in tiny.CONFIGS}


class Engines:
    """An engine at a time of a folder."""

    def __init__(self, path, **options):
        config = dict(model=str(path), device="cpu", threads=2, kv_dtype="f32", activations="f32") | options
        self.loaded = load_engine(EngineConfig(**config), Phases(lambda: 0.0))
        self.engine = self.loaded.engine
        self._ids = iter(range(1, 1 << 20))

    def run(self, *requests) -> list:
        """The outputs of (prompt, images[, params]) that run together: (tokens, logprobs, cached) of each."""
        ids = []
        for prompt, images, *params in requests:
            ids.append(next(self._ids))
            self.engine.submit(ids[-1], prompt, *(params or [TOP]), RequestOptions(images=tuple(images)))
        found = {id: ([], [], []) for id in ids}
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None, output.error
                tokens, logprobs, cached = found[output.id]
                tokens += output.tokens
                logprobs += output.logprobs or []
                cached.append(output.cached_tokens)
            assert not self.engine.scheduler.check_integrity()
        return [found[id] for id in ids]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.engine.close()
        self.loaded.source.close()


def agrees(found, logits: np.ndarray, spread: float = 3e-4) -> None:
    """The log-probabilities of one sampled token are those of a line of logits: f32 sums in another order."""
    wanted = logits.astype(np.float64)
    wanted -= np.log(np.exp(wanted - wanted.max()).sum()) + wanted.max()
    (_, (logprob, *_), *_) = found
    for token, value in logprob.top:
        assert abs(value - wanted[token]) < spread, (token, value, wanted[token])
    assert {token for token, _ in logprob.top} == set(np.argsort(wanted)[-20:].tolist())


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_logits_equal_transformers(family, folders):
    """All prompts at once in small steps, then each beginning of one that ends in text, which finds the rest cached."""
    most = 24 if tiny.vision(family).whole else 7
    with Engines(folders[family], max_tokens_per_step=most, max_rows=4) as engines:
        prompts = [tiny.prompt(family, number) for number in range(len(tiny.PROMPTS))]
        for number, found in enumerate(engines.run(*prompts)):
            agrees(found, REFERENCES[f"{family} logits {number}"][-1])
        for number, (ids, images) in enumerate(prompts):
            for length in range(images[-1].start + images[-1].count, len(ids) + 1):
                (found,) = engines.run((ids[:length], images))
                agrees(found, REFERENCES[f"{family} logits {number}"][length - 1 - len(ids)])
        assert engines.engine.counters()["images_encoded"] == 2


def test_images_are_part_of_the_prefix(folders):
    """Equal prompts with different images share what stands before them; with equal images all; what is found ends before
    an image, not within."""
    ids, (image, _) = tiny.prompt("gemma3", 4)
    text, behind = list(range(20, 60)), list(range(60, 70))
    ids = text + ids[image.start : image.start + 16] + behind
    image = msgspec.structs.replace(image, start=40)
    other = ImageInput(40, 16, *_other_image())
    with Engines(folders["gemma3"], max_tokens_per_step=32, page_size=16) as engines:
        engines.run((text, []))
        (first,) = engines.run((ids, [image]))
        cached = [
            engines.run(request)[0][2][0] for request in ((ids, [other]), (text + behind * 2, []), (ids, [image]))
        ]
        assert 0 < cached[0] == cached[1] <= 40 and cached[2] == len(ids) - 1
        assert cached[1] == engines.run((ids[:56], [image]))[0][2][0]
        for _ in range(2):  # computed behind what was found, then found
            (again,) = engines.run((ids, [image]))
            assert again[0] == first[0] and abs(again[1][0].logprob - first[1][0].logprob) < 1e-5
        assert engines.engine.counters()["images_encoded"] == 2 and engines.engine.counters()["image_hits"] == 4


@pytest.mark.parametrize("in_flight", [False, True])
def test_states_are_those_of_what_was_seen(in_flight, folders):
    """A state behind a reply is found by who sent the same image, not by who sent another; also where the reply ended
    by a token of which the next was already being computed."""
    ids, (image, *_) = tiny.prompt("qwen3_5", 0)
    pixels = bytes(len(image.pixels))
    other = msgspec.structs.replace(image, pixels=pixels, key=image_key(image.height, image.width, pixels))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with Engines(folders["qwen3_5"], prefix_cache=False) as engines:
        (reply, _, _), *_ = engines.run((ids, [image], params))
        follows = [*ids, *reply[:8], 20, 21]
        wanted = [engines.run((follows, [each]))[0] for each in (image, other)]
    with Engines(folders["qwen3_5"]) as engines:
        ends = dict(stop_token_ids=(reply[7],)) if in_flight else dict(max_tokens=8)
        (found, _, _), *_ = engines.run((ids, [image], msgspec.structs.replace(params, **ends)))
        assert found == reply[: reply.index(reply[7]) + 1 if in_flight else 8]
        cached = []
        for each, (tokens, (logprob,), _) in zip((other, image), wanted[::-1], strict=True):
            (got, (entry,), (hit,)) = engines.run((follows, [each]))[0]
            assert got == tokens and abs(entry.logprob - logprob.logprob) < 1e-5
            cached.append(hit)
        assert cached[0] <= image.start < image.start + image.count < cached[1]


def _other_image() -> tuple[int, int, bytes, bytes]:
    pixels = bytes(3 * 112 * 112)
    return 112, 112, pixels, image_key(112, 112, pixels)


def test_more_tokens_follow_and_others_run_beside(folders):
    """Greedy replies of 12 tokens are the same alone and beside a prompt without images, sampled or with rules."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    ids, images = tiny.prompt("gemma3", 2)
    with Engines(folders["gemma3"], max_tokens_per_step=24, max_rows=4) as engines:
        (alone, _, _), *_ = engines.run((ids, images, params))
        ruled = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, bad_token_ids=((alone[0],),))
        beside = engines.run((ids, images, params), ([5, 6, 7], [], params), (ids, images, ruled))
        assert beside[0][0] == alone and beside[2][0][0] != alone[0]
    with Engines(folders["gemma3"], prefix_cache=False, preemption="recompute") as engines:
        engine, seen = engines.engine, RequestOptions(images=tuple(images))
        engine.submit(1, ids, params, seen)
        tokens: list[int] = []
        while engine.has_work:
            for output in engine.step():
                tokens += output.tokens
            if len(tokens) == 5:
                assert engine.scheduler.preempt(1)  # the image is computed again
        assert tokens == alone


def test_a_beam_search_sees(folders):
    ids, images = tiny.prompt("qwen3_vl", 0)
    with Engines(folders["qwen3_vl"], max_rows=4) as engines:
        engine = engines.engine
        (best, _, _), *_ = engines.run((ids, images, SamplingParams(temperature=0.0, max_tokens=1)))
        engine.submit(1000, ids, BeamParams(beam_width=2, max_tokens=1), RequestOptions(images=tuple(images)))
        while engine.has_work:
            engine.step()
        (searched,) = engine.take_completed()
        assert searched.error is None and searched.result.replies[0].tokens == best


def test_tenants_share_the_tower(folders):
    """One that asked for many images does not keep another's waiting behind all of them."""
    ids, (image,) = tiny.prompt("gemma3", 0)
    with Engines(folders["gemma3"]) as engines:
        engine, ended = engines.engine, []

        def asks(id: int, tenant: str) -> None:
            pixels = bytes([id]) * len(image.pixels)
            other = msgspec.structs.replace(image, pixels=pixels, key=image_key(112, 112, pixels))
            engine.submit(id, ids, TOP, RequestOptions(images=(other,), tenant=tenant))

        for id in range(1, 9):
            asks(id, "many")
        asks(9, "one")
        while engine.has_work:
            ended += [output.id for output in engine.step() if output.finish]
        assert sorted(ended) == list(range(1, 10)) and ended.index(9) < 4
        assert not engine._features["images"]._spent_s


def test_embeddings_make_room(folders):
    """A cache of one image: what is asked for again is encoded again."""
    prompts = [tiny.prompt("gemma3", number) for number in (0, 2)]
    nbytes = 4 * 16 * 96
    with Engines(folders["gemma3"], image_cache=nbytes, prefix_cache=False) as engines:
        for _ in range(2):
            for number, prompt in zip((0, 2), prompts, strict=True):
                agrees(engines.run(prompt)[0], REFERENCES[f"gemma3 logits {number}"][-1])
        counters = engines.engine.counters()
        assert counters["image_cache_bytes"] == nbytes and counters["image_evictions"] == 3
        assert counters["images_encoded"] == 4 and counters["images_waiting"] == 0


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_moe"])
def test_a_gguf_sees_what_its_folder_does(family, tmp_path):
    text, _ = tiny_vision_gguf.write_gguf(tmp_path, family)
    with Engines(text, max_tokens_per_step=12, max_rows=2) as engines:
        for number in (1, 4):
            agrees(engines.run(tiny.prompt(family, number))[0], REFERENCES[f"{family} logits {number}"][-1])


def test_experts_that_are_not_turned(tmp_path):
    """Qwen3-VL's as transformers has them in memory, and as they are converted."""
    folder = tiny.write("qwen3_vl_moe", tmp_path, turned=False)
    convert(str(folder), str(tmp_path / "model.zse"))
    ids, images = tiny.prompt("qwen3_vl_moe", 0)
    with Engines(folder) as engines:
        agrees(engines.run((ids, images))[0], REFERENCES["qwen3_vl_moe logits 0"][-1])
        (wanted, _, _), *_ = engines.run(([20, 21, 22], []))
    with Engines(tmp_path / "model.zse") as engines:
        assert engines.run(([20, 21, 22], []))[0][0] == wanted


def test_a_gguf_sees_by_the_file_beside_it(tmp_path):
    text, tower = tiny_vision_gguf.write_gguf(tmp_path)
    with Engines(text) as engines:
        agrees(engines.run(tiny.prompt("gemma3", 3))[0], REFERENCES["gemma3 logits 3"][-1])
    away = tmp_path / "away"
    away.mkdir()
    moved = tower.rename(away / "tower.gguf")
    with Engines(text) as engines:
        assert engines.engine.tower is None
        with pytest.raises(RequestError, match="takes no images"):
            engines.run(tiny.prompt("gemma3", 3))
    with Engines(text, mmproj=str(moved)) as engines:
        agrees(engines.run(tiny.prompt("gemma3", 3))[0], REFERENCES["gemma3 logits 3"][-1])


def test_what_cannot_be_is_refused(folders):
    ids, images = tiny.prompt("gemma3", 0)
    image, seen = images[0], RequestOptions(images=tuple(images))
    with Engines(folders["gemma3"], max_tokens_per_step=15, max_rows=2) as engines:
        with pytest.raises(RequestError, match="16 tokens of one step, which has 15"):
            engines.run((ids, images))
    with Engines(folders["gemma3"]) as engines:
        engine = engines.engine
        for changes, reason in (
            (dict(height=56), "size"),
            (dict(pixels=image.pixels[:-1]), "size"),
            (dict(count=15), "should"),
            (dict(start=len(ids) - 5), "should"),
            (dict(key=bytes(32)), "key"),
        ):
            wrong = msgspec.structs.replace(image, **changes)
            with pytest.raises(RequestError, match=reason) as refused:
                engine.submit(1, ids, TOP, RequestOptions(images=(wrong,)))
            assert refused.value.status == 400
        with pytest.raises(RequestError, match="context"):
            engine.submit(1, ids, msgspec.structs.replace(TOP, max_tokens=4096), seen)
        with pytest.raises(RequestError, match="prompt with images"):
            engine.submit(1, ids, Ask("mean"), seen)
        with pytest.raises(RequestError, match="should"):
            engine.submit(1, ids, TOP, RequestOptions(images=(image, image)))
        engine.submit(1, ids, TOP, seen)
        with pytest.raises(RequestError, match="in use"):
            engine.submit(1, ids, TOP, seen)
        assert engine.num_computed(1) == 0 and engine.cancel(1) and not engine.has_work
        engine.submit(2, ids, TOP, msgspec.structs.replace(seen, deadline_ms=1e-6))
        (output,) = [output for _ in range(3) for output in engine.step()]
        assert output.error.code == "timeout" and not engine.has_work


def test_a_file_that_changes_is_told(folders, tmp_path):
    """The tower is read with the first image: requests without one go on."""
    for name in ("config.json", "preprocessor_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders["gemma3"] / name).read_bytes())
    ids, images = tiny.prompt("gemma3", 0)
    with Engines(tmp_path) as engines:
        with open(tmp_path / "model.safetensors", "ab") as file:
            file.write(b"x")
        engines.engine.submit(1, ids, TOP, RequestOptions(images=tuple(images)))
        outputs = []
        while engines.engine.has_work:
            outputs += engines.engine.step()
        (failed,) = outputs
        assert failed.error.status == 500 and "tower" in failed.error.message
        (tokens, _, _), *_ = engines.run(([5, 6, 7], []))
        assert len(tokens) == 1


def test_memory_is_in_the_plan(folders):
    with Engines(folders["gemma3"]) as engines:
        plan, device = engines.loaded.plan, engines.loaded.device
        before = sum(device.memory().values())
        engines.run(*[tiny.prompt("gemma3", number) for number in range(3)])
        assert plan.parts["image cache"] == 256 << 20
        assert sum(device.memory().values()) - before <= plan.parts["vision tower"] + plan.parts["step"]
