"""The literal list of operations. The build, the tests and `zse bench kernels` walk it."""

from importlib import import_module

from zse.kernels.op import Op, Variant

# Module → the Op objects it defines.
MODULES: dict[str, tuple[str, ...]] = {
    "matmul": ("MATMUL",),
    "embed": ("EMBED",),
    "norm": ("ADD_RMSNORM",),
    "rope": ("ROPE_TABLE",),
    "qkv_post": ("QKV_POST",),
    "attention": ("ATTENTION",),
    "activation": ("GATED",),
    "quantize": ("QUANTIZE",),
    "gather": ("GATHER_ROWS",),
    "sample": ("SAMPLE", "LOGPROB_ROWS"),
}


def all_ops() -> list[Op]:
    """Every operation, in the order of the table."""
    return [getattr(import_module(f"zse.kernels.{module}"), name)
            for module, names in MODULES.items() for name in names]


def all_variants(target) -> list[Variant]:
    """Every variant to compile for `target`, sorted by symbol; two variants of one symbol are an error."""
    variants: dict[str, Variant] = {}
    for op in all_ops():
        for variant in op.variants(target):
            if variants.setdefault(variant.symbol, variant) is not variant:
                raise ValueError(f"two variants are called {variant.symbol} (one is {op.name}'s)")
    variants |= {variant.symbol: variant for variant in import_module("zse.kernels.repack").variants(target)}
    return [variants[symbol] for symbol in sorted(variants)]
