"""Scalings of RoPE, as a config.json says them: what references.npz has frequencies of, under "rope NAME"."""

THETA = 500000.0
CONTEXTS = (0, 256, 1000)  # the longest sequence, 256 of which the model was trained with; 0: not said
LONGROPE = dict(
    rope_type="longrope",
    original_max_position_embeddings=64,
    short_factor=[1 + i / 64 for i in range(64)],
    long_factor=[1.5 + i / 8 for i in range(64)],
)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN_16_2 = dict(original_max_position_embeddings=4096, beta_fast=16.0, beta_slow=2.0, truncate=False)
YARN_64 = dict(rope_type="yarn", original_max_position_embeddings=64)
SCALINGS: dict[str, dict] = {
    "default": dict(rope_type="default"),
    "linear": dict(rope_type="linear", factor=8.0),
    "llama3": dict(rope_type="llama3", **LLAMA3),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    "yarn that says all": dict(rope_type="yarn", factor=4.0, attention_factor=1.25, **YARN_16_2),
    "yarn, mscale 1": YARN_64 | dict(factor=16.0, mscale=1.0, mscale_all_dim=1.0),
    "yarn, mscale 0.707": YARN_64 | dict(factor=40.0, mscale=0.707, mscale_all_dim=1.0),
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "longrope": LONGROPE,
    "longrope, attention 1.5": LONGROPE | dict(attention_factor=1.5),
    "longrope, factor 32": LONGROPE | dict(factor=32.0),
}
