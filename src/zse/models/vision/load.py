"""From a model's files to a tower in device memory. Planning checks every tensor and counts the memory; loading makes
the weights in NumPy, in a thread of the caller's."""

import os
from typing import Any, NamedTuple

import msgspec

from zse.errors import FormatError, UnsupportedError
from zse.formats import opening
from zse.formats.source import ModelSource
from zse.lazy import logging
from zse.lazy import numpy as np
from zse.models.config import Fields, ModelConfig
from zse.models.config_parts import MAX_WIDTH
from zse.models.vision.config import VisionConfig
from zse.models.vision.read import vision_from_gguf, vision_from_hf
from zse.models.vision.registry import GGUF_KINDS, tower_class
from zse.models.vision.tower import Tower, TowerReader
from zse.models.weight_plan import ALIGN, MatrixPlan, aligned, placed_bytes, weight_at
from zse.quant.scheme import AffineScheme, DenseScheme, Scheme, memory_layout
from zse.tensor import Tensor, Weight

INT8 = AffineScheme(8, 32, True)
GPU_COLUMNS = 16  # of a product's inputs a multiple
DENSE = {"F32": "f32", "BF16": "bf16"}  # else f16


class TowerPlan(NamedTuple):
    """source: the open file that has the tower's tensors, the model's own or an mmproj file. matrices, vectors: in
    memory, f32 [size] the latter. sections: see Tower.sections(), of the text model."""

    source: ModelSource
    vision: VisionConfig
    forward: Tower
    matrices: tuple[MatrixPlan, ...]
    vectors: dict[str, int]
    family: str
    sections: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of device memory for the weights."""
        align = ALIGN[self.family]
        vectors = sum(aligned(4 * size, align) for size in self.vectors.values())
        return vectors + sum(placed_bytes(matrix, align) for matrix in self.matrices)


def find_tower(
    source: ModelSource, mmproj: str | None, config: ModelConfig, quantize: str | None, family: str
) -> TowerPlan | None:
    """The tower of an open model: of the file `mmproj`; else its own; else of a GGUF that lies beside it, one with 16 bits
    first, which is left out with a warning where it does not fit. Raises FormatError, UnsupportedError."""
    if not config.causal:
        if mmproj is not None:
            raise UnsupportedError("images", "of a model that writes no text", ["a model that writes text"])
        return None
    if mmproj is not None:
        return _beside(source, mmproj, config, quantize, family)
    if source.kind != "gguf":
        return plan_tower(source, None, config, quantize=quantize, family=family)
    folder = os.path.dirname(os.path.abspath(source.path))
    names = sorted(name for name in os.listdir(folder) if "mmproj" in name.lower() and name.endswith(".gguf"))
    names.sort(key=lambda name: "f16" not in name.lower())
    for name in names:
        try:
            return _beside(source, os.path.join(folder, name), config, quantize, family)
        except (FormatError, UnsupportedError) as error:
            logging.getLogger("zse.engine").warning("images are not taken: %s", error)
    return None


def _beside(source: ModelSource, path: str, config: ModelConfig, quantize: str | None, family: str) -> TowerPlan | None:
    found = opening.open_model(path)
    try:
        if found.architecture != "clip":
            raise UnsupportedError(f"{path}: architecture of an mmproj file", found.architecture, ["clip"])
        return plan_tower(source, found, config, quantize=quantize, family=family)
    except BaseException:
        found.close()
        raise


def plan_tower(
    source: ModelSource, beside: ModelSource | None, config: ModelConfig, *, quantize: str | None, family: str
) -> TowerPlan | None:
    """The tower of an open model, of its own files or an mmproj file `beside`; None where there is none that is known.
    config: of the text model. quantize: int8 for every matrix of whole groups ("int4" as well: a tower is small).
    Raises FormatError, UnsupportedError."""
    text, path, fields = source, source.path, Fields(source.path, source.hf_config or {})
    if beside is not None:
        source, path = beside, beside.path
        fields = Fields(path, beside.metadata, "clip.vision")
        vision = vision_from_gguf(path, beside.metadata)
    elif source.naming == "hf" and source.kind == "safetensors":
        vision = vision_from_hf(path, fields.values, source.image_processor)
    else:
        vision = None
    kind = tower_class(vision.family) if vision is not None else None
    if vision is None or kind is None:
        if beside is not None:
            name = fields.get("clip.projector_type") or fields.get(".projector_type")
            raise UnsupportedError(f"{path}: clip.projector_type", name, GGUF_KINDS)
        return None
    section = fields.section("vision_config") or fields
    kernels = "cpu int8" if quantize is not None and family == "cpu" else family
    if beside is not None:
        tower = _checked(path, lambda: kind.tower_from_gguf(fields, config.hidden_size, kernels, source.tensors))
    else:
        tower = _checked(path, lambda: kind.tower_from_hf(fields, section, kernels))
    if tower.out != config.hidden_size:
        raise FormatError(source.path, 0, "projection", f"{tower.out} columns, the text model has {config.hidden_size}")
    if beside is not None and vision.windowed and config.ple_width:  # E2B's and E4B's images do not see what follows
        vision = msgspec.structs.replace(vision, whole=False)
    forward = kind(tower, vision)
    down = source.tensors.get("v.blk.0.ffn_down.weight")
    if down is not None and tuple(down.shape) == (tower.inner, tower.layers.hidden_size):
        forward.swaps = tower.inner != tower.layers.hidden_size
    sizes = _section_sizes(text)
    half = config.rope.dims(config.head_dim) // 2
    sections = forward.sections(sizes, half) if sum(sizes) == half else ()
    if forward.sections((half, 0, 0), half) and not sections:
        raise FormatError(text.path, 0, "mrope_section", f"{list(sizes)} do not make up the {half} pairs of a head")
    return _placed(source, vision, forward, quantize, family)._replace(sections=sections)


def _section_sizes(text: ModelSource) -> tuple[int, ...]:
    """`mrope_section` of the text model, without zeros behind."""
    if text.naming == "gguf":
        found = text.metadata.get(f"{text.architecture}.rope.dimension_sections")
        values = list(found) if found is not None and hasattr(found, "__len__") else []
    else:
        config = (text.hf_config or {}).get("text_config") or text.hf_config or {}
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        values = rope.get("mrope_section") or []
    if not all(type(value) is int and 0 <= value < MAX_WIDTH for value in values):
        raise FormatError(text.path, 0, "mrope_section", "is not a list of sizes")
    return tuple(values[:3])


def _checked(path: object, make):
    try:
        return make()
    except (TypeError, ValueError) as error:
        field, _, reason = str(error).partition(": ")
        raise FormatError(path, 0, field, reason or "is refused") from None


def _placed(source, vision, forward: Tower, quantize: str | None, family: str) -> TowerPlan:
    reader = TowerReader(source, type(forward))
    # A GPU multiplies in bf16 whatever 16 bits the file has.
    dense: Scheme = DenseScheme("bf16") if family == "gpu" else _dense(source)
    matrices, vectors = [], {}
    for weight in forward.weights(source.naming):
        for stored in weight.stored:
            reader.find(stored)
        if weight.name in forward.on_host:
            continue
        if len(weight.shape) == 1:
            vectors[weight.name] = weight.shape[0]
            continue
        rows, columns = weight.shape
        if family == "gpu":
            columns += -columns % GPU_COLUMNS  # of the product with patches: 588 become 592, with zeros
        scheme = dense
        if quantize is not None and INT8.fits(columns) and family == "cpu":
            scheme = INT8
        matrices.append(MatrixPlan(weight.name, (rows, columns), scheme, (), memory_layout(scheme, family)))
    return TowerPlan(source, vision, forward, tuple(matrices), vectors, family)


def _dense(source: ModelSource) -> Scheme:
    """The type of numbers that most of the file has."""
    name = "v.patch_embd.weight" if source.naming == "gguf" else ""
    types = [info.type for key, info in source.tensors.items() if key == name or ("vision" in key or "visual" in key)]
    return DenseScheme(DENSE.get(types[0], "f16") if types else "f16")


class TowerModel:
    """What a Planner asks of a model, and `host`: f32 arrays that the host reads. load() fills it."""

    host_layers = lazy_experts = host_experts = share = None

    def __init__(self, device: Any, plan: TowerPlan):
        """Allocates. Raises DeviceError."""
        self.config, self._plan, self._device = plan.forward.config, plan, device
        self.buffer = device.alloc(plan.nbytes, label="vision tower")
        self.weights: dict[str, Weight] = {}
        self.vectors: dict[str, Tensor] = {}
        self.host: dict[str, Any] = {}
        at, align = 0, ALIGN[plan.family]
        for name, size in plan.vectors.items():
            self.vectors[name] = Tensor(self.buffer, (size,), "f32", at)
            at += aligned(4 * size, align)
        for matrix in plan.matrices:
            self.weights[matrix.name] = weight_at(matrix, self.buffer, at, align, None)
            at += placed_bytes(matrix, align)

    def load(self) -> None:
        """Read and make every weight. FormatError, UnsupportedError, DeviceError."""
        plan, device = self._plan, self._device
        reader, matrices = TowerReader(plan.source, type(plan.forward)), {each.name: each for each in plan.matrices}
        for weight in plan.forward.weights(plan.source.naming):
            values = reader.read(weight)
            if weight.name in plan.forward.on_host:
                self.host[weight.name] = values
                continue
            matrix = matrices.get(weight.name)
            if matrix is None:
                device.write(self.vectors[weight.name], values.tobytes())
                continue
            if matrix.shape != values.shape:
                values = np.pad(values, [(0, 0), (0, matrix.shape[1] - values.shape[1])])
            try:
                planes = matrix.scheme.quantize(values, matrix.layout)
            except ValueError as error:
                raise FormatError(plan.source.path, 0, weight.name, f"cannot become {matrix.scheme}: {error}") from None
            for plane in matrix.planes:
                device.write(self.weights[weight.name].planes[plane.name], planes[plane.name].tobytes())
        plan.source.check_unchanged()
