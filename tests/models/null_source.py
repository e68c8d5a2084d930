"""Models without contents: the shapes and schemes that a planner sees, for devices that run nothing."""

from functools import cache

import tiny_families

from zse import kernel as zl
from zse.formats.source import ModelSource, TensorInfo
from zse.kernel.language import PointerType
from zse.kernel.targets.cpu import ISAS, CpuTarget
from zse.kernel.targets.cuda import CudaTarget
from zse.kernels.table import all_variants
from zse.quant.scheme import parse_scheme


@cache
def signatures(family: str) -> dict[str, dict]:
    """A manifest for a null device: the parameters of every kernel of an x86-64-v3 CPU or an sm_90a."""

    def kind(annotation) -> str:
        if isinstance(annotation, PointerType):
            return "ptr"
        if annotation is zl.index:
            return target.index_type.name
        return "tensormap" if annotation is zl.TensorMap else annotation.name

    target = CudaTarget("sm_90a") if family == "gpu" else CpuTarget(ISAS["x86-64-v3"])
    return {
        variant.symbol: {
            "params": [[name, kind(found)] for name, found in variant.kernel.params if found is not zl.static]
        }
        for variant in all_variants(target)
    }


def source_of(config: dict, schemes: dict[str, str]) -> ModelSource:
    """A Hugging Face model of config.json `config`. schemes: part of a tensor's name ("v_proj", "" for any) → the name of
    its scheme in memory; the first that fits counts. Vectors are f32."""
    tensors = {}
    for name, shape in tiny_families.shapes_of(config).items():
        scheme = "f32" if len(shape) == 1 else next(scheme for part, scheme in schemes.items() if part in name)
        layout = "rows" if len(shape) == 1 else parse_scheme(scheme).layouts[0]
        tensors[name] = TensorInfo(name, scheme.upper(), shape, None, 0, 0, layout)
    return ModelSource("safetensors", "null", "hf", {}, tensors, hf_config=config)
