"""The table of request fields: one check for JSON, zse.LLM and the command line."""

import math

import msgspec
import pytest

from zse.errors import RequestError
from zse.sampling.fields import Field, Integer, Object, checked, fields_of
from zse.sampling.params import TOKEN_ID, BeamParams, SamplingParams, TokenIds
from zse.scheduler.options import RequestOptions

WRONG = [
    (SamplingParams, {"temperature": -0.1}, "out_of_range", "temperature"),
    (SamplingParams, {"temperature": 2.1}, "out_of_range", "temperature"),
    (SamplingParams, {"temperature": math.nan}, "out_of_range", "temperature"),
    (SamplingParams, {"temperature": "1"}, "invalid_type", "temperature"),
    (SamplingParams, {"temperature": None}, "invalid_type", "temperature"),
    (SamplingParams, {"top_p": 0}, "out_of_range", "top_p"),
    (SamplingParams, {"top_k": -2}, "out_of_range", "top_k"),
    (SamplingParams, {"top_k": 1.5}, "invalid_type", "top_k"),
    (SamplingParams, {"min_p": True}, "invalid_type", "min_p"),
    (SamplingParams, {"repetition_penalty": 0.0}, "out_of_range", "repetition_penalty"),
    (SamplingParams, {"repetition_penalty": 100.1}, "out_of_range", "repetition_penalty"),
    (SamplingParams, {"max_tokens": 0}, "out_of_range", "max_tokens"),
    (SamplingParams, {"logprobs": 21}, "out_of_range", "logprobs"),
    (SamplingParams, {"prompt_logprobs": -1}, "out_of_range", "prompt_logprobs"),
    (SamplingParams, {"seed": 1 << 64}, "out_of_range", "seed"),
    (SamplingParams, {"stop": ("a", "")}, "invalid_value", "stop[1]"),
    (SamplingParams, {"stop": ("a",) * 17}, "array_above_max_length", "stop"),
    (SamplingParams, {"stop_token_ids": (-1,)}, "invalid_token_id", "stop_token_ids[0]"),
    (SamplingParams, {"logit_bias": {1: 101}}, "out_of_range", "logit_bias.1"),
    (SamplingParams, {"logit_bias": {-1: 1}}, "invalid_token_id", "logit_bias"),
    (SamplingParams, {"logit_bias": dict.fromkeys(range(1025), 1)}, "array_above_max_length", "logit_bias"),
    (BeamParams, {"beam_width": 0}, "out_of_range", "beam_width"),
    (BeamParams, {"beam_width": 17}, "out_of_range", "beam_width"),
    (BeamParams, {"length_penalty": 11.0}, "out_of_range", "length_penalty"),
    (BeamParams, {"early_stopping": "soon"}, "invalid_type", "early_stopping"),
    (RequestOptions, {"priority": 11}, "out_of_range", "priority"),
    (RequestOptions, {"priority": -11}, "out_of_range", "priority"),
    (RequestOptions, {"deadline_ms": 0.0}, "out_of_range", "deadline_ms"),
    (RequestOptions, {"deadline_ms": 1e9}, "out_of_range", "deadline_ms"),
    (RequestOptions, {"deadline_ms": math.nan}, "out_of_range", "deadline_ms"),
    (RequestOptions, {"weight": 0.0}, "out_of_range", "weight"),
]


@pytest.mark.parametrize(("kind", "values", "code", "param"), WRONG)
def test_a_value_outside_its_range_is_refused(kind, values, code, param):
    with pytest.raises(RequestError, match=f"'{param}'".replace("[", r"\[")) as caught:
        checked(kind(**values))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)


def test_values_at_their_bounds_pass_and_are_brought_to_the_table_s_types():
    params = SamplingParams(temperature=2, top_k=-1, stop="end", logit_bias={"7": 1}, seed=-(1 << 63), max_tokens=1)
    assert checked(params) == SamplingParams(
        temperature=2.0, top_k=0, stop=("end",), logit_bias={7: 1.0}, seed=-(1 << 63), max_tokens=1
    )
    assert checked(BeamParams(early_stopping="never")) == BeamParams(early_stopping="never")
    plain = SamplingParams()
    assert checked(plain) is plain


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    params = checked(SamplingParams(temperature=numpy.float32(0.5), top_k=numpy.int64(3)))
    assert (params.temperature, params.top_k) == (0.5, 3) and type(params.top_k) is int


@pytest.mark.parametrize("kind", [SamplingParams, BeamParams, RequestOptions])
def test_every_default_passes_its_own_check(kind):
    for name, field in fields_of(kind).items():
        assert field.default is None or field.default == "" or field.kind.check(field.default, name) == field.default


def test_a_field_is_declared_in_one_place():
    """A new one reaches JSON, its schema and the Struct without another line."""
    assert fields_of(SamplingParams).keys() == set(SamplingParams.__struct_fields__)
    fields = {"count": Field(Integer(1, 3), "How many.", 2)}
    assert Object(fields).check({}, "") == {"count": 2} and Object(fields).check({"count": 3}, "") == {"count": 3}
    with pytest.raises(RequestError, match=r"'a\.count' must be at least 1 and at most 3"):
        Object(fields).check({"count": 4}, "a")
    with pytest.raises(RequestError, match="Unknown field 'size'"):
        Object(fields).check({"size": 4}, "")
    schema = Object(fields).schema
    assert schema["properties"]["count"] == {
        "type": ["integer", "null"],
        "minimum": 1,
        "maximum": 3,
        "description": "How many.",
        "default": 2,
    }
    assert not schema["additionalProperties"]


def test_params_cross_the_process_boundary_as_they_are():
    params = checked(SamplingParams(temperature=0.5, logit_bias={5: -1}, stop_token_ids=(1, 2)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("wrong", [-1, 1 << 31, 1 << 70, True, 1.5, math.nan, "7", None, [7]], ids=repr)
@pytest.mark.parametrize("before", [0, 3])
def test_ids_that_are_checked_together_are_refused_as_one_by_one(wrong, before):
    ids, path = TokenIds(max_length=10), f"prompt[{before}]"
    with pytest.raises(RequestError) as alone:
        TOKEN_ID.check(wrong, path)
    with pytest.raises(RequestError) as together:
        ids.check([5] * before + [wrong, 6], "prompt")
    assert (together.value.code, together.value.param, str(together.value)) == (
        alone.value.code,
        path,
        str(alone.value),
    )


def test_ids_are_integers_of_31_bits():
    ids = TokenIds(max_length=10)
    given = (0, (1 << 31) - 1)
    assert ids.check(given, "prompt") == [*given] and ids.check([2, 3.0], "prompt") == [2, 3] and not ids.check([], "")
