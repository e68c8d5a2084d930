"""Between the engine and its grammar process: msgpack, one message a packet of multiprocessing.connection; and words
behind the masks in the shared memory, in which most steps of one request are answered."""

import os
import platform
import sys

import msgspec

from zse.structured.options import Structure

# The last words of the shared memory, 8 bytes each. WHOSE: whose mask is being computed, should the process die of it.
# ANSWERED: the number of the last MaskStep, from 1 on, that is answered here: its one line is KIND (FREE, MASKED) and
# took US microseconds. IS_AWAITED: the engine has nothing else to do, and is woken by a message. A step has one answer,
# here or as a message: a message costs the engine 70 µs behind a forward, which has emptied the caches, a word 2
# (benchmarks/LOG.md). ASKED: the number of the last step that asks here: for the mask of the request ID, behind TOKEN,
# in LINE. The engine then writes to an eventfd, 25 to 45 µs with the other process to be woken, where a message takes it
# 65.
WHOSE, ANSWERED, KIND, US, IS_AWAITED, ASKED, ID, TOKEN, LINE = range(9)
WORDS_BYTES = 72
NOBODY = -1
# A word must not be seen before the mask that was written before it: x86 keeps the order of stores, and of loads.
ANSWERS_IN_MEMORY = platform.machine().lower() in ("x86_64", "amd64")
ASKS_IN_MEMORY = ANSWERS_IN_MEMORY and hasattr(os, "eventfd")
ONE = (1).to_bytes(8, sys.byteorder)  # what an eventfd is written to be readable
FREE, MASKED = 0, 1  # of a line: no mask, or the one that stands in the shared memory


class Open(msgspec.Struct, tag=True, array_like=True):
    """engine → process: a request of a tenant begins. Answered by Opened. checks: whether its grammar is checked though
    it is plain: the process before ended while it had it."""

    id: int
    structure: Structure
    tenant: str = ""
    checks: bool = False


class Opened(msgspec.Struct, tag=True, array_like=True):
    """process → engine: its grammar is compiled, or why not. code: invalid_schema, schema_too_complex or
    rate_limit_exceeded."""

    id: int
    error: str = ""
    code: str = ""
    compile_ms: float = 0.0


class MaskJob(msgspec.Struct, array_like=True):
    """tokens: sampled since the last job of the request. line: where its first mask goes; drafts: tokens that may
    follow, each with a mask in the next line. drawn: tokens that were drawn behind one another without a mask, the
    first at `line`: they are taken as far as the grammar allows them, and only the first that it does not has a mask,
    in its line."""

    id: int
    tokens: list[int]
    line: int
    drafts: list[int] = []
    drawn: list[int] = []


class MaskStep(msgspec.Struct, tag=True, array_like=True):
    """engine → process: masks for a step. Answered by Stepped, or in memory. number: of the step, from 1 on.
    looks_ahead: whether it tells what is forced."""

    jobs: list[MaskJob]
    number: int
    looks_ahead: bool = False


class Stepped(msgspec.Struct, tag=True, array_like=True):
    """process → engine. kinds: FREE or MASKED for each line of each job; of one with drawn tokens FREE for each that
    was taken, then MASKED if one was refused. failures: id → why its grammar cannot go on. us: microseconds that it
    took. number: of the MaskStep. forced: id → token that its last line with a mask allows → tokens that must come
    behind it."""

    kinds: list[list[int]]
    failures: dict[int, str]
    us: float
    number: int
    forced: dict[int, dict[int, list[int]]] = {}


class Close(msgspec.Struct, tag=True, array_like=True):
    """engine → process: requests that ended."""

    ids: list[int]


ToProcess = Open | MaskStep | Close
FromProcess = Opened | Stepped
