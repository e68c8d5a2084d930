"""ggml's tensor types: their numbers, blocks, and what each is as a scheme of this package."""

from zse.quant.scheme import AffineScheme, Lut4Scheme, Scheme, SuperblockScheme

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
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
BLOCKS = {name: (elements, nbytes) for name, elements, nbytes in TYPES.values()}
# Each quantized type as a scheme; zse.formats.gguf_blocks and gguf_lut4 have the formulas.
SCHEMES: dict[str, Scheme] = {
    "Q4_0": AffineScheme(4, 32, True),
    "Q4_1": AffineScheme(4, 32, False),
    "Q5_0": AffineScheme(5, 32, True),
    "Q5_1": AffineScheme(5, 32, False),
    "Q8_0": AffineScheme(8, 32, True),
    "Q4_K": SuperblockScheme(4),
    "Q5_K": SuperblockScheme(5),
    "Q6_K": SuperblockScheme(6),
    "Q2_K": AffineScheme(4, 16, False),
    "TQ1_0": AffineScheme(4, 256, True),
    "TQ2_0": AffineScheme(4, 256, True),
    "Q1_0": AffineScheme(4, 128, True),
    "Q2_0": AffineScheme(4, 64, True),
    "IQ4_NL": Lut4Scheme("iq4", "f16", 32),
    "IQ4_XS": Lut4Scheme("iq4", "i8", 32),
    "MXFP4": Lut4Scheme("fp4", "e8m0", 32),
    "NVFP4": Lut4Scheme("fp4", "e4m3", 16),
    "Q3_K": Lut4Scheme("int", "i8", 16),
    "IQ3_S": Lut4Scheme("iq3s", "i8", 32),
    "IQ3_XXS": Lut4Scheme("iq3xxs", "i8", 32),
    "IQ2_XXS": Lut4Scheme("iq2", "i8", 32),
    "IQ2_XS": Lut4Scheme("iq2", "i8", 16),
    "IQ2_S": Lut4Scheme("iq2", "i8", 16),
    "IQ1_S": Lut4Scheme("iq1", "i8", 32),
    "IQ1_M": Lut4Scheme("iq1", "i8", 16),
}
ROUNDED = ("Q2_K",)  # its scales are products, which f16 holds to 2**-11; all others are exact
EXACT = tuple(type for type in SCHEMES if type not in ROUNDED)
# All types by their numbers, "-" for one that was given up. Only for messages: a type we do not read is named, not
# numbered.
_NAMES = """F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S
    IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 - - - TQ1_0 TQ2_0 - - - MXFP4 NVFP4 Q1_0 Q2_0""".split()
OTHER_TYPES = {number: name for number, name in enumerate(_NAMES) if number not in TYPES and name != "-"}
