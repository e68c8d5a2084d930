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
# All types by their numbers, "-" for one that was given up. Only for messages: a type we do not read is named, not numbered.
_NAMES = """F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S
    IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 - - - TQ1_0 TQ2_0 - - - MXFP4 NVFP4""".split()
OTHER_TYPES = {number: name for number, name in enumerate(_NAMES) if number not in TYPES and name != "-"}
