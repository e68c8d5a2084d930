"""Asks other engines for the KV pages of long prompts (docs/design/0013-prefill-and-decode.md): a request waits here until
they are on the host, then goes the way of all requests."""

import threading
from array import array
from collections import OrderedDict
from typing import Any

import msgspec

from zse.cache.files import key_of
from zse.cache.layout import CHUNK_BYTES
from zse.engine import wire
from zse.engine.held import Held, HoldingFeature
from zse.engine.kv_wire import ALIVE, CANCEL, DONE, FAILED, PAGE, PROMPT, Frame, Link, LinkError, Prompt, Wake
from zse.lazy import logging
from zse.sampling.params import BeamParams, SamplingParams
from zse.scheduler.batch import StepOutput
from zse.scheduler.options import RequestOptions
from zse.scheduler.request import salt_of

MIN_TOKENS = 256  # that are not cached here: below, a step takes about as long as the way there and back
SILENCE_S = 5.0  # an engine says something every second
RETRY_S = 2.0  # between attempts to reach one
KEPT_KEYS = 1 << 16  # pages that a peer was asked for: more than a cache is likely to hold


class FetchedPages:
    """The pages of one prompt on their way. slots: of the host, for the pages behind the `here` first ones, in order.
    received: how many have come. is_over: no more will. failure: why there are not all."""

    def __init__(self, slots: list[int], here: int):
        self.slots, self.here = slots, here
        self.received = 0
        self.is_over = self.is_dropped = False
        self.failure: str | None = None


class PrefillPeer:
    """An engine that may be asked. One thread reaches it, again and again, and receives.

    place(slot): memory of a slot of the host. news(): called when a fetch is over."""

    def __init__(self, name: str, fingerprint: bytes, secret: bytes, place: Any, news: Any):
        self.name, self._fingerprint, self._secret = name, fingerprint, secret
        self._address = wire.address_of(name, "--kv-peers")
        self._place, self._news = place, news
        self.keys: OrderedDict[bytes, None] = OrderedDict()  # of the pages that it was asked for
        self.num_tokens = 0  # of fetches that are not over
        self._link: Link | None = None
        self._fetches: dict[int, FetchedPages] = {}
        self._next, self._said = 1, ""
        self._closing = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="kv peer", daemon=True).start()

    @property
    def is_there(self) -> bool:
        return self._link is not None

    def ask(self, fetch: FetchedPages, prompt: Prompt) -> int | None:
        """Its job; None where the peer is gone."""
        with self._lock:
            link, job = self._link, self._next
            if link is None:
                return None
            self._next += 1
            self._fetches[job] = fetch
        try:
            link.send(PROMPT, job, msgspec.msgpack.encode(prompt))
        except LinkError:
            link.close()  # the thread ends all fetches
        return job

    def cancel(self, job: int) -> None:
        """What comes of it is dropped; it is over when the peer says so."""
        link, fetch = self._link, self._fetches.get(job)
        if link is not None and fetch is not None:
            fetch.is_dropped = True
            try:
                link.send(CANCEL, job)
            except LinkError:
                link.close()

    def close(self) -> None:
        self._closing.set()
        if self._link is not None:
            self._link.close()

    def _run(self) -> None:
        log = logging.getLogger("zse.engine")
        while not self._closing.is_set():
            try:
                link = Link.connect(self._address, self._fingerprint, self._secret)
            except LinkError as error:
                if str(error) != self._said:  # once, not every two seconds
                    self._said = str(error)
                    log.warning("prompts are computed here: %s cannot be asked for KV pages: %s", self.name, error)
                self._closing.wait(RETRY_S)
                continue
            self._said = ""
            log.info("prompts may be computed by %s", self.name)
            self._link = link
            try:
                while True:
                    self._take(link.receive(SILENCE_S, self._memory))
            except LinkError as error:
                self._lose(link, str(error))

    def _memory(self, job: int, nbytes: int) -> "memoryview | None":
        fetch = self._fetches.get(job)
        if fetch is None or fetch.is_dropped or fetch.received == len(fetch.slots):
            return None
        view = self._place(fetch.slots[fetch.received])
        if nbytes != len(view):
            raise LinkError("a page of another size")
        return view

    def _take(self, frame: Frame) -> None:
        fetch = self._fetches.get(frame.job)
        if frame.kind == PAGE:
            if fetch is not None and not fetch.is_dropped and fetch.received < len(fetch.slots):
                fetch.received += 1
        elif frame.kind in (DONE, FAILED):
            self._over(frame.job, None if frame.kind == DONE else bytes(frame.content[:200]).decode(errors="replace"))
        elif frame.kind != ALIVE:
            raise LinkError("a frame that an engine that computes does not send")

    def _over(self, job: int, failure: str | None) -> None:
        fetch = self._fetches.pop(job, None)
        if fetch is not None:
            fetch.failure, fetch.is_over = failure, True
            self._news()

    def _lose(self, link: Link, why: str) -> None:
        with self._lock:
            self._link = None
            link.close()
            self.keys.clear()  # it may have been started again
            jobs = list(self._fetches)
        for job in jobs:
            self._over(job, why)
        if not self._closing.is_set():
            logging.getLogger("zse.engine").warning("the connection to %s ended: %s", self.name, why)


class Asking(Held):
    """A request that waits for its pages. fetch, peer, job: once one is asked. num_tokens: that the peer computes."""

    fetch: FetchedPages | None = None
    peer: PrefillPeer | None = None
    job, num_tokens = -1, 0


class PrefillClient(HoldingFeature):
    """peers: names of wire.address_of(). fingerprint, secret: as of kv_wire."""

    def __init__(self, engine: Any, peers: list[str], fingerprint: bytes, secret: bytes):
        super().__init__(engine)
        self._mover = engine.runner.pages
        self.num_asked = self.num_fetched = self.num_failed = 0
        self._held: dict[int, Asking] = {}
        self._dropped: list[FetchedPages] = []  # their slots are still written
        self._entered: dict[int, int] = {}  # request → pages of it that wait on the host for its admission
        self._reserved = 0
        self._wake = Wake()
        self.wake_fd = self._wake.fd
        self._has_news = False
        place = self._mover.slot_view
        self._peers = [PrefillPeer(name, fingerprint, secret, place, self._hear) for name in peers]

    def _hear(self) -> None:
        self._has_news = True
        self._wake.set()

    @property
    def is_live(self) -> bool:  # type: ignore[override]
        return bool(self._held or self._has_news)

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return self._has_news

    # -- out

    def before_submit(self, id: int, prompt: list[int], params: Any, options: RequestOptions) -> bool:
        """Hold a request back whose prompt another engine is asked for, now or when slots of the host are free."""
        if id < 0:  # another engine's, which asked here: two that ask each other would go on for ever
            return False
        if not isinstance(params, (SamplingParams, BeamParams)) or options.adapter:
            return False
        if options.images:  # a peer is asked for tokens, and has not seen them
            return False
        if len(prompt) <= MIN_TOKENS or not any(peer.is_there for peer in self._peers):
            return False
        self.check_held(id, prompt, params)
        held = Asking(prompt, params, options, self._engine.clock())
        is_asked = self._ask(held)
        if is_asked is False or is_asked is None and not self._held:
            return False
        self._held[id] = held
        return True

    def _ask(self, held: Asking) -> bool | None:
        """Whether a peer was asked for the prompt; None where too few slots are free now."""
        tokens, salt = array("i", held.prompt).tobytes(), salt_of(held.options)
        page_bytes = self._cache.prefix.page_bytes
        full = (len(tokens) - 4) // page_bytes
        here = len(self._cache.prefix.match(salt, tokens, copies=False, whole=True).nodes)
        if (full - here) * page_bytes < 4 * MIN_TOKENS or self._cache.host.num_slots < full - here:
            return False
        slots = self._take_slots(full - here)
        if slots is None:
            return None
        fetch = FetchedPages(slots, here)
        tokens = tokens[: full * page_bytes + 4]
        peer, known, keys = self._choose(tokens, salt)
        job = peer.ask(fetch, Prompt(tokens, here, held.options.tenant, held.options.cache_salt))
        if job is None:
            self._give(fetch)
            return False
        held.fetch, held.peer, held.job = fetch, peer, job
        held.num_tokens = len(tokens) // 4 - max(here, known) * page_bytes // 4
        peer.num_tokens += held.num_tokens
        for key in keys:
            peer.keys[key] = None
            peer.keys.move_to_end(key)
        while len(peer.keys) > KEPT_KEYS:
            peer.keys.popitem(last=False)
        self.num_asked += 1
        return True

    def _take_slots(self, count: int) -> list[int] | None:
        prefix, host = self._cache.prefix, self._cache.host
        requests = self._scheduler.requests
        self._entered = {
            id: count for id, count in self._entered.items() if id in requests and not requests[id].residency
        }
        if host.num_free + len(prefix.by_slot) - sum(self._entered.values()) < count or not prefix.make_room(count):
            return None
        # What was given back may still be read by transfers.
        self._mover.run(self._cache.take_transfers())
        self._mover.settle()
        slots = [host.take() for _ in range(count)]
        self._cache.filling.update(slots)
        return slots

    def _choose(self, tokens: bytes, salt: tuple[str, ...]) -> tuple[PrefillPeer, int, list[bytes]]:
        """The peer that has computed the prompt first, by what it has to do and what of the prompt it was sent before; how
        many pages these are; the keys of the prompt's pages."""
        page_bytes = self._cache.prefix.page_bytes
        key, keys = b"\0".join(text.encode() for text in salt)[:64], []
        for at in range(0, len(tokens) - 4, page_bytes):
            key = key_of(key, tokens[at : at + page_bytes])
            keys.append(key)

        def known(peer: PrefillPeer) -> int:
            return next((count for count, key in enumerate(keys) if key not in peer.keys), len(keys))

        def order(peer: PrefillPeer) -> tuple[int, int]:
            return peer.num_tokens - known(peer) * (page_bytes // 4), len(peer.keys)

        peer = min((peer for peer in self._peers if peer.is_there), key=order, default=self._peers[0])
        return peer, known(peer), keys

    # -- in

    def before_schedule(self, now: float) -> list[StepOutput]:
        """Give the engine those requests whose pages have come, or will not; what there is to tell of others."""
        outputs: list[StepOutput] = []
        if self._has_news:
            self._has_news = False
            for fetch in [fetch for fetch in self._dropped if fetch.is_over]:
                self._dropped.remove(fetch)
                self._give(fetch)
            over = [id for id, held in self._held.items() if held.fetch is not None and held.fetch.is_over]
            for id in over:
                outputs += self.release(id)
        return outputs + self._ask_more() + self.end_late(now)

    def _ask_more(self) -> list[StepOutput]:
        """Ask for the prompts of those that wait for slots, first come first, as far as there are some now; none is left
        to wait where no fetch is under way that could give some back."""
        outputs: list[StepOutput] = []
        waiting = [(id, held) for id, held in self._held.items() if held.fetch is None]
        for id, held in waiting:
            is_asked_for = any(other.fetch is not None for other in self._held.values())
            under_way = is_asked_for or bool(self._dropped or self._entered)
            is_asked = self._ask(held)
            if is_asked is False or is_asked is None and not under_way:
                outputs += self.release(id)
            elif is_asked is None:
                break
        return outputs

    def release(self, id: int) -> list[StepOutput]:
        held = self._held[id]
        if held.fetch is not None:
            held.peer.num_tokens -= held.num_tokens  # type: ignore[union-attr]
            self.num_failed += held.fetch.failure is not None
            self._entered[id] = self._enter(held, held.fetch)
        return super().release(id)

    def _enter(self, held: Asking, fetch: FetchedPages) -> int:
        """The pages that came become the prefix cache's, those behind a gap nobody's; how many these are."""
        prefix, salt = self._cache.prefix, salt_of(held.options)
        tokens = array("i", held.prompt).tobytes()
        match = prefix.match(salt, tokens, copies=False, whole=True)
        kept, node = 0, match.nodes[-1] if match.nodes else None
        for index in range(len(match.nodes) - fetch.here, fetch.received):
            if index < 0:
                break  # pages in front of them were evicted meanwhile
            at = (fetch.here + index) * prefix.page_bytes
            node = prefix.enter_host(node or prefix.root(salt), tokens[at : at + prefix.page_bytes], fetch.slots[index])
            self._cache.filling.discard(fetch.slots[index])
            fetch.slots[index] = -1
            kept += 1
        self.num_fetched += kept
        self._give(fetch)
        return kept

    def _give(self, fetch: FetchedPages) -> None:
        for slot in fetch.slots:
            if slot >= 0:
                self._cache.filling.discard(slot)
                self._cache.host.give(slot)
        fetch.slots = []

    def stop(self, held: Asking) -> None:
        if held.fetch is None:
            return
        held.peer.num_tokens -= held.num_tokens  # type: ignore[union-attr]
        self._dropped.append(held.fetch)
        if held.fetch.is_over:
            self._hear()
        else:
            held.peer.cancel(held.job)  # type: ignore[union-attr]

    def idle(self, now: float) -> bool:
        """Take a piece of the host's memory, which is locked for a GPU: that takes 10 ms."""
        slots = self._mover.slots
        if self._reserved >= self._cache.host.num_slots:
            return False
        slots.address(self._reserved)
        self._reserved += max(1, CHUNK_BYTES // slots.nbytes)
        return True

    def counters(self) -> dict[str, float]:
        """Totals since the start, and how many peers are there."""
        return {
            "prefill_peers": sum(peer.is_there for peer in self._peers),
            "prefill_asked_prompts": self.num_asked,
            "prefill_fetched_pages": self.num_fetched,
            "prefill_failed_prompts": self.num_failed,
        }

    def close(self) -> None:
        """Leave the peers."""
        for peer in self._peers:
            peer.close()
