"""How many state slots an engine of a model with recurrent layers has, and how often states are kept."""

from typing import NamedTuple

import msgspec

from zse.cache.pages import BLOCK
from zse.cache.states import LEAST_KEPT, StateLayout, layers_parts
from zse.engine.config import EngineConfig, ResolvedConfig, Settings
from zse.models.registry import forward_of

# Of what is left for KV pages, the snapshots of states; and of host memory for pages, what states get there.
SNAPSHOT_SHARE = HOST_SHARE = 1 / 8
# Tokens between two snapshots: a prompt is computed in chunks that end there, and fewer cost more than they save.
LEAST_INTERVAL = 512
# Rows that nobody asked for are as many as have their states, and a snapshot each, in this share of the room.
ROWS_SHARE, LEAST_ROWS = 1 / 4, 8


# More than conversations that are likely to go on; of small states an eighth of a large memory would be a million.
MOST_SNAPSHOTS = 4096


# Host memory through which a conversation comes from files, at least: of pages, and states.
DISK_BYTES, DISK_STATES = 1 << 30, 2


class StatePlan(NamedTuple):
    """num_slots of slot_nbytes each on the device, host_slots of them in host memory; interval: tokens between
    snapshots."""

    num_slots: int
    slot_nbytes: int
    interval: int
    host_slots: int

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.slot_nbytes

    def of(self, config: ResolvedConfig) -> ResolvedConfig:
        """The configuration with these slots; those of host pages are fewer for it."""
        page_bytes = config.kv_bytes // config.num_pages
        host_pages = max(0, config.host_slots - -(-self.host_slots * self.slot_nbytes // page_bytes))
        if config.cache_disk is not None:  # a whole conversation comes back at once, up to where its state is
            host_pages = max(host_pages, min(config.max_context // config.page_size + 1, DISK_BYTES // page_bytes))
        return msgspec.structs.replace(
            config,
            host_slots=host_pages,
            state_slots=self.num_slots,
            state_bytes=self.nbytes,
            state_interval=self.interval,
            host_states=self.host_slots,
        )


def fewer_rows(config: EngineConfig, settings: Settings, model, room_bytes: int) -> Settings:
    """Settings with as many rows as have room for their states, where nobody asked for a number."""
    rows, nbytes = settings.max_rows, _slot_nbytes(model)
    while config.max_rows is None and rows > LEAST_ROWS and 2 * rows * nbytes > ROWS_SHARE * room_bytes:
        rows //= 2
    return msgspec.structs.replace(settings, max_rows=rows)


def plan_states(config: EngineConfig, settings: Settings, model, room_bytes: int, block_bytes: int) -> StatePlan:
    """The StatePlan of a ModelConfig. room_bytes: for states and KV pages together. block_bytes: of BLOCK tokens of
    KV."""
    rows = settings.max_rows
    nbytes, snapshots = _slot_nbytes(model), 0
    share = int(SNAPSHOT_SHARE * room_bytes) if config.state_memory is None else config.state_memory
    if config.keeps_prefixes:
        snapshots = share // nbytes
        if config.state_memory is None:
            snapshots = max(min(snapshots, MOST_SNAPSHOTS), rows)
    # States behind drafts are in slots for a step; snapshots that were not used lately leave them.
    behind = min(rows * settings.draft_tokens, settings.max_drafts)
    snapshots = max(snapshots, min(behind, max(rows, LEAST_KEPT, share // nbytes)))
    interval = config.state_interval
    if interval is None:  # as many tokens as have the bytes of a state in KV
        interval = max(LEAST_INTERVAL, settings.max_tokens_per_step, -(-nbytes * BLOCK // block_bytes))
        interval = -(-interval // BLOCK) * BLOCK
    host = int(HOST_SHARE * config.cache_host_memory) // nbytes
    if not host and config.cache_host_memory >= 2 * nbytes:
        host = 1
    if config.cache_disk is not None:
        host = max(host, DISK_STATES)
    return StatePlan(rows + snapshots, nbytes, interval, host)


def _slot_nbytes(model) -> int:
    return StateLayout(layers_parts(forward_of(model))).nbytes
