"""Element types that tensors are made of, and their sizes in bytes."""

ITEM_BYTES = {
    "bool": 1,
    "i8": 1,
    "u8": 1,
    "e4m3": 1,
    "i16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "i32": 4,
    "u32": 4,
    "f32": 4,
    "i64": 8,
    "u64": 8,
    "f64": 8,
}

# memoryview formats for host access; bf16 and e4m3 have none and f16's cannot be cast to: they are seen as u16 and u8.
VIEW_FORMAT = {
    "bool": "?",
    "i8": "b",
    "u8": "B",
    "e4m3": "B",
    "i16": "h",
    "u16": "H",
    "f16": "H",
    "bf16": "H",
    "i32": "i",
    "u32": "I",
    "f32": "f",
    "i64": "q",
    "u64": "Q",
    "f64": "d",
}
