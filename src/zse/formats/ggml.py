"""ggml's tensor types: their numbers, blocks, and what each is as a scheme of this package."""

from zse.quant.scheme import AffineScheme

# type number -> name, elements of a block, bytes of a block
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}
BLOCKS = {name: (elements, nbytes) for name, elements, nbytes in TYPES.values()}
# Each quantized type as affine groups; zse.formats.gguf_blocks has the formulas, EXACT says where nothing is rounded.
AFFINE = {
    "Q4_0": AffineScheme(4, 32, True),
    "Q4_1": AffineScheme(4, 32, False),
    "Q5_0": AffineScheme(5, 32, True),
    "Q5_1": AffineScheme(5, 32, False),
    "Q8_0": AffineScheme(8, 32, True),
    "Q4_K": AffineScheme(4, 32, False),
    "Q5_K": AffineScheme(5, 32, False),
    "Q6_K": AffineScheme(6, 16, True),
}
EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
# Only for messages: a type we do not read is named, not numbered.
OTHER_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
