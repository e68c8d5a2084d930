"""The C library of the tokenizers (csrc/*.c), by ctypes: loading it, its functions' types, buffers in and out."""

import ctypes
import os

from zse import trust
from zse.errors import CompileError

LIBRARY = "libzse_tokenizer.so"

_library = None

# Members of zt_source in csrc/tokenizer.h, in order; all are 8 bytes.
SOURCE_FIELDS = """model pre flags tokens tokens_bytes num_tokens scores num_scores types num_types merges merges_bytes num_merges
    control control_bytes num_control control_ids num_control_ids unknown_id""".split()


class Error(ctypes.Structure):
    """zt_error: which array (FIELD_*), the byte offset in it, and why it is refused."""

    _fields_ = [("field", ctypes.c_int64), ("offset", ctypes.c_int64), ("reason", ctypes.c_char * 240)]


def installed() -> str:
    """Where the compiled library belongs."""
    return os.path.join(trust.native_dir(), LIBRARY)


def library(path: str | None = None) -> ctypes.CDLL:
    """The library, loaded at the first call (from `path` or where it is installed). CompileError when it is not
    there."""
    global _library
    if _library is None:
        path = path or installed()
        try:
            loaded = trust.installed_library(path)
        except OSError as error:
            raise CompileError(
                f"{path}: {error.strerror or 'cannot be loaded'}; install zse again where a C compiler "
                "(gcc or clang) is present"
            ) from None
        pointer, size, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64
        text, double = ctypes.c_char_p, ctypes.c_double
        for name, result, arguments in (
            ("zt_new", pointer, (pointer, pointer)),
            ("zt_free", None, (pointer,)),
            ("zt_find", number, (pointer, ctypes.c_char_p, size)),
            ("zt_token_bytes", number, (pointer, number, pointer, size)),
            ("zt_token_type", number, (pointer, number)),
            ("zt_num_tokens", number, (pointer,)),
            ("zt_control_first", None, (pointer, pointer)),
            ("zt_ends_inside", number, (pointer, ctypes.c_char_p, size)),
            ("zt_decode", number, (pointer, pointer, size, number, pointer)),
            ("zt_release", None, (pointer,)),
            ("zt_encode", number, (pointer, ctypes.c_char_p, size, number, pointer, size, pointer)),
            ("zt_pretokenize", number, (number, ctypes.c_char_p, size, pointer, size)),
            ("zt_image", number, (pointer, pointer, size)),
            ("zt_open_image", pointer, (pointer, size, pointer)),
            ("zp_new", pointer, (pointer, size, size, pointer, double, number, text, size, number, pointer, pointer)),
            ("zp_free", None, (pointer,)),
            ("zp_encode", number, (pointer, text, size, pointer)),
        ):
            function = getattr(loaded, name, None)
            if function is None:
                raise CompileError(f"{path}: is of another version of zse ({name} is missing); run python -m zse.build")
            function.restype, function.argtypes = result, arguments
        _library = loaded
    return _library


def address(data: bytes | bytearray | memoryview) -> tuple[int, object]:
    """Where a buffer's bytes are, and the object that must live as long as the address is used."""
    if isinstance(data, memoryview):
        data = data.obj if isinstance(data.obj, bytes) and data.nbytes == len(data.obj) else bytes(data)
    if isinstance(data, bytes):
        return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0, data
    return ctypes.addressof(ctypes.c_char.from_buffer(data)), data
