"""ZSE: an inference engine and server for open-weight language models that owns its stack."""

__version__ = "0.1.0"

# What `from zse import …` gives beside the version, imported when it is asked for: `zse --help` and the engine's start
# must not import what they do not use.
_PUBLIC = {"LLM": "zse.engine.llm", "SamplingParams": "zse.sampling.params", "BeamParams": "zse.sampling.params"}


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(__import__(_PUBLIC[name], fromlist=[name]), name)
    raise AttributeError(f"module 'zse' has no attribute {name!r}")
