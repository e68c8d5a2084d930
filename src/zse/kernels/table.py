"""The literal list of operations. The build, the tests and `zse bench kernels` walk it."""

from importlib import import_module

from zse.kernels.op import Op, Variant

# Module → the Op objects it defines.
MODULES: dict[str, tuple[str, ...]] = {
    "feed": ("FEED_TOKENS",),
    "matmul": ("MATMUL",),
    "experts": ("EXPERTS",),
    "route": ("ROUTE",),
    "one_token": ("ONE_TOKEN",),
    "chain": ("CHAIN",),
    "mixture_chain": ("MIXTURE_CHAIN",),
    "combine": ("COMBINE", "OWN_EXPERTS", "EXPERT_RANKS"),
    "adapter": ("ADAPT",),
    "embed": ("EMBED",),
    "norm": ("ADD_RMSNORM",),
    "rope": ("ROPE_TABLE",),
    "whole_norm": ("HEAD_SQUARES", "WHOLE_NORM"),
    "qkv_post": ("QKV_POST",),
    "attention": ("ATTENTION",),
    "heads_attention": ("HEADS_ATTENTION",),
    "latent_post": ("LATENT_POST",),
    "latent_attention": ("LATENT_ATTENTION",),
    "head_product": ("HEAD_PRODUCT",),
    "conv": ("CONV",),
    "delta": ("DELTA",),
    "scan": ("SCAN",),
    "gated_norm": ("GATED_NORM",),
    "gate_output": ("GATE_OUTPUT",),
    "activation": ("GATED",),
    "quantize": ("QUANTIZE",),
    "gather": ("GATHER_ROWS",),
    "reorder": ("REORDER",),
    "page_table": ("UPDATE_PAGES",),
    "begin_token": ("BEGIN_TOKEN",),
    "logits": ("SCALE_LOGITS", "SPREAD_LOGITS"),
    "join": ("JOIN",),
    "layer_inputs": ("LAYER_INPUTS", "SCALE_ROWS", "NORM_SUM", "SCALE_CHOICES"),
    "images": ("PLACE_ROWS", "MEAN_ROWS", "ROPE_SECTIONS", "CLAMP", "STANDARDIZE"),
    "mask": ("MASK_LOGITS",),
    "sample": ("SAMPLE", "LOGPROB_ROWS"),
    "dense_search": ("DENSE_SEARCH",),
}


# Modules of kernels that belong to no operation, by kind of device: each has variants(target).
EXTRAS = {
    "cpu": ("floor", "repack", "repack_checkpoint"),
    "gpu": (
        "gpu.probe",
        "gpu.repack",
        "gpu.expert_slots",
        "gpu.all_reduce",
        "gpu.sum_norm",
        "gpu.peer_messages",
        "gpu.peer_rows",
    ),
}


def all_ops() -> list[Op]:
    """Every operation, in the order of the table."""
    return [
        getattr(import_module(f"zse.kernels.{module}"), name) for module, names in MODULES.items() for name in names
    ]


def all_variants(target) -> list[Variant]:
    """Every variant to compile for `target`, sorted by symbol; two variants of one symbol are an error."""
    lists = [(op.name, op.variants_for) for op in all_ops()]
    lists += [(name, import_module(f"zse.kernels.{name}").variants) for name in EXTRAS[target.kernels]]
    variants: dict[str, Variant] = {}
    for name, of_target in lists:
        for variant in of_target(target):
            if variants.setdefault(variant.symbol, variant) is not variant:
                raise ValueError(f"two variants are called {variant.symbol} (one is {name}'s)")
    return [variants[symbol] for symbol in sorted(variants)]
