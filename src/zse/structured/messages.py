"""Between the engine and its grammar process: msgpack, one message a packet of multiprocessing.connection."""

import msgspec

from zse.structured.options import Structure

# In the last 8 bytes of the shared memory: whose mask is being computed, should the process die of it.
NOBODY = -1
FREE, MASKED = 0, 1  # of a line: no mask, or the one that stands in the shared memory


class Open(msgspec.Struct, tag=True, array_like=True):
    """engine → process: a request of a tenant begins. Answered by Opened."""

    id: int
    structure: Structure
    tenant: str = ""


class Opened(msgspec.Struct, tag=True, array_like=True):
    """process → engine: its grammar is compiled, or why not. code: invalid_schema, schema_too_complex or
    rate_limit_exceeded."""

    id: int
    error: str = ""
    code: str = ""
    compile_ms: float = 0.0


class MaskJob(msgspec.Struct, array_like=True):
    """tokens: sampled since the last job of the request. line: where its first mask goes; drafts: tokens that may follow,
    each with a mask in the next line. drawn: tokens that were drawn behind one another without a mask, the first at `line`:
    they are taken as far as the grammar allows them, and only the first that it does not has a mask, in its line."""

    id: int
    tokens: list[int]
    line: int
    drafts: list[int] = []
    drawn: list[int] = []


class MaskStep(msgspec.Struct, tag=True, array_like=True):
    """engine → process: masks for a step. Answered by Stepped. looks_ahead: whether it tells what is forced."""

    jobs: list[MaskJob]
    looks_ahead: bool = False


class Stepped(msgspec.Struct, tag=True, array_like=True):
    """process → engine. kinds: FREE or MASKED for each line of each job; of one with drawn tokens FREE for each that was
    taken, then MASKED if one was refused. failures: id → why its grammar cannot go on. us: microseconds that it took.
    forced: id → token that its last line with a mask allows → tokens that must come behind it."""

    kinds: list[list[int]]
    failures: dict[int, str]
    us: float
    forced: dict[int, dict[int, list[int]]] = {}


class Close(msgspec.Struct, tag=True, array_like=True):
    """engine → process: requests that ended."""

    ids: list[int]


ToProcess = Open | MaskStep | Close
FromProcess = Opened | Stepped
