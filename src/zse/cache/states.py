"""The state of recurrent layers: what a sequence carries from token to token where attention keeps keys of every token.

A slot is the state of one sequence in all layers: the parts of each layer (Decoder.state_parts) one behind the other,
each aligned to ALIGN bytes. Slots lie one behind the other in one buffer, so that a slot moves by one copy.

StateCache has their memory, StateSlots says who has which, as layout.py and pages.py do for pages. A slot is *live*
(the batches of a running sequence write it), *taken* (a copy of a running sequence's, until its tokens are committed),
*kept* (gets the state behind a token of a run with drafts, until it is known which were right), a *snapshot* (stands beside a
node of the prefix tree; nobody writes it), or *free*."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from math import prod
from typing import Any

import msgspec

from zse.cache.eviction import SaltAccount, TreeNode
from zse.cache.pages import HostPool
from zse.cache.prefix import MAX_COMPARED, Match
from zse.tensor import StatePart, Tensor

ALIGN = 64  # bytes: a cache line, and the widest load of a kernel
# Snapshots at the interval that one prompt may take of all: a single long one must not push everybody's out.
PROMPT_SHARE = 1 / 8
NEVER = 1 << 62
# Of all slots those that states behind drafts may have at once, beside prefixes; at least LEAST_KEPT.
KEPT_SHARE, LEAST_KEPT = 1 / 4, 4
Parts = tuple[tuple[str, tuple[int, ...]], ...]


def layers_parts(forward) -> list[Parts]:
    """The parts of every layer of a zse.models.decoder.Decoder. Raises ValueError where they and ModelConfig.mixers do
    not fit."""
    config = forward.config
    found = [tuple(forward.state_parts(config, layer)) for layer in range(config.num_layers)]
    for layer, parts in enumerate(found):
        if bool(parts) != (config.mixer(layer) not in ("attention", "none")):
            raise ValueError(f"layer {layer} ({config.mixer(layer)}) has the state parts {parts}")
    return found


class StateLayout:
    """Where parts lie in a slot. layers: of every layer its parts. places: (layer, name) → the f32 number of the slot
    with which the part begins, and its shape. stride: f32 numbers of a slot; nbytes: its bytes."""

    def __init__(self, layers: Iterable[Parts]):
        self.places: dict[tuple[int, str], tuple[int, tuple[int, ...]]] = {}
        at = 0
        for layer, parts in enumerate(layers):
            for name, shape in parts:
                self.places[layer, name] = at, shape
                at += -(-4 * prod(shape) // ALIGN) * ALIGN // 4
        self.stride, self.nbytes = at, 4 * at


class StateCache:
    """`num_slots` slots in one buffer of the device, zero-filled. tensor: f32 [num_slots, stride]."""

    def __init__(self, device, layout: StateLayout, num_slots: int):
        self.layout, self.num_slots, self.slot_nbytes = layout, num_slots, layout.nbytes
        self.buffer = device.alloc(num_slots * layout.nbytes, label="states")
        self.tensor = Tensor(self.buffer, (num_slots, layout.stride), "f32")

    def part(self, layer: int, name: str) -> StatePart:
        """What a kernel takes as the state of a layer. KeyError where the layer has no such part."""
        place, shape = self.layout.places[layer, name]
        return StatePart(self.tensor, place, shape)

    def address(self, slot: int) -> int:
        """Where a slot begins in device memory."""
        return self.buffer.address + slot * self.layout.nbytes


def state_cache(device, forward, num_slots: int) -> StateCache:
    """Of a zse.models.decoder.Decoder."""
    return StateCache(device, StateLayout(layers_parts(forward)), num_slots)


# A struct, as TreeNode: in C.
class Snapshot(msgspec.Struct, eq=False):
    """The state behind the first `offset` tokens (1 … a page) of `node` and all before it. slot: of the device, or -1;
    then host: of the host. is_filed: there is a file of it."""

    node: TreeNode
    offset: int
    slot: int
    host: int = -1
    is_filed: bool = False


class Shelf:
    """The snapshots of one tier, by tenant, of each the longest unused first."""

    def __init__(self) -> None:
        self._of: dict[SaltAccount, OrderedDict[Snapshot, None]] = {}
        self.count = 0

    def __iter__(self) -> Iterator[Snapshot]:
        return (snapshot for kept in self._of.values() for snapshot in kept)

    def add(self, snapshot: Snapshot) -> None:
        self._of.setdefault(snapshot.node.account, OrderedDict())[snapshot] = None
        self.count += 1

    def remove(self, snapshot: Snapshot) -> None:
        kept = self._of[snapshot.node.account]
        del kept[snapshot]
        self.count -= 1
        if not kept:
            del self._of[snapshot.node.account]

    def touch(self, snapshot: Snapshot) -> None:
        """It was of use."""
        self._of[snapshot.node.account].move_to_end(snapshot)

    def victim(self, but: Snapshot | None = None) -> Snapshot | None:
        """The one, other than `but`, that was used least recently, of the tenant with the most."""
        shelves = self._of.values()
        for kept in sorted(shelves, key=len, reverse=True) if len(self._of) > 1 else shelves:
            found = next((snapshot for snapshot in islice(kept, 2) if snapshot is not but), None)
            if found is not None:
                return found
        return None


class StateSlots:
    """Who has which of `num_slots` slots. interval: tokens between snapshots of a prompt or reply. host: slots of host
    memory. transfer: told of each ("state", slot, slot), ("state out", slot, host slot), ("state in", host slot, slot).

    least_gain: a sequence that begins does not keep its state sooner than so many tokens later: they are computed again
    in less time than a chunk takes that ends there.

    live: sequence → slot. swapped: sequence → host slot. on_device, on_host: the snapshots; one that is evicted from the
    device goes to the host. With a prefix cache `within_reach` ends its matches at a snapshot, and `drop` is told of
    nodes that leave it.

    kept: sequence → the slots that its run with drafts leaves states in, num_saved of all; most_kept: of them at once."""

    least_gain = 32

    def __init__(
        self,
        num_slots: int,
        interval: int,
        host: HostPool | None = None,
        transfer: Callable[[tuple[str, int, int]], object] = lambda transfer: None,
        page_size: int = 0,
        slot_nbytes: int = 0,
    ):
        """page_size: of the prefix cache; 0: there is none. slot_nbytes: of a slot, for counters()."""
        self.slot_nbytes = slot_nbytes
        self.num_slots, self.interval, self.host, self.page_size = num_slots, interval, host or HostPool(0), page_size
        self.transfer = transfer
        self.live: dict[int, int] = {}
        self.swapped: dict[int, int] = {}
        self.filling: set[int] = set()  # slots of the host that a feature has taken and fills
        self.lent = 0  # slots of jobs, and of sequences that ended in flight
        self.num_kept = 0  # snapshots that were made
        self.num_hits = self.num_host_hits = self.num_taken = self.num_evicted = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._taken: dict[int, list[tuple[int, int]]] = {}  # sequence → (tokens, slot), ascending
        self.kept: dict[int, list[int]] = {}
        self.num_saved, self.most_kept = 0, max(LEAST_KEPT, int(num_slots * (KEPT_SHARE if page_size else 1)))
        self._behind: dict[TreeNode, dict[bytes, Snapshot]] = {}  # of a page's parent: by the page's first tokens
        self._at: dict[TreeNode, list[Snapshot]] = {}
        self.on_device, self.on_host = Shelf(), Shelf()

    # -- sequences

    def has_room(self) -> bool:
        """Whether begin() or fork() would find a slot."""
        return bool(self._free) or self.on_device.count > 0

    def begin(self, sequence: int, snapshot: Snapshot | None = None) -> None:
        """A live slot for a sequence, which begins with nothing, a copy of the snapshot, or what it has on the host.
        IndexError where has_room() is False."""
        slot = self._take(snapshot)
        if slot is None:
            if snapshot is None:
                raise IndexError("no state slot is free")
            slot = snapshot.slot  # the last one there is: it becomes the sequence's
            self._forget(snapshot)
        elif snapshot is not None:
            is_near = snapshot.slot >= 0
            self.transfer(("state", snapshot.slot, slot) if is_near else ("state in", snapshot.host, slot))
            self._shelf(snapshot).touch(snapshot)
            self.num_host_hits += not is_near
        self.num_hits += snapshot is not None
        self.live[sequence] = slot
        if sequence in self.swapped:
            self.transfer(("state in", self.swapped[sequence], slot))
            self.drop_swapped(sequence)

    def fork(self, source: int, sequence: int) -> bool:
        """A live slot with what `source`, of which nothing is in flight, has. False, and nothing changed, where there
        is none."""
        slot = self._take()
        if slot is None:
            return False
        self.transfer(("state", self.live[source], slot))
        self.live[sequence] = slot
        return True

    def keep(self, sequence: int, length: int) -> None:
        """Take a copy of the sequence's state, which is that behind `length` tokens once all that was submitted has
        run: a snapshot when these are committed. Nothing where no slot can be had."""
        if self.page_size and (slot := self._take()) is not None:
            self.num_taken += 1
            self.transfer(("state", self.live[sequence], slot))
            self._taken.setdefault(sequence, []).append((length, slot))

    def save(self, sequence: int, count: int) -> list[int]:
        """Up to `count` slots, until settle(): for the states behind the first tokens of the sequence's next run, of which
        drafts may end at each. Nothing of it is in flight. Fewer, or none, where most_kept are or no slot can be had."""
        kept: list[int] = []
        while len(kept) < min(count, self.most_kept - self.num_saved) and (slot := self._take()) is not None:
            kept.append(slot)
        if kept:
            self.kept[sequence] = kept
            self.num_saved += len(kept)
        return kept

    def settle(self, sequence: int, accepted: int = 0) -> None:
        """Of the run since save(), which is over, the first `accepted` tokens stand. All, or 0: the live slot stays what it
        is, if there is one; after 0 it has no state of the sequence's any more, but where the run did not begin."""
        slots = list(self.kept.pop(sequence))
        self.num_saved -= len(slots)
        if 0 < accepted <= len(slots):
            self.live[sequence], slots[accepted - 1] = slots[accepted - 1], self.live[sequence]
        self._free += slots

    def next_place(self, points: Iterable[int], prompt: int, length: int) -> int:
        """The first place behind `length` tokens at which the state is to be kept: one of `points`, or at the interval,
        which grows for prompts that would take too many snapshots. prompt: tokens of it."""
        if not self.page_size:
            return NEVER
        interval = max(self.interval, -(-prompt // max(1, int(PROMPT_SHARE * self.num_slots))))
        place = length - length % interval + interval
        place += interval * (place - length < min(self.least_gain, interval))
        return min([place, *(point for point in points if point > length)])

    def detach(self, sequence: int) -> int:
        """Forget the sequence: its slot, which the caller owns now and gives back; -1: it has none (any more). What a run in
        flight leaves states in is the sequence's until settle()."""
        self._free += [slot for _, slot in self._taken.pop(sequence, ())]
        slot = self.live.pop(sequence, -1)
        self.lent += slot >= 0
        return slot

    def give(self, slot: int) -> None:
        """The slot of detach() or lend() is not needed any more; -1: there is none."""
        if slot >= 0:
            self.lent -= 1
            self._free.append(slot)

    def lend(self) -> int:
        """A slot for a job, until give(). IndexError where has_room() is False."""
        slot = self._take()
        if slot is None:
            raise IndexError("no state slot is free")
        self.lent += 1
        return slot

    # -- to the host and back

    def can_swap(self) -> bool:
        """Whether swap_out() would find a slot."""
        return self.host.num_free > 0 or self.on_host.count > 0

    def swap_out(self, sequence: int) -> None:
        """Move the live slot to the host. IndexError where can_swap() is False."""
        self.make_room()
        self.swapped[sequence] = self.host.take()
        self.transfer(("state out", self.live[sequence], self.swapped[sequence]))

    def drop_swapped(self, sequence: int) -> None:
        self.host.give(self.swapped.pop(sequence))

    # -- snapshots

    def commit(self, sequence: int, tokens: array, length: int, last: TreeNode) -> None:
        """tokens[:length] of the sequence are in the tree, `last` is the node of the last full page: what was taken of
        them becomes snapshots."""
        taken = self._taken.get(sequence)
        while taken and taken[0][0] <= length:
            node = self._find(tokens, taken[0][0], last)
            if node is None and taken[0][0] > self.page_size * last.depth:
                break  # in a page that is entered later
            self._attach(node, *taken.pop(0))
        if taken is not None and not taken:
            del self._taken[sequence]

    def keep_live(self, sequence: int, tokens: array, length: int, last: TreeNode) -> None:
        """As commit() of the live slot itself, with the state behind `length` tokens, of a sequence that needs it no
        more."""
        node = self._find(tokens, length, last)
        if node is not None:
            self._attach(node, length, self.live.pop(sequence))

    def keep_lent(self, slot: int, tokens: array, length: int, last: TreeNode) -> None:
        """As keep_live() of a slot that detach() gave."""
        self.lent -= 1
        self._attach(self._find(tokens, length, last), length, slot)

    def _find(self, tokens: array, length: int, last: TreeNode) -> TreeNode | None:
        """The node with the last of `length` tokens: `last`, one before it, or the page behind it as far as it goes."""
        depth = -(-length // self.page_size)
        while last.depth > depth:
            last = last.parent  # type: ignore[assignment]
        if last.depth == depth:
            return last
        if last.depth < depth - 1:
            return None
        return child_of(last, tokens[(depth - 1) * self.page_size : length].tobytes())

    def _attach(self, node: TreeNode | None, length: int, slot: int) -> None:
        """`slot` has the state behind `length` tokens, the last of which are in `node`; free where that is none or has
        one already."""
        if node is None or node.parent is None:
            self._free.append(slot)
            return
        offset = length - (node.depth - 1) * self.page_size
        beside = self._behind.setdefault(node.parent, {})
        there = beside.get(node.tokens[: 4 * offset])
        if there is None:
            self.num_kept += 1
            self._place(Snapshot(node, offset, slot))
        elif there.slot >= 0:
            self._free.append(slot)
            self.on_device.touch(there)
        else:  # on the host; this one is as good, and nearer
            self.on_host.remove(there)
            self.host.give(there.host)
            there.slot, there.host = slot, -1
            self.on_device.add(there)

    def _shelf(self, snapshot: Snapshot) -> Shelf:
        return self.on_device if snapshot.slot >= 0 else self.on_host

    def _place(self, snapshot: Snapshot) -> None:
        node = snapshot.node
        self._behind.setdefault(node.parent, {})[node.tokens[: 4 * snapshot.offset]] = snapshot  # type: ignore[arg-type]
        self._at.setdefault(node, []).append(snapshot)
        self._shelf(snapshot).add(snapshot)

    def _remove(self, snapshot: Snapshot) -> None:
        node = snapshot.node
        beside, at = self._behind[node.parent], self._at[node]  # type: ignore[index]
        del beside[node.tokens[: 4 * snapshot.offset]]
        at.remove(snapshot)
        self._shelf(snapshot).remove(snapshot)
        if not beside:
            del self._behind[node.parent]  # type: ignore[arg-type]
        if not at:
            del self._at[node]

    def _forget(self, snapshot: Snapshot) -> None:
        """There is no such snapshot any more; its slot of the device is the caller's."""
        self._remove(snapshot)
        if snapshot.host >= 0:
            self.host.give(snapshot.host)

    def _take(self, but: Snapshot | None = None) -> int | None:
        """A free slot, or that of a snapshot other than `but`, which goes to the host, or is gone."""
        if self._free:
            return self._free.pop()
        victim = self.on_device.victim(but)
        return None if victim is None else self._evict(victim, but)

    def _evict(self, victim: Snapshot, but: Snapshot | None = None) -> int:
        """The slot of a snapshot of the device, which goes to the host, or is gone."""
        slot = victim.slot
        self.num_evicted += 1
        if self.make_room(but):
            self.on_device.remove(victim)
            victim.slot, victim.host = -1, self.host.take()
            self.transfer(("state out", slot, victim.host))
            self.on_host.add(victim)
        else:
            self._forget(victim)
        return slot

    def keep_at_most(self, count: int) -> None:
        """No more than so many snapshots stay on the device."""
        while self.on_device.count > count:
            self._free.append(self._evict(self.on_device.victim()))  # type: ignore[arg-type]

    def free_runs(self) -> Iterator[tuple[int, int]]:
        """(slot, count) of those that nobody has and that follow one another."""
        for _, run in groupby(enumerate(sorted(self._free)), lambda item: item[1] - item[0]):
            slots = [slot for _, slot in run]
            yield slots[0], len(slots)

    def make_room(self, but: Snapshot | None = None) -> bool:
        """A free slot of the host, as far as snapshots other than `but` hold the others."""
        if not self.host.num_free and (victim := self.on_host.victim(but)) is not None:
            self._forget(victim)
        return self.host.num_free > 0

    def within_reach(self, root: TreeNode, nodes: list[TreeNode], tokens: bytes, copies: bool) -> Match:
        """The deepest snapshot of a prompt's beginning, at least one token shorter than the prompt, as a Match. nodes:
        its full pages that are cached. copies: whether it may stand within a page."""
        page_bytes, end = 4 * self.page_size, len(tokens) - 4
        for depth in range(len(nodes), -1, -1):
            beside = self._behind.get(nodes[depth - 1] if depth else root)
            if beside is None:
                continue
            at = depth * page_bytes
            for tail, snapshot in sorted(beside.items(), key=lambda item: len(item[0]), reverse=True):
                is_full = len(tail) == page_bytes
                if at + len(tail) <= end and (copies or is_full) and tokens.startswith(tail, at):
                    found = nodes[: depth + is_full]
                    return Match(found, None if is_full else snapshot.node, (at + len(tail)) // 4, snapshot)
        return Match([], None, 0)

    def drop(self, node: TreeNode) -> None:
        """The node leaves the tree. A snapshot goes to another page that begins with the same tokens, or is gone."""
        for snapshot in list(self._at.get(node, ())):
            parent, tail = node.parent, node.tokens[: 4 * snapshot.offset]
            other = child_of(parent, tail, node)  # type: ignore[arg-type]
            if other is None:
                self._forget(snapshot)
                self._free += [snapshot.slot] * (snapshot.slot >= 0)
            else:
                self._remove(snapshot)
                snapshot.node = other
                self._place(snapshot)

    def snapshots(self) -> list[Snapshot]:
        """All that there are."""
        return [*self.on_device, *self.on_host]

    def enter_host(self, node: TreeNode, offset: int, host: int) -> None:
        """The host's slot, which the caller took, has the state behind `offset` tokens of `node`; a file has it, too."""
        if self._behind.get(node.parent, {}).get(node.tokens[: 4 * offset]) is None:  # type: ignore[arg-type]
            self._place(Snapshot(node, offset, -1, host, is_filed=True))
        else:
            self.host.give(host)

    def has(self, node: TreeNode, snapshot: Snapshot | None = None) -> bool:
        """Whether a snapshot, or this one, stands beside the node."""
        return node in self._at and (snapshot is None or snapshot in self._at[node])

    # -- what others may know

    def check_integrity(self) -> list[str]:
        """What is wrong, one line each."""
        problems = []
        near, far = list(self.on_device), list(self.on_host)
        snapshots = near + far
        taken = [slot for some in self._taken.values() for _, slot in some]
        kept = [slot for some in self.kept.values() for slot in some]
        held = [*self._free, *self.live.values(), *taken, *kept, *(snapshot.slot for snapshot in near)]
        if len(set(held)) != len(held) or len(held) + self.lent != self.num_slots:
            problems.append(f"state slots are lost or shared: {len(held)} and {self.lent} lent of {self.num_slots}")
        if (self.on_device.count, self.on_host.count) != (len(near), len(far)):
            problems.append(
                f"{self.on_device.count} and {self.on_host.count} snapshots counted, {len(snapshots)} found"
            )
        if any(snapshot.host >= 0 for snapshot in near) or any(snapshot.slot >= 0 for snapshot in far):
            problems.append("a snapshot is in two places")
        if len(kept) != self.num_saved:
            problems.append(f"{self.num_saved} slots counted for states behind drafts, {len(kept)} found")
        if not self._taken.keys() <= self.live.keys():
            problems.append("a state was taken of a sequence that has none")
        if {id(each) for found in self._behind.values() for each in found.values()} != set(map(id, snapshots)):
            problems.append("a snapshot stands beside no node, or beside two")
        for snapshot in snapshots:
            node = snapshot.node
            tail = node.tokens[: 4 * snapshot.offset]
            if not node.alive or self._behind.get(node.parent, {}).get(tail) is not snapshot:  # type: ignore[arg-type]
                problems.append(f"the snapshot behind {snapshot.offset} tokens of {node} is out of place")
        hosts = [*self.swapped.values(), *(snapshot.host for snapshot in far), *self.filling]
        return problems + self.host.check_integrity(hosts)

    def counters(self) -> dict[str, float]:
        """Totals since the start, and what there is now."""
        return {
            "state_slots": self.num_slots,
            "state_slots_live": len(self.live) + self.lent,
            "state_snapshots": self.on_device.count,
            "state_snapshot_bytes": self.on_device.count * self.slot_nbytes,
            "state_host_snapshots": self.on_host.count,
            "state_hits": self.num_hits,
            "state_host_hits": self.num_host_hits,
            "state_taken": self.num_taken,
            "state_evicted": self.num_evicted,
        }


def child_of(parent: TreeNode, tail: bytes, but: Any = None) -> TreeNode | None:
    """A page behind `parent`, other than `but`, that begins with `tail`; of many the newest are looked at."""
    for child in islice(reversed(parent.children.values()), MAX_COMPARED):
        if child is not but and child.tokens.startswith(tail):
            return child
    return None
