"""The Objective-C runtime through ctypes: classes, selectors and messages, as Metal's interface needs them."""

import ctypes
from contextlib import contextmanager
from ctypes import c_char_p, c_ulong, c_void_p

from zse.errors import DeviceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

METAL = "/System/Library/Frameworks/Metal.framework/Metal"
FOUNDATION = "/System/Library/Frameworks/Foundation.framework/Foundation"


class Size(ctypes.Structure):
    """MTLSize."""

    _fields_ = [("width", c_ulong), ("height", c_ulong), ("depth", c_ulong)]


UInt = c_ulong
# Selector → (result, None for void; types of the arguments). Others take and give pointers.
METHODS: dict[str, tuple] = {
    "UTF8String": (c_char_p,),
    "commit": (None,),
    "currentAllocatedSize": (UInt,),
    "dispatchThreadgroups:threadsPerThreadgroup:": (None, Size, Size),
    "endEncoding": (None,),
    "maxThreadgroupMemoryLength": (UInt,),
    "newBufferWithLength:options:": (c_void_p, UInt, UInt),
    "recommendedMaxWorkingSetSize": (ctypes.c_uint64,),
    "release": (None,),
    "setBuffer:offset:atIndex:": (None, c_void_p, UInt, UInt),
    "setBytes:length:atIndex:": (None, c_char_p, UInt, UInt),
    "setComputePipelineState:": (None, c_void_p),
    "setFastMathEnabled:": (None, ctypes.c_bool),
    "setThreadgroupMemoryLength:atIndex:": (None, UInt, UInt),
    "status": (UInt,),
    "stringWithUTF8String:": (c_void_p, c_char_p),
    "waitUntilCompleted": (None,),
}


class ObjC:
    """Messages to objects, which are addresses. DeviceError where there is no Metal."""

    def __init__(self) -> None:
        try:
            self._runtime = ctypes.CDLL("/usr/lib/libobjc.A.dylib")
            ctypes.CDLL(FOUNDATION)
            self._metal = ctypes.CDLL(METAL)
        except OSError as error:
            raise DeviceError(
                f"no Metal: {error}; it comes with macOS on Apple silicon, elsewhere use --device cpu"
            ) from None
        for name, result, arguments in (
            ("objc_getClass", c_void_p, [c_char_p]),
            ("sel_registerName", c_void_p, [c_char_p]),
            ("objc_autoreleasePoolPush", c_void_p, []),
            ("objc_autoreleasePoolPop", None, [c_void_p]),
        ):
            function = getattr(self._runtime, name)
            function.restype, function.argtypes = result, arguments
        # Selector → (objc_msgSend as the method is declared, the selector's number).
        self._methods: dict[str, tuple[Any, int]] = {}
        self._address = ctypes.cast(self._runtime.objc_msgSend, c_void_p).value or 0

    def default_device(self) -> int:
        """MTLCreateSystemDefaultDevice: 0 when there is none."""
        function = self._metal.MTLCreateSystemDefaultDevice
        function.restype = c_void_p
        return function() or 0

    def send(self, receiver: int, selector: str, *args: "Any") -> "Any":
        """`[receiver selector: args...]`, called as METHODS says. An answer that is an address is 0 for nil."""
        result, *types = METHODS.get(selector) or (c_void_p, *[c_void_p] * len(args))
        found = self._methods.get(selector)
        if found is None:
            prototype = ctypes.CFUNCTYPE(result, c_void_p, c_void_p, *types)
            name = self._runtime.sel_registerName(selector.encode())
            found = self._methods[selector] = prototype(self._address), name
        function, name = found
        answer = function(receiver, name, *args)
        return answer or 0 if result is c_void_p else answer

    def string(self, text: str) -> int:
        """An autoreleased NSString."""
        return self.send(self._runtime.objc_getClass(b"NSString"), "stringWithUTF8String:", text.encode())

    def make(self, name: str) -> int:
        """A new object of a class, to be released."""
        return self.send(self._runtime.objc_getClass(name.encode()), "new")

    def text(self, string: int) -> str:
        """The Python string of an NSString."""
        found = self.send(string, "UTF8String") if string else None
        return (found or b"").decode("utf-8", "replace")

    @contextmanager
    def pool(self) -> "Iterator[None]":
        """An autorelease pool: what is autoreleased inside is released at the end."""
        pool = self._runtime.objc_autoreleasePoolPush()
        try:
            yield
        finally:
            self._runtime.objc_autoreleasePoolPop(pool)
