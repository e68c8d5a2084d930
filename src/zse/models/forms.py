"""What differs between processors in the one forward: the types between the operations, which operations take their
neighbours in, and the scratch memory that all of it needs."""

from typing import Any, NamedTuple

from zse.dtypes import ITEM_BYTES
from zse.kernels.attention import partial_shape
from zse.models.config import ModelConfig

SPLIT_TOKENS = 16  # CPU: batches up to this size may split a sequence's keys between threads
PLACE_ALIGN = 256  # bytes; tensor maps and 16-byte copies want less
SMALL_TOKENS = 64  # GPU: up to here a product is bound by reading its weights
FEW_TOKENS = 8  # GPU: up to here activations stay bf16, also for fp8 weights

Tensors = dict[str, tuple[str, tuple[int, ...]]]


class Forms(NamedTuple):
    """family: of devices. activations: what matrix products can take, the default first. inner: the dtype between
    operations (the residual stream is f32 everywhere). fuses: matmul adds to the residual stream and matmul_gated
    gates, in their epilogues. sizes: of recordings, in tokens; the step's largest comes on top. One that fits closely picks
    kernels for few tokens."""

    family: str
    activations: tuple[str, ...]
    inner: str
    fuses: bool
    sizes: tuple[int, ...]


FORMS = {
    "cpu": Forms("cpu", ("int8", "f32"), "f32", False, (1, SPLIT_TOKENS)),
    "gpu": Forms("gpu", ("bf16",), "bf16", True, (1, 4, 8, 16, SMALL_TOKENS, 128, 256, 512, 1024, 2048, 4096)),
}


def qkv_width(config: ModelConfig) -> int:
    return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim


def gates_in_matmul(forms: Forms, config: ModelConfig) -> bool:
    """Whether matmul_gated takes the joined gate and up weights: both halves are whole tiles of 16 rows."""
    return forms.fuses and config.intermediate_size % 16 == 0


def scratch_tensors(
    config: ModelConfig, forms: Forms, schemes: dict[str, Any], *, max_tokens: int, max_rows: int, max_context: int
) -> Tensors:
    """Scratch tensors of a Decoder: name → (dtype, shape). schemes: of the weights by name ("layers.0.qkv", ...).

    A quantized activation takes less than its unquantized form, and shares its place.
    """
    hidden, q_width, inner = config.hidden_size, config.num_heads * config.head_dim, forms.inner
    tensors: Tensors = {
        "x": ("f32", (max_tokens, hidden)),
        "normed": (inner, (max_tokens, hidden)),
        "rope": ("f32", (max_tokens, config.head_dim)),
        "local_rope": ("f32", (max_tokens, config.head_dim if config.local_rope else 0)),
        "q": (inner, (max_tokens, q_width)),
        "attended": (inner, (max_tokens, q_width)),
        "gated": (inner, (max_tokens, config.intermediate_size)),
        "wanted": ("f32", (max_rows, hidden)),
        "head_in": (inner, (max(max_rows, 1), hidden)),
    }
    joined = all(f"layers.{layer}.gate_up" in schemes for layer in range(config.num_layers))
    if not gates_in_matmul(forms, config) or not joined:
        # Also the place of qkv: q, k and v are used up before gate and up are computed.
        tensors["gate_up"] = ("f32", (max_tokens, max(2 * config.intermediate_size, qkv_width(config))))
    else:
        tensors["qkv"] = ("f32", (max_tokens, qkv_width(config)))
    if not forms.fuses or config.post_norms:
        tensors["delta"] = ("f32", (max_tokens, hidden))
    if forms.family == "cpu":
        tensors["partial"] = (
            "f32",
            partial_shape(min(SPLIT_TOKENS, max_tokens), config.num_heads, config.head_dim, max_context),
        )
    elif max_tokens > FEW_TOKENS and any(scheme.kind == "fp8" for scheme in schemes.values()):
        tensors["quantized"] = (inner, (max_tokens, -(-config.intermediate_size // 2) + 2))
    return tensors


def shared_places(forms: Forms, tensors: Tensors) -> tuple[int, dict[str, int]]:
    """On a GPU, what attention works on and what the MLP works on share one piece of memory: one is done with when the
    other begins. (bytes of the piece, offsets in it by name); a CPU keeps them apart, near the caches' sizes."""
    if forms.family == "cpu":
        return 0, {}
    places, sizes = {"gated": 0}, [nbytes_of(*tensors["gated"]), 0]
    for name in ("qkv", "q", "attended"):
        if name in tensors:
            places[name] = sizes[1]
            sizes[1] += -(-nbytes_of(*tensors[name]) // PLACE_ALIGN) * PLACE_ALIGN
    return max(sizes), places


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    count = ITEM_BYTES[dtype]
    for size in shape:
        count *= size
    return count


def scratch_nbytes(
    config: ModelConfig, forms: Forms, schemes: dict[str, Any], *, max_tokens: int, max_rows: int, max_context: int
) -> int:
    """Bytes that a Decoder and the logits of its StepBuffers take, for the memory plan."""
    tensors = scratch_tensors(config, forms, schemes, max_tokens=max_tokens, max_rows=max_rows, max_context=max_context)
    shared, places = shared_places(forms, tensors)
    total = 4 * max_rows * config.vocab_size + shared
    total += sum(nbytes_of(*tensor) for name, tensor in tensors.items() if name not in places)
    if forms.family == "gpu":
        from zse.kernels.gpu.attention_plan import AttentionScratch

        total += AttentionScratch.nbytes(config, max_tokens, max_rows, max_context)
    return total
