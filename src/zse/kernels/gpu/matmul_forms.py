"""The forms of the products for few tokens on a GPU: which one a weight has, its kernels' names, and the rings of
shared memory that an architecture has room for."""

from zse.kernels.gpu import matmul_few as few
from zse.kernels.gpu import matmul_small as small
from zse.kernels.gpu import matmul_tiles as tiles

# (kind, class of groups) -> columns of a chunk. Class 32 is any multiple of 32, class 0 any multiple of the chunk.
FORMS = {
    ("int4", 16): 64,
    ("int4", 32): 128,
    ("int4", 64): 128,
    ("int4", 0): 128,
    ("int5", 16): 64,
    ("int5", 32): 64,
    ("int6", 16): 64,
    ("int6", 32): 64,
    ("int8", 16): 64,
    ("int8", 32): 64,
    ("lut4", 16): 64,
    ("lut4", 32): 128,
    ("fp4", 16): 64,
    ("fp4", 32): 128,
    ("bf16", 0): 32,
    ("f16", 0): 32,
    ("f32", 0): 16,
    ("e4m3", 0): 128,
}
FEW = ("int4", "int5", "int6", "int8")  # kinds that matmul_few multiplies
# Shared memory of a block, KiB, of the architectures that have less than Hopper's 227.
EXPERT_WARPS = 4
# Of a multiprocessor at most: of 24 warps some have an instruction to issue while others wait for weights or for a product.
EXPERT_BLOCKS = 6
WIDE = (("int4", 32), ("lut4", 32))  # forms whose kernels need more registers than six blocks leave them
BLOCK_BYTES = 1024  # of shared memory that the system has of each block
SHARED_KIB = {80: 163, 86: 99, 89: 99, 120: 99}


def form_of(scheme, width: int) -> tuple[str, int]:
    """The key of FORMS for a weight of `width` columns."""
    kind, group = scheme.element, scheme.group or width
    if scheme.numbers == "w":
        return kind, 0
    if kind == "lut4":
        kind = scheme.lookup
    if group == 16 or kind != "int4":
        return kind, 16 if group == 16 else 32
    return kind, 0 if scheme.group == 0 or group % 128 == 0 else 64 if group == 64 else 32


def symbol_of(form: tuple[str, int], kernel: str = "small") -> str:
    kind, group = form
    return f"matmul_{kernel}_{kind}" + (f"_g{group}" if group else "_wide" if kind == "int4" else "")


def ring(shared: int, fixed: dict[int, int], slot: int, most: int = 5) -> tuple[int, int] | None:
    """(warps, slots of each one's ring) for `shared` bytes, of which `fixed` [warps] serve for something else. The
    most warps that get three slots, or else the fewest that get two."""
    for warps, least in ((16, 3), (12, 3), (16, 2), (8, 3), (8, 2), (4, 2)):
        if warps in fixed and (stages := (shared - fixed[warps]) // (warps * slot)) >= least:
            return warps, min(stages, most)
    return None


def shared_bytes(arch: int) -> int:
    return SHARED_KIB.get(arch, 227) * 1024


def few_ring(form: tuple[str, int], arch: int) -> tuple[int, int] | None:
    """The ring of matmul_few, or None where it has no form of the weights or the shared memory is too small."""
    kind, group = form
    if kind not in FEW:
        return None
    fixed = {warps: few.fixed_bytes(group, warps) for warps in (16, 12, 8)}
    return ring(shared_bytes(arch), fixed, tiles.slot_bytes(kind, group, few.CHUNK))


def small_ring(form: tuple[str, int], arch: int) -> tuple[int, int]:
    kind, group = form
    found = ring(
        shared_bytes(arch),
        {n: tiles.sums_bytes(n, small.TOKENS) for n in (16, 8, 4)},
        tiles.slot_bytes(kind, group, FORMS[form]),
    )
    assert found, form
    return found


def experts_ring(form: tuple[str, int], arch: int, choice: int = 0) -> tuple[int, int, int]:
    """(warps, slots of a ring, blocks of a multiprocessor) of the products with experts: many small blocks, so that one
    is computed while another waits for its expert's first weights. choice: bytes of a block that chooses for its only token."""
    slot, tokens = tiles.slot_bytes(*form, FORMS[form]), 1 if choice else small.TOKENS
    fixed = tiles.sums_bytes(EXPERT_WARPS, tokens, 1) + choice
    for blocks in (EXPERT_BLOCKS - (form in WIDE), 4, 3, 2, 1):
        stages = (shared_bytes(arch) // blocks - BLOCK_BYTES - fixed) // (EXPERT_WARPS * slot)
        if stages >= 3 or blocks == 1:
            return EXPERT_WARPS, min(stages, 5), blocks
    raise AssertionError(form)


def shift_of(scheme, width: int, form: tuple[str, int]) -> int:
    """log2 of the pieces of columns that share a scale, of forms whose groups a kernel learns as it runs; else 0."""
    if not scheme.groups(width) or form[1] not in (0, 32):
        return 0
    return (scheme.group // (form[1] or few.CHUNK)).bit_length() - 1 if scheme.group else 31
