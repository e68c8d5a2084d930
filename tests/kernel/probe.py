"""The cases of gpu_cases.py on this machine's GPU: `python -m kernel.probe [NAME...]` in the folder tests. It holds the language, its
CUDA text and the layout tables of kernel/intrinsics/fragments.py against the hardware; --pack FILE reads compiled kernels."""

import argparse
import sys
import traceback
from pathlib import Path

import numpy as np

from zse.kernel import cache, nvrtc
from zse.kernel.archs import features_of
from zse.runtime.cuda import CUDADevice
from zse.runtime.gpu import CompiledKernels

from . import gpu_cases


def compile_cases(arch: str) -> list:
    """Every kernel of the cases that the architecture can have."""
    features = features_of(arch)[1]
    found = {
        case.variant.symbol: case.variant
        for case in gpu_cases.all_cases(np.random.default_rng(0))
        if set(case.needs) <= features
    }
    return [nvrtc.compile_variant(variant, arch) for variant in found.values()]


def main() -> int:
    """Exit code 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only cases whose name starts so")
    parser.add_argument("--pack", type=Path, help="compiled kernels")
    parser.add_argument("--write-pack", metavar="ARCH", help="compile for ARCH into --pack and stop (needs no GPU)")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.write_pack:
        print(cache.write_pack(options.pack, options.write_pack, compile_cases(options.write_pack)), "bytes")
        return 0
    if options.pack:
        pack = cache.Pack(options.pack)
        device = CUDADevice(kernels=CompiledKernels(pack.manifest, pack.image))
    else:
        compiled: dict = {}
        device = CUDADevice(kernels=CompiledKernels(compiled, lambda image: image))
        compiled.update(
            {one.symbol: one.manifest() | {"image": one.cubin} for one in compile_cases(cache.resolve_arch(device.isa))}
        )
    features = features_of(cache.resolve_arch(device.isa))[1]
    count = failed = 0
    for seed in range(options.seeds):
        for case in gpu_cases.all_cases(np.random.default_rng(seed)):
            if set(case.needs) <= features and (not options.names or case.name.startswith(tuple(options.names))):
                count += 1
                try:
                    gpu_cases.run_case(device, case)
                except Exception:
                    failed += 1
                    print(f"{case.name}, seed {seed}:\n{traceback.format_exc(limit=2)}", flush=True)
    print(f"{count} cases, {failed} failed")
    device.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
