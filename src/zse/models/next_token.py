"""The block behind a model's last layer that predicts the token after the next one (multi-token prediction, MTP; DeepSeek-V3,
arXiv 2412.19437, section 2.2), whose predictions are drafts: of Qwen3-Next and Qwen3.5 (`mtp.*`), of GLM-4.5 and models of
DeepSeek V3's class (the layer behind the last one), in GGUF `blk.N.nextn.*`.

It is a decoder of one layer that shares the model's embedding and head. Its stream begins as
eh_proj · [norm of the token's embedding, norm of the state before the token]: of the model behind its final norm, or, for drafts
behind a draft, its own behind its own (transformers' MtpLayer, llama.cpp's graph_mtp)."""

from collections.abc import Iterator
from math import lcm
from typing import ClassVar

import msgspec

from zse.errors import FormatError, UnsupportedError
from zse.formats.source import ModelSource
from zse.models.config import ModelConfig
from zse.models.decoder import Decoder
from zse.models.deepseek import DeepSeek
from zse.models.glm4_moe import Glm4Moe
from zse.models.names import Role
from zse.models.qwen3_next import Qwen3Next, Qwen35
from zse.models.registry import architecture
from zse.models.shares import HEAD_UNIT
from zse.models.weight_plan import ModelPlan, plan_model
from zse.plan.trace import Value
from zse.tensor import Weight

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.models.load import Model

# Role → names behind the block's prefix: in GGUF, in folders of GLM and DeepSeek, and behind "mtp." in Qwen's.
NAMES = {
    "enorm": ("nextn.enorm.weight", "enorm.weight", "pre_fc_norm_embedding.weight"),
    "hnorm": ("nextn.hnorm.weight", "hnorm.weight", "pre_fc_norm_hidden.weight"),
    "embed_proj": ("nextn.eh_proj.weight", "eh_proj.weight", "fc.weight"),
    "hidden_proj": ("nextn.eh_proj.weight", "eh_proj.weight", "fc.weight"),
    "final_norm": ("nextn.shared_head_norm.weight", "shared_head.norm.weight", "norm.weight"),
}


class NextToken(Decoder):
    """What the blocks share. apart: a folder has it under "mtp." and not among the layers."""

    apart: ClassVar[bool] = False

    @classmethod
    def roles(cls, config: ModelConfig) -> Iterator[Role]:
        hidden = config.hidden_size
        for at, name in enumerate(("embed_proj", "hidden_proj")):
            yield Role(name, (hidden, hidden), "matrix", columns=(at * hidden, 2 * hidden))
        for name in ("enorm", "hnorm"):
            yield Role(name, (hidden,), "norm")
        for role in cls.layer_roles(config, 0):
            yield msgspec.structs.replace(role, name=f"layers.0.{role.name}")
        yield Role("final_norm", (hidden,), "norm")

    @classmethod
    def file_name(cls, config: ModelConfig, role: str, naming: str, prefix: str) -> str:
        layer = config.follows
        gguf, hf, apart = NAMES.get(role, ("", "", ""))
        if naming == "gguf":
            # Without a norm of its own the block takes the model's.
            other = "|output_norm.weight" if role == "final_norm" else ""
            return f"blk.{layer}.{gguf}{other}" if gguf else cls.gguf_name(f"layers.{layer}.{role.split('.')[2]}")
        if cls.apart:
            return f"mtp.{apart}" if apart else cls.hf_name(role, "mtp.")
        return f"{prefix}layers.{layer}.{hf}" if hf else cls.hf_name(f"layers.{layer}.{role.split('.')[2]}", prefix)

    def begin(self) -> Value:
        return self._begin("model_norm")

    def begin_again(self) -> Value:
        """The stream behind a draft: of the block's own state."""
        return self._begin("final_norm")

    def _begin(self, norm: str) -> Value:
        state = self.norm(self.taken(norm), "hnorm")
        embedded = self.trace.add("embed", (), state.width, {"weight": "embed"}, scale=self.config.embed_scale)
        weights = {"weight": "embed_proj"}
        inputs = (self.norm(embedded, "enorm"),)
        x = self.trace.add("linear", inputs, state.width, weights, is_stream=True, exact=False)
        return x + self.linear(state, "hidden_proj")


class Qwen3NextBlock(NextToken, Qwen3Next):
    apart = True


class Qwen35Block(NextToken, Qwen35):
    apart = True


class Glm4MoeBlock(NextToken, Glm4Moe):
    pass


class DeepSeekBlock(NextToken, DeepSeek):
    pass


# ModelConfig.architecture of a model → of its block.
BLOCKS = {
    "qwen3_next": "qwen3_next_mtp",
    "qwen3_5": "qwen3_5_mtp",
    "glm4_moe": "glm4_moe_mtp",
    "deepseek": "deepseek_mtp",
}


def block_config(path: object, config: ModelConfig) -> ModelConfig:
    """The configuration of the block behind the model of `config`. UnsupportedError where its architecture has none."""
    if config.architecture not in BLOCKS:
        raise UnsupportedError(f"{path}: --speculation mtp for models of the architecture", config.architecture, BLOCKS)
    moe = config.moe and msgspec.structs.replace(config.moe, dense_layers=())
    return msgspec.structs.replace(
        config,
        tied_head=False,
        architecture=BLOCKS[config.architecture],
        follows=config.num_layers,
        num_layers=1,
        moe=moe,
        **dict.fromkeys(("mixers", "sliding_layers", "nope_layers", "intermediate_sizes", "dense"), ()),
    )


def plan_block(
    source: ModelSource, config: ModelConfig, *, quantize: str | None = None, family: str = "cpu"
) -> ModelPlan:
    """The plan of the block in an open file, behind the model of `config`; share() gives it the rest. FormatError for a file
    without one."""
    block = block_config(source.path, config)
    model = architecture(block.architecture)
    prefix = model.hf_prefix(source.path, source.tensors) if source.naming == "hf" else ""
    name = model.file_name(block, "embed_proj", source.naming, prefix)
    if name not in source.tensors:
        why = "has no next-token block to draft with: leave --speculation mtp out, or take a file that was made with it"
        raise FormatError(source.path, 0, name, why)
    return plan_model(source, quantize=quantize, family=family, config=block)


def share(block: "Model", model: "Model") -> None:
    """The block computes with the embedding and the head of its model, and begins behind its final norm. Of a head that ranks share it
    has this rank's rows, on rank 0 the first ones."""
    is_tied = (model.config if model.share is None else model.share.whole).tied_head
    block.weights["embed"] = model.weights["embed"]
    block.weights["head"] = model.weights["embed" if is_tied else "head"]
    block.vectors["model_norm"] = model.vectors["final_norm"]


def first_rows(weight: Weight, count: int) -> Weight:
    """The first rows of a weight, in its memory: `count`, and what shares a tile or a scale with them.

    Byte-pair encodings number tokens as they were merged, the frequent ones first, so that these rows of a head make most drafts
    (as FR-Spec's, arXiv 2502.14856, which ranks them by counts, and the mapping to fewer ids of EAGLE-3, arXiv 2503.01840)."""
    rows, columns = weight.shape
    unit = lcm(HEAD_UNIT, weight.scheme.row_unit)
    count = min(-(-count // unit) * unit, rows)
    planes = {
        plane.name: weight.planes[plane.name]._replace(shape=plane.shape)
        for plane in weight.scheme.planes(count, columns, weight.layout)
    }
    return weight._replace(shape=(count, columns), planes=planes)
