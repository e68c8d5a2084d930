"""Runs Ops on a GPU device: arguments uploaded, outputs poisoned, recorded as a graph, read back, compared."""

from functools import cache

import numpy as np
import pytest
from kernels.harness import DTYPES, join_fields

from gpu.machine import isa
from zse.kernel.nvrtc import compile_variant
from zse.kernel.targets.cuda import CudaTarget
from zse.kernels.gpu import matmul_cases
from zse.kernels.op import EXACT, Cases, HostActivation, HostArray, HostFp8Activation
from zse.kernels.table import all_ops, all_variants
from zse.quant.pack import bf16_to_f32, e4m3_to_f32
from zse.runtime.cuda import CUDADevice
from zse.tensor import Activation, Fp8Activation, Tensor, Weight, sum_width

BITS = {"bf16": "uint16", "e4m3": "uint8"}


class LazyKernels:
    """CompiledKernels that are its own manifest: variants of the table, staged and compiled when a launch first asks for them."""

    def __init__(self, arch: str):
        self.arch, self.images = arch, {}
        self.variants = {variant.symbol: variant for variant in all_variants(CudaTarget(arch))}
        self.manifest, self.image = self, self.images.__getitem__

    def __iter__(self):
        return iter(self.variants)

    def __contains__(self, symbol):
        return symbol in self.variants

    def __getitem__(self, symbol):
        compiled = compile_variant(self.variants[symbol], self.arch)
        self.images[symbol] = compiled.cubin
        return compiled.manifest() | {"image": symbol}


@cache
def device() -> CUDADevice:
    """The CUDA device that all tests share, with the package's kernels."""
    return CUDADevice(kernels=LazyKernels(isa()))


def gpu_ops():
    """The operations that have a GPU form."""
    return [op for op in all_ops() if op.gpu_variants]


def ops_of(arch: str):
    """Those that have kernels for an architecture: HIP and Metal have none of latent attention."""
    from zse.kernel.emit import gpu_target

    return [op for op in gpu_ops() if op.gpu_variants(gpu_target(arch))]


def upload(gpu, array: np.ndarray, dtype: str | None = None) -> Tensor:
    """A copy of the array in device memory (an empty one has one byte)."""
    data = np.ascontiguousarray(array)
    tensor = Tensor(gpu.alloc(max(data.nbytes, 1), label="test"), data.shape, dtype or DTYPES[str(data.dtype)])
    if data.nbytes:
        gpu.write(tensor, data.tobytes())
    return tensor


def to_tensor(gpu, value):
    """A host value of a Case as the launcher's argument."""
    if isinstance(value, np.ndarray):
        return upload(gpu, value)
    if isinstance(value, HostArray):
        return upload(gpu, value.array, value.dtype)
    if isinstance(value, HostActivation):
        return Activation(*(upload(gpu, part) for part in (value.q, value.scale, value.sum)))
    if isinstance(value, HostFp8Activation):
        return Fp8Activation(upload(gpu, value.q, "e4m3"), upload(gpu, value.scale), upload(gpu, value.sums))
    if hasattr(value, "planes"):
        kinds = {plane.name: plane.dtype for plane in value.scheme.planes(*value.shape, value.layout)}
        planes = {name: upload(gpu, plane, kinds[name]) for name, plane in value.planes.items()}
        return Weight(value.shape, value.scheme, planes, value.layout)
    if isinstance(value, tuple):
        made = [to_tensor(gpu, part) for part in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value


def poisoned(shape, dtype: str) -> np.ndarray:
    """NaN, or for integers the smallest; bit patterns: NaN."""
    if dtype in BITS:
        return np.full(shape, 0x7FFF if dtype == "bf16" else 0x7F, BITS[dtype])
    array = np.empty(shape, dtype)
    array.fill(np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).min)
    return array


def read_back(gpu, tensor: Tensor, dtype) -> np.ndarray:
    return np.frombuffer(gpu.read(tensor), dtype).reshape(tensor.shape).copy()


def run_case(op, case, gpu, times: int = 1) -> dict:
    """Launch `times` times in one graph; outputs by name: arrays (bit patterns for bf16, e4m3) or Host*Activations."""
    tensors = {name: to_tensor(gpu, value) for name, value in case.inputs.items()}
    for name, output in case.outputs.items():
        if output.fp8:
            rows, width = output.shape
            tensors[name] = Fp8Activation(
                upload(gpu, poisoned((rows, width), "e4m3"), "e4m3"),
                upload(gpu, poisoned((rows,), "float32")),
                upload(gpu, poisoned((rows, sum_width(width)), "float16")),
            )
        else:
            initial = poisoned(output.shape, output.dtype) if output.inout is None else output.inout
            tensors[name] = upload(gpu, initial, output.dtype if output.dtype in BITS else None)
    recorder = gpu.record()
    arguments = join_fields(tensors)
    for _ in range(times):
        op.launch(recorder, **arguments, **case.options)
    graph = recorder.finish()
    graph.run()
    results = {}
    for name, output in case.outputs.items():
        tensor = tensors[name]
        if output.fp8:
            results[name] = HostFp8Activation(
                output.shape,
                read_back(gpu, tensor.q, np.uint8),
                read_back(gpu, tensor.scale, np.float32),
                read_back(gpu, tensor.sums, np.float16),
            )
        else:
            results[name] = read_back(gpu, tensor, BITS.get(output.dtype, output.dtype))
    graph.close()
    free(tensors)
    return results


def free(value) -> None:
    """Give the buffers behind arguments back."""
    if isinstance(value, Tensor):
        if not value.buffer.freed:
            value.buffer.free()
    elif isinstance(value, Weight):
        free(value.planes)
    elif isinstance(value, dict):
        free(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            free(part)


def wide(array: np.ndarray, dtype: str) -> np.ndarray:
    """Output values as float64 (integers as they are)."""
    if dtype == "bf16":
        array = bf16_to_f32(array)
    elif dtype == "e4m3":
        array = e4m3_to_f32(array)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def check_case(op, case, got: dict) -> None:
    """Compare with the reference within every output's tolerance."""
    initial = {
        name: output.inout for name, output in case.outputs.items() if output.inout is not None and "." not in name
    }
    expected = op.reference(
        **case.inputs, **initial, **{name: value for name, value in case.options.items() if name not in case.outputs}
    )
    for name, output in case.outputs.items():
        what = f"{case.name}: {name}"
        wanted = np.asarray(expected[name])
        if output.error:
            problem = output.error(got[name], wanted=wanted)
            assert not problem, f"{what}: {problem}"
        elif output.fp8:
            check_fp8(got[name], np.asarray(wanted, np.float64), output.tolerance.relative, what)
        elif output.tolerance == EXACT or output.tolerance.absolute == output.tolerance.relative == 0:
            np.testing.assert_array_equal(got[name], wanted, err_msg=what)
        else:
            if wanted.dtype == np.uint16 and output.dtype == "bf16":
                wanted = bf16_to_f32(wanted)
            np.testing.assert_allclose(
                wide(got[name], output.dtype),
                wanted.astype(np.float64),
                rtol=output.tolerance.relative,
                atol=output.tolerance.absolute,
                err_msg=what,
            )


# Floating-point operations of a case that a random choice of many, and of SOME, may have: the longest prompts of attention, 1.8e9, take an
# emulator 50 s.
MOST_FLOPS, FEW_FLOPS = 400_000_000, 100_000_000


# Among how many tests the cases of an operation are shared where many are run: at the end of a run one test would be alone on a core.
PARTS = {"attention": 8, "matmul": 4}

# Operations without matrix instructions that have more than FULL cases, of which SOME run, or MANY; of the others all.
SOME, FULL, MANY = 4, 12, 60
WITH_MANY = (
    "matmul",
    "experts",
    "route",
    "embed",
    "add_rmsnorm",
    "qkv_post",
    "attention",
    "conv",
    "delta",
    "gated_norm",
    "gated",
    "join",
)


def parts_of(arch: str, others: bool = True):
    """Parameters of a test of every operation of an architecture without matrix instructions: operation, how many cases, part. others: whether
    `make test` runs operations that are not of WITH_MANY, whose cases differ less, as well."""
    for op in ops_of(arch):
        is_left = not others and op.name not in WITH_MANY
        marks = [pytest.mark.exhaustive("kernels of a second architecture")] * is_left
        some = SOME if op.name in WITH_MANY else FULL // 2
        yield pytest.param(op, some, (0, 1), id=f"{op.name}-some", marks=marks)
        parts = PARTS.get(op.name, 1) if op.name in WITH_MANY else 0
        for number in range(parts):
            marks = [pytest.mark.exhaustive, *([pytest.mark.long] if parts > 1 else [])]
            yield pytest.param(op, MANY, (number, parts), id=f"{op.name}-many-{number}", marks=marks)


def check_without_matrices(op, device, seed: int, most: int, part: tuple[int, int]) -> None:
    """What parts_of() says, of cases that the seed makes."""
    if op.name == "matmul":
        cases = matmul_cases.small_cases(np.random.default_rng(seed))  # others are of gemm's tiles
    else:
        cases = made_by(op, seed)
    assert (len(cases) > FULL) == (op.name in WITH_MANY)
    check_cases(op, device, seed, cases, most, part)


def check_cases(
    op, device, seed: int, cases, most: int = 0, part: tuple[int, int] = (0, 1), has=lambda case: True
) -> None:
    """Every case, or `most` of them where there are many more and none is too long, in a random order, as the seed says. cases: a list, or a
    Cases, of which those are made that run.

    part: (number, of how many), for tests that share the cases: each has its own and its share of `most`. has: of a case, whether the
    device has kernels for it."""
    longest = (FEW_FLOPS if most <= FULL // 2 else MOST_FLOPS) if most else float("inf")
    numbers = range(len(cases))[part[0] :: part[1]]
    left = -(-most // part[1]) if most and len(cases) > 2 * most else len(numbers)
    for number in np.random.default_rng(seed).permutation(numbers):
        case = cases[number] if left else None
        if case is None or op.cost(case).flops > longest or not has(case):
            continue
        left -= 1
        try:
            check_case(op, case, run_case(op, case, device))
        except Exception as error:
            what = f"{op.name}, seed {seed}, {case.name}"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def made_by(op, seed: int):
    """The GPU's cases of an operation, of which some can be asked for."""
    cases = op.cases(np.random.default_rng(seed), "gpu")
    return cases if isinstance(cases, Cases) else list(cases)


def check_fp8(got: HostFp8Activation, values: np.ndarray, slack: float, what: str) -> None:
    """scale = largest magnitude / 448; q within half a step of e4m3 (2**-4 of the value, 2**-10 near zero) and `slack`
    of the row's largest magnitude; sums those of q, rounded to f16."""
    wanted = HostFp8Activation.sums_of(got.q)
    np.testing.assert_allclose(
        np.where(np.isnan(wanted), wanted, got.sums), wanted, rtol=2**-10, atol=0.01, err_msg=f"{what}: sums"
    )
    peak = np.abs(values).max(axis=1)
    np.testing.assert_allclose(got.scale, peak / 448, rtol=slack + 1e-6, atol=1e-38, err_msg=f"{what}: scale")
    assert ((got.q & 0x7F) != 0x7F).all(), f"{what}: q is NaN"
    scale = got.scale.astype(np.float64)[:, None]
    error = np.abs(got.dequantize() - values)
    bound = np.maximum(np.abs(values) * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5) + slack * peak[:, None] + 1e-38
    assert (error <= bound).all(), f"{what}: q is off by {(error / bound).max():.3f} of what rounding explains"
