"""Which scheme each tensor gets when a model is quantized: a rule on shapes, not a list of names."""

from collections import namedtuple

from zse.errors import ConfigError, UnsupportedError
from zse.quant.scheme import BLOCK_COLUMNS, GROUPS, AffineScheme, DenseScheme, Fp8Scheme, Scheme

QUANTS = ("int4", "int5", "int6", "int8", "fp8", "f16", "bf16", "f32")
# One group of the int8 activations. 64 columns raise the error of Student-t weights at 4 bits from 8.4 % to 10.4 % rms.
DEFAULT_GROUP = 32
# The same where weights are quantized while they are loaded. On a GPU 15 % fewer bytes at 4 bits; its activations have no groups of
# their own to match, and Hopper's kernels of e4m3 activations take 128 alone.
LOAD_GROUPS = {"cpu": DEFAULT_GROUP, "gpu": 128}
LOADED = ("int4", "int4-g32", "int4-g128", "int8", "fp8")  # what `--quantize` takes
MIN_ELEMENTS = 1 << 14  # below, a matrix is tiny: 16 Ki weights are 8 KiB as int4 and never worth an error
MIN_ROWS = 16


class Policy(namedtuple("Policy", "quant group head")):
    """quant: what matrices become; head: what matrices with one row per vocabulary entry (embedding, LM head) become.

    group: columns per scale. `head` None follows the default: int8 where quant is an integer type (an error in the
    LM head reaches the logits directly, and it is read once a token), else quant. fp8 has one scale a row.
    Raises UnsupportedError.
    """

    __slots__ = ()

    def __new__(cls, quant: str, group: int | None = None, head: str | None = None):
        for name in (quant, *(() if head is None else (head,))):
            if name not in QUANTS:
                raise UnsupportedError("quantization", name, QUANTS)
        if group is not None and group not in GROUPS:
            raise UnsupportedError("group size", group, GROUPS)
        if group is not None and not quant.startswith("int"):
            raise ConfigError(f"a group size has no meaning for {quant}; leave it out")
        head = head or ("int8" if quant.startswith("int") else quant)
        return super().__new__(cls, quant, DEFAULT_GROUP if group is None else group, head)

    @classmethod
    def of_load(cls, quantize: str, family: str) -> "Policy":
        """What weights become that are quantized for a kind of device while they are loaded: `quantize` names a type, and perhaps
        the group, as "int4-g32" does. Raises UnsupportedError."""
        quant, has_group, group = quantize.partition("-g")
        if has_group and not group.isdecimal():
            raise UnsupportedError("quantization", quantize, LOADED)
        default = LOAD_GROUPS[family] if quant.startswith("int") else None
        return cls(quant, int(group) if has_group else default)

    def scheme(self, shape: tuple[int, ...], vocab_size: int | None, num_experts: int | None = None) -> Scheme | None:
        """The scheme of a tensor of `shape`, or None to leave it as it is: 1-D, above 2-D, tiny, or a router, which has
        one row for each expert (its errors would send tokens elsewhere, and it is 1 / 5,000 of a model).

        Columns that are not a multiple of 32 cannot be grouped and become f16. A group that does not divide the
        columns is halved until it does.
        """
        if len(shape) != 2:
            return None
        rows, columns = shape
        if rows == num_experts and self.quant not in ("f16", "bf16", "f32"):
            return None
        quant = self.head if rows == vocab_size else self.quant
        if quant == "fp8":
            tiny = rows < MIN_ROWS or rows * columns < MIN_ELEMENTS
            return None if tiny else Fp8Scheme("row") if Fp8Scheme("row").fits(columns) else DenseScheme("bf16")
        if not quant.startswith("int"):
            return DenseScheme(quant)
        if rows < MIN_ROWS or rows * columns < MIN_ELEMENTS:
            return None
        if columns % BLOCK_COLUMNS:
            return DenseScheme("f16")
        group = self.group
        while group and columns % group:
            group //= 2
        bits = int(quant[3:])
        # At 8 bits the offset buys nothing: the range is fine enough around zero, and kernels skip a plane.
        return AffineScheme(bits, group, bits == 8)
