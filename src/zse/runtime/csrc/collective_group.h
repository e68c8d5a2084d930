/* What the files of collectives have in common; see collective.h for what they do. */
#ifndef ZSE_COLLECTIVE_GROUP_H
#define ZSE_COLLECTIVE_GROUP_H

#include "collective.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#define LINE 64
#define YIELDS 400      /* of the processor, before a wait sleeps */
#define SLICE_MS 20     /* a sleeping wait looks so often whether its peer is alive and time is left */
#define SHARE_ALIGN 16  /* elements: blocks begin at whole cache lines */

struct rank_state {
    _Alignas(LINE) _Atomic uint32_t arrived; /* barriers that this rank has reached, modulo 2^32 */
    _Atomic uint32_t left;
    _Alignas(LINE) _Atomic uint32_t sent; /* to the next rank */
    _Alignas(LINE) _Atomic uint32_t received; /* from the one before */
    int64_t sent_bytes[2]; /* of the messages in its two slots */
};

struct header {
    _Alignas(LINE) _Atomic uint32_t ended; /* 1 + the rank to blame */
    _Atomic uint32_t sleepers;
    struct rank_state ranks[ZSE_MAX_RANKS];
};

typedef struct {
    int32_t fd;
    uint64_t keys[4]; /* two of what is sent, two of what comes */
    uint64_t sent, received;
} zse_link;

/* A message on its way. tag: behind `data`; done: bytes of both. */
typedef struct {
    zse_link *link;
    bool sends, begun;
    int32_t rank; /* to blame */
    uint8_t *data;
    int64_t bytes, done;
    uint64_t tag;
} zse_transfer;

struct zse_group {
    struct header *header;
    uint8_t *slots;
    int64_t max_bytes, small_bytes;
    int32_t rank, size, spins;
    int64_t timeout_ms;
    int32_t watched[ZSE_MAX_RANKS];
    uint32_t barrier; /* that this rank arrived at last */
    uint32_t number;  /* of this collective */
    uint32_t sends, receives; /* that are done */
    _Alignas(LINE) _Atomic uint64_t done; /* blocks of the phase */
    _Atomic int32_t status, culprit;
    int32_t nodes, per_node, node, first; /* hosts, ranks of each, this rank's host and the first rank there, which leads */
    zse_link links[2][ZSE_MAX_RANKS];     /* the leader's, to other hosts' leaders: ZSE_LINK_SUMS, ZSE_LINK_STREAM */
    pthread_t pump;                       /* the leader's thread that sends on what the host's last rank sends */
    bool has_pump;
    _Atomic bool closing;
};

static inline int64_t rounded(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

static inline uint8_t *small_slot(const zse_group *group, int32_t rank) {
    return group->slots + (2 * rank + (group->number & 1)) * rounded(group->small_bytes);
}

static inline uint8_t *large_slot(const zse_group *group, int32_t rank) {
    return group->slots + 2 * group->size * rounded(group->small_bytes) + rank * rounded(group->max_bytes);
}

/* The sum of a host's ranks. */
static inline uint8_t *result_of(const zse_group *group, int32_t node) { return large_slot(group, group->size + node); }

/* What `rank` sends to the next one lies in two slots by turns, behind everything else. */
static inline uint8_t *sent_slot(const zse_group *group, int32_t rank, uint32_t number) {
    uint8_t *first = group->max_bytes > group->small_bytes ? large_slot(group, group->size + group->nodes) : large_slot(group, 0);
    return first + (2 * rank + (number & 1)) * rounded(group->max_bytes);
}

static inline bool is_running(const zse_group *group) {
    return atomic_load_explicit(&group->status, memory_order_relaxed) == ZSE_GROUP_OK;
}

/* Elements [*from, *to) of `count` are blocks [first, last) of `blocks`. */
static inline void share_of(int64_t count, int64_t blocks, int64_t first, int64_t last, int64_t *from, int64_t *to) {
    int64_t lines = (count + SHARE_ALIGN - 1) / SHARE_ALIGN;
    *from = lines * first / blocks * SHARE_ALIGN;
    *to = lines * last / blocks * SHARE_ALIGN;
    if (*from > count) *from = count;
    if (*to > count) *to = count;
}

static inline bool leads(const zse_group *group) { return group->rank == group->first; }

/* collective.c */
int64_t zse_now_ms(void);
/* What says that `rank`, of this host, never arrives, as ZSE_GROUP_*. */
int32_t zse_group_why_ended(zse_group *group, int32_t rank);
/* rank: to blame, but for who ended the group before. */
void zse_group_end(zse_group *group, int32_t status, int32_t rank);
/* As a kernel waits. False: the group has ended. */
bool zse_group_wait_for_all(zse_group *group);
void zse_group_arrive(zse_group *group);
/* Whether these were the last blocks of the phase: all other blocks are done then. */
bool zse_group_is_last(zse_group *group, const int64_t *grid, int64_t first, int64_t last);
void zse_group_sleep_on(zse_group *group, _Atomic uint32_t *word, uint32_t seen, int64_t ms);
void zse_group_wake_at(zse_group *group, _Atomic uint32_t *word, uint32_t value);
int64_t zse_group_item_bytes(int64_t type);
void zse_group_after_combine(zse_group *group, bool small);
/* The second barrier of a large collective without a result. */
void zse_group_after_large(zse_group *group, const int64_t *grid, int64_t first, int64_t last);
/* to[i] = the sum of parts[rank][i] by rank, begin <= i < end. */
void zse_group_sum_f32(float *to, const float *const *parts, int32_t size, int64_t begin, int64_t end);

/* collective_hosts.c */
void zse_group_receive_far(zse_group *group, const uint64_t *args, const int64_t *grid, int64_t first, int64_t last);
void zse_group_stop_pump(zse_group *group);

#endif
