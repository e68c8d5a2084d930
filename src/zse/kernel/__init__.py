"""The kernel language: `from zse import kernel as zl`, then `@zl.kernel`, `zl.Ptr[zl.f32, "const"]`, `zl.load(...)`."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)  # first: language imports ir through it

from zse.kernel.language import (  # noqa: E402, F401
    BUILTINS,
    Kernel,
    Ptr,
    Record,
    TensorMap,
    Variant,
    bf16,
    bool_,
    e4m3,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    index,
    inline,
    kernel,
    static,
    target,
    u8,
    u16,
    u32,
    u64,
)

globals().update(BUILTINS)
