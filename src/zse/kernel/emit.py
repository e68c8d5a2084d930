"""From variants to text and the manifest that launchers check their arguments against."""

from collections.abc import Iterable

from zse.errors import CompileError
from zse.kernel import archs, ir
from zse.kernel.frontend import stage
from zse.kernel.language import Variant
from zse.kernel.targets import cuda, hip, metal
from zse.kernel.targets.cpu import ISAS, CpuTarget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.kernel.targets.gpu import GpuTarget


def manifest_params(function: ir.Function) -> list[list[str]]:
    """[[name, type], ...]: "ptr", "tensormap", or the scalar's name."""
    return [[param.name, "ptr" if isinstance(param.type, ir.Pointer) else str(param.type)] for param in function.params]


def emit_unit(variants: Iterable[Variant], isa: str) -> tuple[str, dict[str, dict]]:
    """One C file for these variants on an ISA level, and {symbol: {"params": [[name, type], ...], "origin": ...}}
    with type "ptr", or the scalar's name. The text is deterministic."""
    target = CpuTarget(ISAS[isa])
    functions = [stage(variant.kernel, variant.statics, variant.symbol, target) for variant in variants]
    manifest = {
        function.symbol: {"params": manifest_params(function), "origin": function.origin} for function in functions
    }
    return target.unit(functions), manifest


def emit_gpu(variant: Variant, arch: str) -> tuple[str, dict]:
    """The CUDA C++, HIP C++ or Metal text of one variant for an architecture such as "sm_90a", "gfx90a" or "metal3.1",
    and its manifest entry: params as above, origin, threads, cluster, shared_bytes (dynamic shared memory that the
    launch asks for). The text is deterministic."""
    return emit_for(variant, gpu_target(arch, variant.threads, variant.min_blocks, variant.cluster))


def gpu_target(arch: str, threads: int = 256, min_blocks: int = 1, cluster: int = 1) -> "GpuTarget":
    """What prints variants for a GPU architecture. ConfigError for an unknown one."""
    maker = archs.maker_of(arch)
    kind = hip.HipTarget if maker == "hip" else metal.MetalTarget if maker == "metal" else cuda.CudaTarget
    return kind(arch, threads, min_blocks, cluster)


def emit_for(variant: Variant, target: "GpuTarget") -> tuple[str, dict]:
    """As emit_gpu(), for a target that was made with the variant's threads, min_blocks and cluster."""
    function = stage(variant.kernel, variant.statics, variant.symbol, target)
    text = target.unit(function)
    if target.shared_bytes > target.shared_limit and target.limits_shared:
        raise CompileError(
            f"{function.origin}: {function.symbol} has {target.shared_bytes:,} bytes of shared memory; a block of "
            f"{target.name} can have {target.shared_limit:,}"
        )
    return text, {
        "params": manifest_params(function),
        "origin": function.origin,
        "threads": variant.threads,
        "cluster": variant.cluster,
        "shared_bytes": target.shared_bytes,
    }
