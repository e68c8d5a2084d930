"""What kernels share that exchange with the same kernel on other GPUs, through memory that each can write of all others.

Every rank has one buffer of the same layout, which its peers know by an address of their own: HEADER_BYTES of counters and
flags, small slots, an inbox and an outbox (zse.parallel.collectives.peer allocates them). All stores to others are pushed:
reading another GPU's memory costs a way there and back, writing it one way.

Small exchanges carry their flag in every word (NCCL's protocol LL): 4 bytes of data and 4 of the exchange's number, which
one 8-byte store makes visible together. No fence, no second message: one way over the link. Slots are used by turns. That
is enough: who sends exchange n + 2 has received something of n + 1 from every rank, which a rank sends when its kernel of n
has ended.

Sums of two ranks that a norm follows (sum_norm.py) carry no number: their slots hold zeros, a word that is none has come, and
who has read it puts the zero back. That is half of the bytes. What has been put back is there before the kernel of n ends.

Large exchanges write data, then a flag with release, once for each block, phase and peer; sums of two ranks for each warp.
A rank begins the next one when all ranks have ended the one before (FINISHED), which they said by then: nothing is
overwritten that is still read.

The number of an exchange stands in the rank's own memory, so a captured graph can be replayed any number of times. Every
rank launches the same exchanges in the same order. A wait ends when `stop` (memory of the host) is set, by the host that saw
a rank end or by a thread that waited for more than `patience` cycles; what is computed then is of no use."""

from zse import kernel as zl

MAX_RANKS = 8
WORLDS = (2, 8)  # ranks that variants are made for: 2, and up to 8
HEADER_BYTES = 16384
SMALL_VALUES = 1 << 18  # 4-byte words of data of a small slot: 64 rows of 4,096 f32
MAX_BLOCKS = 128  # of a large exchange
TILES = 4  # of 16 bytes a thread: a section of a warp, of sums of two ranks
SECTIONS = 16  # that a block can divide its work of a large exchange into: numbers between two exchanges'
# Places in the header, in words of 4 bytes. Numbers and counts are of the rank's own kernels; FINISHED and FLAGS its peers
# write, one place each.
SMALL_NUMBER, SMALL_DONE, LARGE_NUMBER, LARGE_DONE = 0, 1, 2, 3
FINISHED, FLAGS = 16, 64
POLLS = 1024  # between two looks at the clock and at `stop`
STOPPED_BY_HOST, GAVE_UP = 1, 2  # in stop


class PeerParams(zl.Record):
    """peer0 …: the ranks' buffers, own: this rank's, words of 8 bytes. inbox, outbox: where they begin in each, likewise."""

    peer0: zl.Ptr[zl.u64]
    peer1: zl.Ptr[zl.u64]
    peer2: zl.Ptr[zl.u64]
    peer3: zl.Ptr[zl.u64]
    peer4: zl.Ptr[zl.u64]
    peer5: zl.Ptr[zl.u64]
    peer6: zl.Ptr[zl.u64]
    peer7: zl.Ptr[zl.u64]
    own: zl.Ptr[zl.u64]
    stop: zl.Ptr[zl.u32]
    patience: zl.i64
    rank: zl.i32
    size: zl.i32
    inbox: zl.i32
    outbox: zl.i32
    WORLD: zl.static


def peers_of(p):
    """The buffers of as many ranks as the variant is for, at compile time."""
    return [p.peer0, p.peer1, p.peer2, p.peer3, p.peer4, p.peer5, p.peer6, p.peer7][: p.WORLD]


@zl.inline
def is_over(begin, p):
    """Whether a wait since `begin` has to end."""
    stopped = zl.load_acquire(p.stop, "system") != 0
    if zl.clock() - begin > p.patience:
        if not stopped:
            zl.store_release(p.stop, GAVE_UP, "system")
        stopped = True
    return stopped


# -- small


@zl.inline
def small_number(p):
    """The number of this small exchange, from 1 on."""
    return zl.load_relaxed(zl.cast_ptr(p.own, zl.u32) + SMALL_NUMBER) + 1


@zl.inline
def small_slot(number, source, p):
    """Where in a rank's buffer the words of rank `source` go."""
    turn = zl.i32(number & 1)
    return HEADER_BYTES // 8 + (turn * p.size + source) * SMALL_VALUES


@zl.inline
def send_small(words, at, number, p):
    """Two or four words (u32), the exchange's at + 0 …, to every other rank."""
    tag = zl.u64(number) << 32
    place = small_slot(number, p.rank, p) + at
    for r, peer in zl.static(enumerate(peers_of(p))):
        if (r < p.size) & (r != p.rank):
            for k in zl.static(range(0, len(words), 2)):
                pair = zl.make_vector(zl.u64(words[k]) | tag, zl.u64(words[k + 1]) | tag)
                zl.store_relaxed(peer + (place + k), pair)


@zl.inline
def has_come(pair, number):
    """Whether both words are of this exchange."""
    return (zl.u32(pair[0] >> 32) == number) & (zl.u32(pair[1] >> 32) == number)


@zl.inline
def receive_small(count, sources, at, number, p):
    """What ranks sent with send_small at `at`, for each of `sources`: `count` words, as a list of lists. All words are asked for
    before the first is waited for. Nothing comes of a source that is this rank or none."""
    begin = zl.clock()
    half = count // 2
    wanted = [(r < p.size) & (r != p.rank) for r in sources]
    places = [p.own + (small_slot(number, r, p) + at) for r in sources]
    pairs = [zl.u64.x(2)(0) for _ in zl.static(range(len(places) * half))]
    for i in zl.static(range(len(places))):
        if wanted[i]:
            for k in zl.static(range(half)):
                pairs[i * half + k] = zl.load_relaxed(places[i] + 2 * k, 2)
    for i in zl.static(range(len(places))):
        if wanted[i]:
            for k in zl.static(range(half)):
                polls = zl.i32(0)
                while not has_come(pairs[i * half + k], number):
                    polls += 1
                    if polls == POLLS:
                        polls = zl.i32(0)
                        if is_over(begin, p):
                            break
                    pairs[i * half + k] = zl.load_relaxed(places[i] + 2 * k, 2)
    words = [zl.u32(pairs[i // 2][i % 2] & 0xFFFFFFFF) for i in zl.static(range(len(places) * count))]
    return [words[r * count :][:count] for r in range(len(sources))]


@zl.inline
def end_small(number, p):
    """The last block gives the next exchange its number: even and odd by turns, never 0, which stands in fresh memory."""
    zl.barrier()
    if zl.thread_index() == 0:
        header = zl.cast_ptr(p.own, zl.u32)
        before = zl.atomic_add(header + SMALL_DONE, 1)
        if before == zl.u32(zl.num_blocks(0)) - 1:
            zl.store_relaxed(header + SMALL_DONE, 0)
            zl.store_relaxed(header + SMALL_NUMBER, zl.where(number == 0xFFFFFFFF, zl.u32(1), number))


# -- words that are their own flags


@zl.inline
def bare_slot(number, p):
    """Where in a rank's buffer the only other rank's words go, without numbers."""
    return HEADER_BYTES // 8 + 2 * p.size * SMALL_VALUES + zl.i32(number & 1) * (SMALL_VALUES // 2)


@zl.inline
def not_zero(words):
    """u32 words of numbers as they are sent: +0 as -0, of two bf16 the second."""
    return [zl.where(word == 0, zl.u32(1 << 31), word) for word in words]


@zl.inline
def send_bare(words, place):
    """Two or four words that are not zero."""
    pairs = [zl.u64(words[k]) | zl.u64(words[k + 1]) << 32 for k in zl.static(range(0, len(words), 2))]
    zl.store_relaxed(place, zl.make_vector(pairs[0], pairs[1]) if len(words) == 4 else pairs[0])


@zl.inline
def receive_bare(count, places, wanted, p):
    """`count` words at each of the places where any are wanted, as a list of lists, as soon as all are there; their zeros are put back."""
    begin, half = zl.clock(), count // 2
    pairs = [zl.u64(0) for _ in zl.static(range(len(places) * half))]
    waits, polls = zl.i32(1), zl.i32(0)
    while waits != 0:
        waits = zl.i32(0)
        for i in zl.static(range(len(places))):
            if wanted[i]:
                if half == 2:
                    both = zl.load_relaxed(places[i], 2)
                    pairs[2 * i], pairs[2 * i + 1] = both[0], both[1]
                else:
                    pairs[i] = zl.load_relaxed(places[i])
                for k in zl.static(range(half)):
                    pair = pairs[i * half + k]
                    if (zl.u32(pair & 0xFFFFFFFF) == 0) | (zl.u32(pair >> 32) == 0):
                        waits = zl.i32(1)
        polls += 1
        if polls == POLLS:
            polls = zl.i32(0)
            if is_over(begin, p):
                break
    for i in zl.static(range(len(places))):
        if wanted[i]:
            none = zl.u64(0)
            zl.store_relaxed(places[i], zl.make_vector(none, none) if half == 2 else none)
    words = [zl.u32(pairs[i // 2] >> (32 * (i % 2)) & 0xFFFFFFFF) for i in zl.static(range(len(pairs) * 2))]
    return [words[i * count :][:count] for i in range(len(places))]


# -- large


@zl.inline
def wait_for(flag, number, p):
    """By one thread, until a peer has written this number there, or one of the next few: it may be ahead by a section."""
    begin = zl.clock()
    polls = zl.i32(0)
    while zl.load_acquire(flag, "system") - number >= SECTIONS:
        polls += 1
        if polls == POLLS:
            polls = zl.i32(0)
            if is_over(begin, p):
                break


@zl.inline
def tell(place, number, p):
    """Everything that this block has written so far is there for who reads `number` at `place` of its header: thread r tells
    rank r."""
    zl.barrier()
    for r, peer in zl.static(enumerate(peers_of(p))):
        if r < p.size:
            if zl.thread_index() == r:
                zl.store_release(zl.cast_ptr(peer, zl.u32) + place, number, "system")


@zl.inline
def hear(place, step, number, p):
    """Until all ranks told: rank r at place + r * step of this rank's header."""
    if zl.thread_index() < p.size:
        wait_for(zl.cast_ptr(p.own, zl.u32) + (place + zl.thread_index() * step), number, p)
    zl.barrier()


@zl.inline
def tell_section(phase, section, number, p):
    """To the blocks of this index on all ranks: what they need of this one for `section` is there."""
    tell(FLAGS + (phase * MAX_RANKS + p.rank) * MAX_BLOCKS + zl.block_index(0), number + zl.u32(section), p)


@zl.inline
def hear_section(phase, section, number, p):
    """Until all of those have told it."""
    place = FLAGS + phase * MAX_RANKS * MAX_BLOCKS + zl.block_index(0)
    hear(place, MAX_BLOCKS, number + zl.u32(section), p)


@zl.inline
def meet(phase, number, p):
    """Barrier of the blocks of this index on all ranks."""
    tell_section(phase, 0, number, p)
    hear_section(phase, 0, number, p)


@zl.inline
def tell_warp(warp, number, p):
    """To the same warp of the only other rank: what this one has written so far is there."""
    zl.warp_barrier()
    if zl.thread_index() % zl.target.warp == 0:
        other = zl.where(p.rank == 0, p.peer1, p.peer0)
        zl.store_release(zl.cast_ptr(other, zl.u32) + (FLAGS + warp), number, "system")


@zl.inline
def hear_warp(warp, number, p):
    """Until that warp has told it."""
    if zl.thread_index() % zl.target.warp == 0:
        wait_for(zl.cast_ptr(p.own, zl.u32) + (FLAGS + warp), number, p)
    zl.warp_barrier()


@zl.inline
def large_number(p):
    """The number of this large exchange, a multiple of SECTIONS."""
    return zl.load_relaxed(zl.cast_ptr(p.own, zl.u32) + LARGE_NUMBER) + SECTIONS


@zl.inline
def may_send(number, p):
    """Until all ranks have ended the large exchange before: nobody reads what it sent."""
    hear(FINISHED, 1, number - SECTIONS, p)


@zl.inline
def begin_large(p):
    """The number of this large exchange, once it may send."""
    number = large_number(p)
    may_send(number, p)
    return number


@zl.inline
def end_large(number, p):
    """The last block tells all ranks that this one has read what it was sent."""
    zl.barrier()
    last = zl.shared_array(zl.u32, 1)
    header = zl.cast_ptr(p.own, zl.u32)
    if zl.thread_index() == 0:
        zl.fence()
        last[0] = zl.atomic_add(header + LARGE_DONE, 1)
    zl.barrier()
    if last[0] == zl.u32(zl.num_blocks(0)) - 1:
        if zl.thread_index() == 0:
            zl.fence()
            zl.store_relaxed(header + LARGE_DONE, 0)
            zl.store_relaxed(header + LARGE_NUMBER, number)
        tell(FINISHED + p.rank, number, p)
