/* All-reduce, gather and broadcast between processes of one machine, through memory that they share.
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
 */
#ifndef ZSE_COLLECTIVE_H
#define ZSE_COLLECTIVE_H

#include <stdint.h>

enum { ZSE_MAX_RANKS = 64 };
/* Why a group ended. */
enum { ZSE_GROUP_OK = 0, ZSE_GROUP_DIED = 1, ZSE_GROUP_LEFT = 2, ZSE_GROUP_TIMEOUT = 3, ZSE_GROUP_ENDED = 4 };
enum { ZSE_GROUP_F32 = 0, ZSE_GROUP_BF16 = 1 };

typedef struct zse_group zse_group;

/* Bytes of the region for `max_bytes` of one rank's part. small_bytes: of a small slot. */
int64_t zse_group_bytes(int32_t size, int64_t max_bytes, int64_t small_bytes);
/* memory: the region, zeroed, mapped by every rank. timeout_ms: a kernel's longest wait for another rank. NULL for arguments
 * out of range or without memory. */
zse_group *zse_group_open(void *memory, int32_t rank, int32_t size, int64_t max_bytes, int64_t small_bytes, int64_t timeout_ms,
                          int32_t spins);
/* A file descriptor that becomes readable when the rank ends; -1: none. */
void zse_group_watch(zse_group *group, int32_t rank, int32_t fd);
/* Tells the others that this rank leaves, and frees the group. The memory stays the caller's. */
void zse_group_close(zse_group *group);
/* ZSE_GROUP_*, and the rank that is to blame. */
int32_t zse_group_status(const zse_group *group, int32_t *culprit);
/* For who calls the kernels one by one, before combine and finish: 1: they will not wait; 0: not after `ms`; -1: the group
 * has ended. */
int32_t zse_group_wait(zse_group *group, int64_t ms);

/* What a GPU's stream calls: the three kernels of a collective (NULL: it has fewer), one after the other, by the calling thread. */
typedef struct {
    void (*phases[3])(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last);
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
#undef ZSE_GROUP_KERNEL

#endif
