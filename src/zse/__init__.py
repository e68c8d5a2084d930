"""ZSE: an inference engine and server for open-weight language models that owns its stack."""

__version__ = "0.1.0"


def __getattr__(name: str):
    # Lazy: `zse --help` and the engine's start path must not import what they do not use.
    if name == "LLM":
        from zse.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from zse.sampling.params import SamplingParams

        return SamplingParams
    if name == "BeamParams":
        from zse.sampling.params import BeamParams

        return BeamParams
    raise AttributeError(f"module 'zse' has no attribute {name!r}")
