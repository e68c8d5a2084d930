"""What a model's vectors are made of its hidden states by, as the files of sentence-transformers say
(zse.formats.sentence): pooling, dense modules, the longest text. Of any family: language models are trained for
embeddings as encoders are."""

import msgspec

from zse.models.config import MAX_WIDTH, DenseConfig, Fields, ModelConfig
from zse.models.config_parts import DENSE_ACTIVATIONS


def with_modules(config: ModelConfig, fields: Fields) -> ModelConfig:
    """`config` with what "sentence_transformers" of a config.json says; of a cross-encoder, whose own files say what
    its classifier reads, the longest text. FormatError, UnsupportedError."""
    beside = fields.section("sentence_transformers")
    if beside is None:
        return config
    longest = beside.integer("max_seq_length", config.max_context)
    values = msgspec.structs.asdict(config) | dict(max_context=min(config.max_context, longest))
    if not config.num_labels:
        listed = beside.get("dense", [])
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise beside.fail("dense", "is not a list of objects")
        dense = tuple(_dense(Fields(beside.path, each)) for each in listed)
        values |= dict(pooling=beside.text("pooling", config.pooling), dense=dense)
    return beside.build(**values)


def _dense(fields: Fields) -> DenseConfig:
    return DenseConfig(
        inputs=fields.integer("inputs", high=MAX_WIDTH),
        outputs=fields.integer("outputs", high=MAX_WIDTH),
        bias=fields.boolean("bias", True),
        activation=fields.choice("activation", {name: name for name in DENSE_ACTIVATIONS}),
    )
