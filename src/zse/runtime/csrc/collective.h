/* All-reduce, gather and broadcast between processes: of one machine through memory that they share, of several over sockets, too.
 *
 * The region: a header, then of each rank two small slots (they alternate) and one large slot, then one large result.
 * A collective has one barrier when its part fits a small slot and two when it does not:
 *
 *   publish   copy this rank's part into its slot, then arrive
 *   combine   wait until all arrived; small: combine all slots into the destination; large: this rank's share of the sum
 *             into the result, then arrive again
 *   finish    large: wait until all arrived, copy the result
 *
 * Nobody overwrites what another still reads: a rank that publishes collective n has passed the barrier of n - 1, which
 * all have arrived at, so all have left n - 2, where the same small slot was used. A large slot is read before the second
 * barrier of its collective and the result after it, hence before the next collective's first.
 *
 * The three are kernels of the CPU runtime (zse_runtime.h), so that a recorded step replays them with its own threads; a
 * gather may leave ranks without a copy (`to` NULL), a broadcast is of rank 0's bytes. All sums are made in f32 in the
 * order of ranks: every rank gets the same bits. Apart from them stand send and receive: what a rank sends to the next one of
 * the ring waits in one of two slots of its own, so that a sender need not wait for who receives. A kernel returns nothing: what failed stands in the group, whose kernels do
 * nothing from then on, and in the header, which ends the other ranks' waits.
 *
 * Ranks of several hosts: the region is a host's own, with slots of all ranks, and barriers are among the host's ranks. Every part
 * takes the large way, and a fourth kernel, `exchange`, stands where all of the host have arrived: its first rank, the leader, sends
 * over sockets what other hosts need and fills the slots of their ranks, then arrives (reduce: behind combine, the host's sums, which
 * finish adds in the order of hosts; gather and broadcast: before combine). Each message has a tag of 8 bytes: SipHash of its number
 * on this connection, its length and its bytes, with keys of the connection's handshake. What the last rank of a host sends in the
 * ring a thread of the leader sends on; the leader receives from its socket.
 */
#ifndef ZSE_COLLECTIVE_H
#define ZSE_COLLECTIVE_H

#include <stdint.h>

enum { ZSE_MAX_RANKS = 64 };
/* Why a group ended. */
enum { ZSE_GROUP_OK = 0, ZSE_GROUP_DIED = 1, ZSE_GROUP_LEFT = 2, ZSE_GROUP_TIMEOUT = 3, ZSE_GROUP_ENDED = 4, ZSE_GROUP_CLOSED = 5, ZSE_GROUP_CHANGED = 6 };
enum { ZSE_LINK_SUMS = 0, ZSE_LINK_STREAM = 1 };
enum { ZSE_GROUP_F32 = 0, ZSE_GROUP_BF16 = 1 };

typedef struct zse_group zse_group;

/* Bytes of the region for `max_bytes` of one rank's part. small_bytes: of a small slot. */
int64_t zse_group_bytes(int32_t size, int32_t nodes, int64_t max_bytes, int64_t small_bytes);
/* memory: the region, zeroed, mapped by every rank of this host. nodes: hosts, each with as many ranks. timeout_ms: a kernel's
 * longest wait for another rank. NULL for arguments out of range or without memory. */
zse_group *zse_group_open(void *memory, int32_t rank, int32_t size, int32_t nodes, int64_t max_bytes, int64_t small_bytes,
                          int64_t timeout_ms, int32_t spins);
/* Of the first rank of a host: the connected socket to the first rank of host `node`, which stays the caller's. keys: two of what
 * is sent, two of what comes. 0, or -1 for arguments out of range and where no thread can be started. */
int32_t zse_group_link(zse_group *group, int32_t kind, int32_t node, int32_t fd, const uint64_t *keys);
/* SipHash-2-4 (Aumasson, Bernstein, 2012) of `words` numbers and `bytes` bytes behind them. */
uint64_t zse_siphash(const uint64_t *key, const uint64_t *head, int32_t words, const uint8_t *data, int64_t bytes);
/* A file descriptor that becomes readable when the rank ends; -1: none. */
void zse_group_watch(zse_group *group, int32_t rank, int32_t fd);
/* Tells the others that this rank leaves, and frees the group. The memory stays the caller's. */
void zse_group_close(zse_group *group);
/* ZSE_GROUP_*, and the rank that is to blame. */
int32_t zse_group_status(const zse_group *group, int32_t *culprit);
/* For who calls the kernels one by one, before combine and finish: 1: they will not wait; 0: not after `ms`; -1: the group
 * has ended. */
int32_t zse_group_wait(zse_group *group, int64_t ms);

/* What a GPU's stream calls: the kernels of a collective (NULL: it has fewer), one after the other, by the calling thread. */
typedef struct {
    void (*phases[4])(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last);
    uint64_t args[5];
} zse_group_call;
void zse_group_run(void *call);

/* Kernels; their grid is any number of blocks, the same for the three of a collective.
 * reduce: group, from, to, count, type. gather: group, from, to, rows, widths. broadcast, and send and receive, which are one
 * kernel each: group, memory, bytes. */
#define ZSE_GROUP_KERNEL(name) void zse_group_##name(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last);
ZSE_GROUP_KERNEL(reduce_publish) ZSE_GROUP_KERNEL(reduce_combine) ZSE_GROUP_KERNEL(reduce_finish)
ZSE_GROUP_KERNEL(gather_publish) ZSE_GROUP_KERNEL(gather_combine) ZSE_GROUP_KERNEL(gather_finish)
ZSE_GROUP_KERNEL(broadcast_publish) ZSE_GROUP_KERNEL(broadcast_combine) ZSE_GROUP_KERNEL(broadcast_finish)
ZSE_GROUP_KERNEL(send) ZSE_GROUP_KERNEL(receive)
/* Of ranks of one host that have rows of their own each (collective_rows.c). place i32 [count]: of each of the step's rows where it
 * stands among this rank's, no less than `own` for others'; rows i32 [own]: which of the step's this rank's are.
 * spread: group, from [own, width], to [count, width], count, width (bytes), place, own, wanted: everybody's rows where they belong.
 * collect: group, from f32 [count, width], to f32 [own, width], count, width (numbers), place, own, wanted, rows: the sums of this rank's.
 * wanted: NULL, or i32 [count]: a bit for each rank that wants a row, and has a part of its sum. */
ZSE_GROUP_KERNEL(spread_publish) ZSE_GROUP_KERNEL(spread_combine) ZSE_GROUP_KERNEL(spread_finish)
ZSE_GROUP_KERNEL(collect_publish) ZSE_GROUP_KERNEL(collect_combine) ZSE_GROUP_KERNEL(collect_finish)
ZSE_GROUP_KERNEL(reduce_exchange) ZSE_GROUP_KERNEL(gather_exchange) ZSE_GROUP_KERNEL(broadcast_exchange)
#undef ZSE_GROUP_KERNEL

#endif
