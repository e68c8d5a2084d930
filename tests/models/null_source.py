"""Models without contents: the shapes and schemes that a planner sees, for devices that run nothing."""

import tiny

from zse.formats.source import ModelSource, TensorInfo
from zse.quant.scheme import parse_scheme


def source_of(config: dict, schemes: dict[str, str]) -> ModelSource:
    """A Hugging Face model of config.json `config`. schemes: part of a tensor's name ("v_proj", "" for any) → the name of
    its scheme in memory; the first that fits counts. Vectors are f32."""
    tensors = {}
    for name, shape in tiny.shapes_of(config).items():
        scheme = "f32" if len(shape) == 1 else next(scheme for part, scheme in schemes.items() if part in name)
        layout = "rows" if len(shape) == 1 else parse_scheme(scheme).layouts[0]
        tensors[name] = TensorInfo(name, scheme.upper(), shape, None, 0, 0, layout)
    return ModelSource("safetensors", "null", "hf", {}, tensors, hf_config=config)
