"""Mistral 7B (arXiv 2310.06825): Llama with a sliding window on every layer (absent from version 0.2 on). Ministral 3:
Mistral with yarn, and queries that grow with the logarithm of their position."""

import msgspec

from zse.models.common import gguf_values, hf_values
from zse.models.config import Fields, ModelConfig
from zse.models.llama import Llama


class Mistral(Llama):
    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        return fields.build(architecture="mistral", **_values(fields, generation))


class Ministral3(Mistral):
    def rope(self, i, name):
        return "query" if name == "q" and self.config.rope.temperature_beta else "global"

    def ropes(self):
        rope = self.config.rope
        return {"global": msgspec.structs.replace(rope, temperature_beta=0.0), "query": rope}

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        values = _values(fields, generation, 1000000.0)
        scaling = fields.section("rope_parameters") or fields.section("rope_scaling") or fields
        beta = scaling.number("llama_4_scaling_beta", 0.0)
        return fields.build(architecture="ministral3", **_with_temperature(fields, values, beta, None))

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_values(fields, tensors)
        if fields.get(".rope.scaling.yarn_log_multiplier") is not None:
            # The files' two multipliers of the logarithm are the same, so that yarn's factor is 1.
            values["rope"] = fields.change_rope(values["rope"], attention_factor=1.0)
        beta = fields.number(".attention.temperature_scale", 0.0)
        length = fields.integer(".attention.temperature_length", None)
        return fields.build(architecture="ministral3", **_with_temperature(fields, values, beta, length))


def _values(fields: Fields, generation: Fields | None, default_theta: float = 10000.0) -> dict:
    values = hf_values(fields, generation, default_theta=default_theta)
    window = fields.integer("sliding_window", 0, low=0)
    return values | dict(sliding_window=window, sliding_layers=(True,) * values["num_layers"] if window else ())


def _with_temperature(fields: Fields, values: dict, beta: float, length: int | None) -> dict:
    if not beta:
        return values
    rope, length = values["rope"], length or values["rope"].original_context
    return values | dict(rope=fields.change_rope(rope, temperature_beta=beta, temperature_length=length))
