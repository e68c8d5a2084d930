"""What DeepSeek-VL2 computes, in torch, written from its paper and its authors' code (deepseek-ai/DeepSeek-VL2 at ef9f91e2):
transformers has its text part alone, with latent attention."""

import numpy as np

_TEXT = dict(
    model_type="deepseek_v2",
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=96,
    vocab_size=160,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    q_lora_rank=None,
    kv_lora_rank=256,  # with the rotary part the smallest latents that a GPU has
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=3,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    topk_method="greedy",
    norm_topk_prob=False,
    eos_token_id=1,
    bos_token_id=0,
    tie_word_embeddings=False,
)
CONFIG = dict(
    architectures=["DeepseekVLV2ForCausalLM"],
    model_type="deepseek_vl_v2",
    tile_tag="2D",
    global_view_pos="head",
    candidate_resolutions=[[28, 28], [28, 56], [56, 28], [56, 56]],
    language_config=_TEXT,
    vision_config=dict(model_type="vision", image_size=28, patch_size=4, width=96, layers=3, heads=4, mlp_ratio=1.0834),
    projector_config=dict(model_type="mlp_projector", input_dim=96, n_embed=64),
)
# The smallest published one has Llama's attention.
PLAIN = CONFIG | dict(
    language_config=_TEXT | dict(use_mla=False, kv_lora_rank=None, qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0)
)
SIDE = 28  # of a tile


def tiles(pixels: bytes, height: int, width: int) -> np.ndarray:
    """u8 [tiles, 28, 28, 3], the overview first."""
    whole = np.frombuffer(pixels, np.uint8)
    first = whole[: 3 * SIDE * SIDE].reshape(1, SIDE, SIDE, 3)
    if (height, width) == (SIDE, SIDE):  # which is its only tile, too
        return np.concatenate([first, first])
    rest = whole[3 * SIDE * SIDE :].reshape(height, width, 3)
    cut = [rest[y : y + SIDE, x : x + SIDE] for y in range(0, height, SIDE) for x in range(0, width, SIDE)]
    return np.concatenate([first, np.stack(cut)])


def embedded(state: dict, pixels: bytes, height: int, width: int, mean, std):
    """The rows of an image, f32 [tokens, 64]. state: torch tensors by name."""
    import torch
    from torch.nn import functional

    def linear(x, name):
        return functional.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x, name):
        return functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    sizes = CONFIG["vision_config"]
    heads, patch, layers = sizes["heads"], sizes["patch_size"], sizes["layers"]
    shown = torch.from_numpy(tiles(pixels, height, width)).float() / 255
    shown = ((shown - torch.tensor(mean)) / torch.tensor(std)).permute(0, 3, 1, 2)
    name = "vision.patch_embed.proj"
    x = functional.conv2d(shown, state[f"{name}.weight"], state[f"{name}.bias"], stride=patch)
    count, hidden, side, _ = x.shape
    x = x.flatten(2).transpose(1, 2) + state["vision.pos_embed"]
    for layer in range(layers):
        block = f"vision.blocks.{layer}."
        q, k, v = linear(norm(x, block + "norm1"), block + "attn.qkv").chunk(3, dim=-1)
        q, k, v = (each.reshape(count, -1, heads, hidden // heads).transpose(1, 2) for each in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + linear(mixed, block + "attn.proj")
        inner = functional.gelu(linear(norm(x, block + "norm2"), block + "mlp.fc1"), approximate="tanh")
        x = x + linear(inner, block + "mlp.fc2")
    x = norm(x, "vision.norm").transpose(1, 2).reshape(count, hidden, side, side)
    x = functional.unfold(functional.pad(x, (0, side % 2, 0, side % 2)), 2, stride=2).transpose(1, 2)
    x = linear(functional.gelu(linear(x, "projector.layers.0")), "projector.layers.2")
    wide = (side + 1) // 2
    x = x.reshape(count, wide, wide, -1)
    rows, columns = height // SIDE, width // SIDE
    across = [torch.cat(list(x[1 + row * columns : 1 + (row + 1) * columns]), dim=1) for row in range(rows)]

    def ended(part):
        ends = state["image_newline"].expand(len(part), 1, -1)
        return torch.cat([part, ends], dim=1).flatten(0, 1)

    return torch.cat([ended(x[0]), state["view_seperator"][None], ended(torch.cat(across))])


def shapes_of_tower() -> dict[str, list[int]]:
    sizes, out = CONFIG["vision_config"], CONFIG["projector_config"]["n_embed"]
    hidden, inner, p = sizes["width"], int(sizes["width"] * sizes["mlp_ratio"]), sizes["patch_size"]
    products = {"projector.layers.0": (out, 4 * hidden), "projector.layers.2": (out, out)}
    norms = ["vision.norm"]
    for layer in range(sizes["layers"]):
        block = f"vision.blocks.{layer}."
        products |= {f"{block}attn.qkv": (3 * hidden, hidden), f"{block}attn.proj": (hidden, hidden)}
        products |= {f"{block}mlp.fc1": (inner, hidden), f"{block}mlp.fc2": (hidden, inner)}
        norms += [f"{block}norm1", f"{block}norm2"]
    found: dict[str, list[int]] = {"vision.patch_embed.proj.weight": [hidden, 3, p, p]}
    found |= {"vision.patch_embed.proj.bias": [hidden], "vision.pos_embed": [1, (SIDE // p) ** 2, hidden]}
    found |= {"image_newline": [out], "view_seperator": [out]}
    for name, shape in products.items():
        found |= {f"{name}.weight": [*shape], f"{name}.bias": [shape[0]]}
    return found | {f"{name}.{part}": [hidden] for name in norms for part in ("weight", "bias")}


def text_model(config: dict):
    """transformers' DeepSeek V2; with Llama's attention where the config says so."""
    import transformers

    text = {name: value for name, value in config["language_config"].items() if name not in ("use_mla", "model_type")}
    plain = config["language_config"].get("use_mla", True) is False
    usual = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32)
    found = transformers.DeepseekV2Config(**text | (usual if plain else {}))
    found._attn_implementation = "eager"
    model = transformers.DeepseekV2ForCausalLM(found).eval()
    if plain:
        for layer in model.model.layers:
            layer.self_attn = _plain_attention(found)
    return model


def _plain_attention(config):
    import torch

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(self, name, torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False))

        def forward(self, hidden_states, **_):
            length, heads = hidden_states.shape[1], config.num_attention_heads
            dim = config.hidden_size // heads
            turns = torch.arange(length)[:, None] * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
            cos, sin = turns.cos(), turns.sin()

            def of_heads(product, does_turn):
                x = product(hidden_states).reshape(1, length, heads, dim).transpose(1, 2)
                first, second = x.chunk(2, dim=-1)
                turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
                return turned if does_turn else x

            q, k, v = of_heads(self.q_proj, True), of_heads(self.k_proj, True), of_heads(self.v_proj, False)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o_proj(mixed.transpose(1, 2).reshape(hidden_states.shape)), None

    return Plain()


def references(family: str, tiny) -> dict[str, np.ndarray]:
    """As tiny_vision.references()."""
    import torch

    model = text_model(tiny.CONFIGS[family])
    named = shapes_of_tower()
    named |= {f"language.{name}": list(value.shape) for name, value in model.state_dict().items()}
    state = {name: torch.from_numpy(values.copy()) for name, values in tiny.weights(family, named).items()}
    text = {name.removeprefix("language."): value for name, value in state.items() if name.startswith("language.")}
    model.load_state_dict(text)
    found = {f"{family} shapes": tiny.packed(named)}
    how = tiny.vision(family)

    def rows(height, width, pixels):
        return embedded(state, pixels, height, width, how.mean, how.std)

    with torch.no_grad():
        for number in range(2):
            height, width, pixels = tiny.image(family, number)
            found[f"{family} image {number}"] = rows(height, width, pixels).numpy()[None]
        for number in range(len(tiny.PROMPTS)):
            ids, images = tiny.prompt(family, number)
            x = model.get_input_embeddings()(torch.tensor([ids]))
            for one in images:
                x[0, one.start : one.start + one.count] = rows(one.height, one.width, one.pixels)
            behind = slice(images[-1].start + images[-1].count - 1, None)
            found[f"{family} logits {number}"] = model(inputs_embeds=x).logits[0, behind].float().numpy()
    return found
