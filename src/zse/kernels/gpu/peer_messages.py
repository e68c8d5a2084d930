"""Send and receive between GPUs in a ring that can write each other's memory: what a pipeline's ranks hand on (peers.py says what they
share).

A message is written into one of two boxes of the next rank (its inbox and outbox, by turns), block by block: a flag with release behind
each block's words. The receiver's last block tells the sender that the box is free, so a sender may be two messages ahead. Numbers of
messages stand in the rank's own memory, as those of exchanges do."""

from zse import kernel as zl
from zse.kernels.gpu import peers
from zse.kernels.gpu.peers import PeerParams

THREADS = 512
# Places in the header behind those of peers.py, in words of 4 bytes: of the rank's own kernels; TAKEN the next rank writes, ARRIVED the
# one before, a word for each block.
SENDS, SEND_DONE, RECEIVES, RECEIVE_DONE = 4, 5, 6, 7
TAKEN, ARRIVED = 32, 3072


class MessageParams(PeerParams):
    """Of `count` words of 4 bytes of x those from `begin` on, `most` at most; all multiples of 4. Blocks and these are the same for who
    sends and who receives."""

    x: zl.Ptr[zl.u32]
    count: zl.i64
    begin: zl.i64
    most: zl.i32


@zl.inline
def header_of(buffer):
    return zl.cast_ptr(buffer, zl.u32)


@zl.inline
def neighbour(step, p):
    """The buffer of the rank that is `step` further in the ring."""
    found = p.own
    wanted = (p.rank + p.size + step) % p.size
    for r, peer in zl.static(enumerate(peers.peers_of(p))):
        if r == wanted:
            found = peer
    return found


@zl.inline
def box_of(buffer, number, p):
    return zl.cast_ptr(buffer + zl.where(number & 1 == 0, p.inbox, p.outbox), zl.u32)


@zl.inline
def copy_share(to, source, p):
    """This block's share of the message, 16 bytes a thread."""
    count = zl.i32(min(zl.i64(p.most), p.count - p.begin))
    first = (zl.block_index(0) * zl.target.threads + zl.thread_index()) * 4
    for i in range(first, count, zl.num_blocks(0) * zl.target.threads * 4):
        zl.store(to + i, zl.load(source + i, 4))


@zl.inline
def is_last(place, p):
    """In thread 0, once all of this block's work is done: whether all other blocks' is, too."""
    last = zl.u32(0)
    if zl.thread_index() == 0:
        zl.fence()
        if zl.atomic_add(header_of(p.own) + place, 1) == zl.u32(zl.num_blocks(0)) - 1:
            zl.fence()
            zl.store_relaxed(header_of(p.own) + place, 0)
            last = zl.u32(1)
    return last != 0


@zl.inline
def send_words(p):
    own, to = header_of(p.own), neighbour(1, p)
    number = zl.load_relaxed(own + SENDS) + 1
    if zl.thread_index() == 0:
        peers.wait_for(own + TAKEN, number - 2, p)
    zl.barrier()
    copy_share(box_of(to, number, p), p.x + p.begin, p)
    zl.barrier()
    if zl.thread_index() == 0:
        zl.store_release(header_of(to) + (ARRIVED + zl.block_index(0)), number, "system")
    if is_last(SEND_DONE, p):
        zl.store_relaxed(own + SENDS, number)


@zl.inline
def receive_words(p):
    own = header_of(p.own)
    number = zl.load_relaxed(own + RECEIVES) + 1
    if zl.thread_index() == 0:
        peers.wait_for(own + (ARRIVED + zl.block_index(0)), number, p)
    zl.barrier()
    copy_share(p.x + p.begin, box_of(p.own, number, p), p)
    zl.barrier()
    if is_last(RECEIVE_DONE, p):
        zl.store_relaxed(own + RECEIVES, number)
        zl.store_release(header_of(neighbour(-1, p)) + TAKEN, number, "system")


@zl.kernel
def send_peer(p: MessageParams):
    """Any grid of up to MAX_BLOCKS."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    if p.begin < p.count:
        send_words(p)


@zl.kernel
def receive_peer(p: MessageParams):
    """The grid of the kernel that sends."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    if p.begin < p.count:
        receive_words(p)


def variants(target) -> list[zl.Variant]:
    """None for Metal, as of all_reduce."""
    if target.name.startswith(("metal", "emulate-metal")):
        return []
    return [
        zl.Variant(f"{name}_peer_{world}", kernel, {"WORLD": world}, threads=THREADS)
        for world in peers.WORLDS
        for name, kernel in (("send", send_peer), ("receive", receive_peer))
    ]
