"""From an open file to a model in device memory: plan the bytes, then read and repack every tensor in execution order.

    plan = plan_model(source, family=device.family)     # names, shapes and types are checked, nothing is allocated
    model = load_model(device, plan)            # reading goes on in the device's load threads
    ...                                         # record graphs meanwhile
    model.wait()                                # all weights are there, or FormatError

No NumPy here; only quantize_load.py imports it.
"""

from zse.models.load_jobs import start_loading
from zse.models.weight_plan import ModelPlan, place, plan_model, read_config, require_memory
from zse.tensor import Tensor, Weight

__all__ = ["Model", "ModelPlan", "load_model", "place", "plan_model", "read_config", "require_memory"]


class Model:
    """weights: name ("embed", "layers.0.qkv", ...) → Weight. vectors: name ("layers.0.attn_norm", ...) → f32 Tensor.
    Contents are valid after wait()."""

    def __init__(
        self, plan: ModelPlan, weights: dict[str, Weight], vectors: dict[str, Tensor], buffer, loading, begin=None
    ):
        """loading: the device's Load. begin: () → Load, for start()."""
        self.config, self.weights, self.vectors, self.buffer = plan.config, weights, vectors, buffer
        self.memory_bytes = plan.memory_bytes
        self._source, self._loading, self._begin = plan.source, loading, begin

    def start(self) -> None:
        """Start loading, if load_model() did not."""
        begin, self._begin = self._begin, None
        if begin is not None:
            self._loading = begin()

    @property
    def is_loaded(self) -> bool:
        """Whether wait() would return at once."""
        return self._begin is None and (self._loading is None or self._loading.finished)

    def cancel(self) -> None:
        """Stop loading; the contents are never valid then. After wait() it does nothing."""
        self._begin = None
        if self._loading is not None:
            loading, self._loading = self._loading, None
            loading.cancel()

    def wait(self) -> None:
        """Block until everything is loaded. FormatError if a file ended early or was changed meanwhile."""
        self.start()
        if self._loading is not None:
            loading, self._loading = self._loading, None
            loading.wait()
            self._source.check_unchanged()

    def __del__(self) -> None:
        # Load threads write to the buffer: they are stopped before it goes.
        if getattr(self, "_loading", None) is not None:
            self._loading.cancel()


def load_model(device, plan: ModelPlan, *, max_memory: int | None = None, start: bool = True) -> Model:
    """Allocate device memory for the plan and start loading (start False: Model.start() does); Model.wait() ends it.

    max_memory: bytes; ConfigError when the weights alone are over it. device.family must be the plan's.
    """
    require_memory(plan.memory_bytes, max_memory)
    family = device.kernels
    if family != plan.family:
        raise ValueError(f"a plan for {plan.family} on a {family}")
    buffer = device.alloc(sum(plan.memory_bytes.values()), label="weights")
    weights, vectors = place(plan, buffer)
    model = Model(plan, weights, vectors, buffer, None, lambda: start_loading(device, plan, weights, vectors))
    if start:
        model.start()
    return model
