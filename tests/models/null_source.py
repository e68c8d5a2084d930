"""Models without contents: the shapes and schemes that a planner sees, for devices that run nothing."""

import tiny

from zse.formats.source import ModelSource, TensorInfo
from zse.quant.scheme import parse_scheme
from zse.runtime.null import NullDevice


class NullGPU(NullDevice):
    """A GPU of which only the facts are there: launches are recorded, not run."""

    memory_total = 24 << 30
    memory_free = 20 << 30
    num_sms = 132

    def __init__(self, arch: int = 90, **options):
        super().__init__(family="gpu", arch=arch, **options)

    def staging(self, nbytes, label="staging", mapped=False):
        staging = super().staging(nbytes, label)
        staging.shared = False  # copies are recorded, as between a host and a GPU
        return staging

    def tensor_map(self, tensor, box, **options):
        assert len(box) == len(options.get("dims") or tensor.shape)

        class Map:
            buffer, host_address = tensor.buffer, 64

        return Map()


def source_of(config: dict, schemes: dict[str, str]) -> ModelSource:
    """A Hugging Face model of config.json `config`. schemes: part of a tensor's name ("v_proj", "" for any) → the name of
    its scheme in memory; the first that fits counts. Vectors are f32."""
    tensors = {}
    for name, shape in tiny.shapes_of(config).items():
        scheme = "f32" if len(shape) == 1 else next(scheme for part, scheme in schemes.items() if part in name)
        layout = "rows" if len(shape) == 1 else parse_scheme(scheme).layouts[0]
        tensors[name] = TensorInfo(name, scheme.upper(), shape, None, 0, 0, layout)
    return ModelSource("safetensors", "null", "hf", {}, tensors, hf_config=config)
