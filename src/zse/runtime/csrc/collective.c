/* See collective.h. */
#define _GNU_SOURCE
#include "collective_group.h"
#include "zse_runtime.h"

#include <poll.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

int64_t zse_group_bytes(int32_t size, int32_t nodes, int64_t max_bytes, int64_t small_bytes) {
    int64_t large = max_bytes > small_bytes ? rounded(max_bytes) : 0; /* no large slots where every part is small */
    return rounded(sizeof(struct header)) + size * (2 * rounded(small_bytes) + large) + nodes * large +
           2 * size * rounded(max_bytes);
}

zse_group *zse_group_open(void *memory, int32_t rank, int32_t size, int32_t nodes, int64_t max_bytes, int64_t small_bytes,
                          int64_t timeout_ms, int32_t spins) {
    if (!memory || size < 1 || size > ZSE_MAX_RANKS || rank < 0 || rank >= size || max_bytes < 1 || small_bytes < 1) return NULL;
    if (nodes < 1 || size % nodes || (nodes > 1 && max_bytes <= small_bytes)) return NULL;
    zse_group *group = NULL;
    if (posix_memalign((void **)&group, LINE, sizeof *group)) return NULL;
    memset(group, 0, sizeof *group);
    group->header = memory;
    group->slots = (uint8_t *)memory + rounded(sizeof(struct header));
    group->max_bytes = max_bytes;
    group->small_bytes = small_bytes;
    group->rank = rank;
    group->size = size;
    group->spins = spins;
    group->timeout_ms = timeout_ms;
    group->nodes = nodes;
    group->per_node = size / nodes;
    group->node = rank / group->per_node;
    group->first = group->node * group->per_node;
    for (int32_t i = 0; i < size; i++) group->watched[i] = -1;
    return group;
}

void zse_group_watch(zse_group *group, int32_t rank, int32_t fd) { group->watched[rank] = fd; }

int64_t zse_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static void wake_sleepers(zse_group *group, int32_t rank) {
#if defined(__linux__)
    if (atomic_load(&group->header->sleepers))
        syscall(SYS_futex, &group->header->ranks[rank].arrived, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
#else
    (void)group, (void)rank;
#endif
}

/* Elsewhere a sleeper looks again after half a millisecond. */
void zse_group_sleep_on(zse_group *group, _Atomic uint32_t *word, uint32_t seen, int64_t ms) {
#if defined(__linux__)
    struct timespec slice = {0, ms * 1000000l};
    atomic_fetch_add(&group->header->sleepers, 1);
    if (atomic_load(word) == seen) syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, NULL, 0);
    atomic_fetch_sub(&group->header->sleepers, 1);
#else
    struct timespec slice = {0, 500000};
    (void)group, (void)word, (void)seen, (void)ms;
    nanosleep(&slice, NULL);
#endif
}

static void fail(zse_group *group, int32_t status, int32_t culprit) {
    int32_t none = ZSE_GROUP_OK;
    uint32_t running = 0;
    atomic_store(&group->culprit, culprit);
    atomic_compare_exchange_strong(&group->status, &none, status);
    atomic_compare_exchange_strong(&group->header->ended, &running, (uint32_t)culprit + 1);
    for (int32_t rank = 0; rank < group->size; rank++) wake_sleepers(group, rank);
}

static bool has_ended(const zse_group *group, int32_t rank) {
    struct pollfd watched = {group->watched[rank], POLLIN, 0};
    return watched.fd >= 0 && poll(&watched, 1, 0) > 0;
}

static bool has_arrived(const zse_group *group, int32_t rank) {
    return (int32_t)(atomic_load_explicit(&group->header->ranks[rank].arrived, memory_order_acquire) - group->barrier) >= 0;
}

int32_t zse_group_why_ended(zse_group *group, int32_t rank) {
    return atomic_load(&group->header->ended)               ? ZSE_GROUP_ENDED
           : atomic_load(&group->header->ranks[rank].left) ? ZSE_GROUP_LEFT
           : has_ended(group, rank)                         ? ZSE_GROUP_DIED
                                                            : ZSE_GROUP_OK;
}

void zse_group_end(zse_group *group, int32_t status, int32_t rank) {
    uint32_t ended = atomic_load(&group->header->ended);
    fail(group, status, status == ZSE_GROUP_ENDED && ended ? (int32_t)ended - 1 : rank);
}

/* Whether to wait on for `rank`. Ends the group for what says that it never arrives. */
static bool look_at(zse_group *group, int32_t rank) {
    int32_t status = zse_group_why_ended(group, rank);
    if (status == ZSE_GROUP_OK || has_arrived(group, rank)) return true; /* it may arrive and end at once */
    zse_group_end(group, status, rank);
    return false;
}

/* Until all ranks of this host have reached the barrier that this one reached last. -1: they have; else the rank that has not after `ms`,
 * or when the group ended. */
static int32_t first_missing(zse_group *group, int64_t ms) {
    int64_t end_ms = 0;
    for (int32_t rank = group->first; rank < group->first + group->per_node; rank++) {
        for (int32_t looks = 0; !has_arrived(group, rank); looks++) {
            if (looks < group->spins) {
                pause_core();
            } else if (looks < group->spins + YIELDS) {
                sched_yield();
            } else {
                _Atomic uint32_t *arrived = &group->header->ranks[rank].arrived;
                uint32_t seen = atomic_load(arrived);
                if (!end_ms) end_ms = zse_now_ms() + ms;
                if (!look_at(group, rank) || zse_now_ms() >= end_ms) return rank;
                if (!has_arrived(group, rank)) zse_group_sleep_on(group, arrived, seen, SLICE_MS);
            }
        }
    }
    return -1;
}

int32_t zse_group_wait(zse_group *group, int64_t ms) {
    int32_t missing = is_running(group) ? first_missing(group, ms) : 0;
    uint32_t ended = atomic_load_explicit(&group->header->ended, memory_order_relaxed);
    if (ended) fail(group, ZSE_GROUP_ENDED, (int32_t)ended - 1);
    return !is_running(group) ? -1 : missing < 0;
}

bool zse_group_wait_for_all(zse_group *group) {
    int32_t missing = first_missing(group, group->timeout_ms);
    if (missing >= 0 && is_running(group)) fail(group, ZSE_GROUP_TIMEOUT, missing);
    uint32_t ended = atomic_load_explicit(&group->header->ended, memory_order_relaxed);
    if (ended) fail(group, ZSE_GROUP_ENDED, (int32_t)ended - 1);
    return is_running(group);
}

void zse_group_arrive(zse_group *group) {
    atomic_store(&group->header->ranks[group->rank].arrived, ++group->barrier);
    wake_sleepers(group, group->rank);
}

bool zse_group_is_last(zse_group *group, const int64_t *grid, int64_t first, int64_t last) {
    uint64_t blocks = (uint64_t)(grid[0] * grid[1] * grid[2]), mine = (uint64_t)(last - first);
    if (atomic_fetch_add_explicit(&group->done, mine, memory_order_acq_rel) + mine < blocks) return false;
    atomic_store_explicit(&group->done, 0, memory_order_relaxed);
    return true;
}

void zse_group_after_combine(zse_group *group, bool small) {
    if (small)
        group->number++;
    else
        zse_group_arrive(group); /* large: the shares of the result are there, or the slots are read */
}

void zse_group_after_large(zse_group *group, const int64_t *grid, int64_t first, int64_t last) {
    if (is_running(group) && zse_group_wait_for_all(group) && zse_group_is_last(group, grid, first, last)) group->number++;
}

/* Sums. A vector of eight is two or four registers at every level that this is compiled for. */

typedef float eight __attribute__((vector_size(32), aligned(4)));

static inline float f32_of(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* To the nearest, ties to even; a NaN stays one. */
static inline uint16_t bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void zse_group_sum_f32(float *to, const float *const *parts, int32_t size, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) {
        eight low = *(const eight *)(parts[0] + i), high = *(const eight *)(parts[0] + i + 8);
        for (int32_t rank = 1; rank < size; rank++) {
            low += *(const eight *)(parts[rank] + i);
            high += *(const eight *)(parts[rank] + i + 8);
        }
        *(eight *)(to + i) = low;
        *(eight *)(to + i + 8) = high;
    }
    for (; i < end; i++) {
        float sum = parts[0][i];
        for (int32_t rank = 1; rank < size; rank++) sum += parts[rank][i];
        to[i] = sum;
    }
}

static void sum_bf16(uint16_t *to, const uint16_t *const *parts, int32_t size, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        float sum = f32_of(parts[0][i]);
        for (int32_t rank = 1; rank < size; rank++) sum += f32_of(parts[rank][i]);
        to[i] = bf16_of(sum);
    }
}

static void sum(void *to, const void *const *parts, int32_t size, int64_t begin, int64_t end, int64_t type) {
    if (type == ZSE_GROUP_F32)
        zse_group_sum_f32(to, (const float *const *)parts, size, begin, end);
    else
        sum_bf16(to, (const uint16_t *const *)parts, size, begin, end);
}

/* All-reduce. args: group, from, to, count, type. */

int64_t zse_group_item_bytes(int64_t type) { return type == ZSE_GROUP_F32 ? 4 : 2; }

static bool reduces_small(const zse_group *group, const uint64_t *args) {
    return group->nodes == 1 && (int64_t)args[3] * zse_group_item_bytes((int64_t)args[4]) <= group->small_bytes;
}

void zse_group_reduce_publish(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int64_t from, to, item = zse_group_item_bytes((int64_t)args[4]);
    if (!is_running(group)) return;
    share_of((int64_t)args[3], grid[0] * grid[1] * grid[2], first, last, &from, &to);
    uint8_t *slot = reduces_small(group, args) ? small_slot(group, group->rank) : large_slot(group, group->rank);
    memcpy(slot + from * item, (const uint8_t *)(uintptr_t)args[1] + from * item, (size_t)((to - from) * item));
    if (zse_group_is_last(group, grid, first, last)) zse_group_arrive(group);
}

void zse_group_reduce_combine(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int64_t from, to, count = (int64_t)args[3], blocks = grid[0] * grid[1] * grid[2];
    int32_t here = group->rank - group->first;
    bool small = reduces_small(group, args);
    const void *parts[ZSE_MAX_RANKS];
    if (!is_running(group) || !zse_group_wait_for_all(group)) return;
    for (int32_t i = 0; i < group->per_node; i++)
        parts[i] = small ? small_slot(group, i) : large_slot(group, group->first + i);
    if (small)
        share_of(count, blocks, first, last, &from, &to);
    else /* of all the host's ranks' blocks this rank's come by rank */
        share_of(count, blocks * group->per_node, blocks * here + first, blocks * here + last, &from, &to);
    sum(small ? (void *)(uintptr_t)args[2] : result_of(group, group->node), parts, group->per_node, from, to, (int64_t)args[4]);
    if (zse_group_is_last(group, grid, first, last)) zse_group_after_combine(group, small);
}

void zse_group_reduce_finish(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int64_t from, to, item = zse_group_item_bytes((int64_t)args[4]);
    if (reduces_small(group, args) || !is_running(group) || !zse_group_wait_for_all(group)) return;
    share_of((int64_t)args[3], grid[0] * grid[1] * grid[2], first, last, &from, &to);
    if (group->nodes == 1) {
        memcpy((uint8_t *)(uintptr_t)args[2] + from * item, result_of(group, 0) + from * item, (size_t)((to - from) * item));
    } else {
        const void *parts[ZSE_MAX_RANKS];
        for (int32_t node = 0; node < group->nodes; node++) parts[node] = result_of(group, node);
        sum((void *)(uintptr_t)args[2], parts, group->nodes, from, to, (int64_t)args[4]);
    }
    if (zse_group_is_last(group, grid, first, last)) group->number++;
}

/* All-gather. args: group, from, to, rows, widths (bytes). Blocks share the rows of each part. */

static bool gathers_small(const zse_group *group, const uint64_t *args) {
    const int64_t *widths = (const int64_t *)(uintptr_t)args[4];
    if (group->nodes > 1) return false;
    for (int32_t rank = 0; rank < group->size; rank++)
        if ((int64_t)args[3] * widths[rank] > group->small_bytes) return false;
    return true;
}

void zse_group_gather_publish(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    const int64_t *widths = (const int64_t *)(uintptr_t)args[4];
    int64_t from, to;
    if (!is_running(group)) return;
    share_of((int64_t)args[3] * widths[group->rank], grid[0] * grid[1] * grid[2], first, last, &from, &to);
    uint8_t *slot = gathers_small(group, args) ? small_slot(group, group->rank) : large_slot(group, group->rank);
    memcpy(slot + from, (const uint8_t *)(uintptr_t)args[1] + from, (size_t)(to - from));
    if (zse_group_is_last(group, grid, first, last)) zse_group_arrive(group);
}

void zse_group_gather_combine(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    const int64_t *widths = (const int64_t *)(uintptr_t)args[4];
    int64_t blocks = grid[0] * grid[1] * grid[2], rows = (int64_t)args[3], row_bytes = 0, at = 0;
    bool small = gathers_small(group, args);
    if (!is_running(group) || !zse_group_wait_for_all(group)) return;
    for (int32_t rank = 0; rank < group->size; rank++) row_bytes += widths[rank];
    for (int32_t rank = 0; rank < group->size && args[2]; at += widths[rank++]) {
        const uint8_t *part = small ? small_slot(group, rank) : large_slot(group, rank);
        uint8_t *to = (uint8_t *)(uintptr_t)args[2] + at;
        for (int64_t row = rows * first / blocks; row < rows * last / blocks; row++)
            memcpy(to + row * row_bytes, part + row * widths[rank], (size_t)widths[rank]);
    }
    if (zse_group_is_last(group, grid, first, last)) zse_group_after_combine(group, small);
}

void zse_group_gather_finish(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    if (!gathers_small(group, args)) zse_group_after_large(group, grid, first, last);
}

/* Broadcast. args: group, memory, bytes. */

static bool broadcasts_small(const zse_group *group, const uint64_t *args) {
    return group->nodes == 1 && (int64_t)args[2] <= group->small_bytes;
}

static uint8_t *broadcast_slot(const zse_group *group, const uint64_t *args) {
    return broadcasts_small(group, args) ? small_slot(group, 0) : large_slot(group, 0);
}

void zse_group_broadcast_publish(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int64_t from, to;
    if (!is_running(group)) return;
    share_of((int64_t)args[2], grid[0] * grid[1] * grid[2], first, last, &from, &to);
    if (!group->rank) memcpy(broadcast_slot(group, args) + from, (uint8_t *)(uintptr_t)args[1] + from, (size_t)(to - from));
    if (zse_group_is_last(group, grid, first, last)) zse_group_arrive(group);
}

void zse_group_broadcast_combine(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int64_t from, to;
    if (!is_running(group) || !zse_group_wait_for_all(group)) return;
    share_of((int64_t)args[2], grid[0] * grid[1] * grid[2], first, last, &from, &to);
    if (group->rank) memcpy((uint8_t *)(uintptr_t)args[1] + from, broadcast_slot(group, args) + from, (size_t)(to - from));
    if (zse_group_is_last(group, grid, first, last)) zse_group_after_combine(group, broadcasts_small(group, args));
}

void zse_group_broadcast_finish(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    if (!broadcasts_small(group, args)) zse_group_after_large(group, grid, first, last);
}

/* Send and receive: of ranks in a ring. args: group, memory, bytes. A sender is two messages ahead at most. */

/* Whether `word` of the other rank has reached `least`: waits for it, as a kernel does. */
static bool wait_for_word(zse_group *group, int32_t rank, _Atomic uint32_t *word, uint32_t least) {
    int64_t end_ms = 0;
    for (int32_t looks = 0; is_running(group); looks++) {
        uint32_t seen = atomic_load_explicit(word, memory_order_acquire);
        if ((int32_t)(seen - least) >= 0) return true;
        if (looks < group->spins) {
            pause_core();
        } else if (looks < group->spins + YIELDS) {
            sched_yield();
        } else {
            int32_t status = zse_group_why_ended(group, rank);
            if (!end_ms) end_ms = zse_now_ms() + group->timeout_ms;
            if (status == ZSE_GROUP_OK && zse_now_ms() >= end_ms) status = ZSE_GROUP_TIMEOUT;
            if (status == ZSE_GROUP_OK)
                zse_group_sleep_on(group, word, seen, SLICE_MS);
            else if (atomic_load(word) == seen) /* it may have sent and ended at once */
                zse_group_end(group, status, rank);
        }
    }
    return false;
}

void zse_group_wake_at(zse_group *group, _Atomic uint32_t *word, uint32_t value) {
    atomic_store(word, value);
#if defined(__linux__)
    if (atomic_load(&group->header->sleepers)) syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
#endif
}

void zse_group_send(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int32_t next = (group->rank + 1) % group->size;
    uint32_t number = group->sends;
    int64_t from, to;
    if (!is_running(group) || !wait_for_word(group, next, &group->header->ranks[next].received, number - 1)) return;
    share_of((int64_t)args[2], grid[0] * grid[1] * grid[2], first, last, &from, &to);
    memcpy(sent_slot(group, group->rank, number) + from, (uint8_t *)(uintptr_t)args[1] + from, (size_t)(to - from));
    if (zse_group_is_last(group, grid, first, last)) {
        group->sends = number + 1;
        group->header->ranks[group->rank].sent_bytes[number & 1] = (int64_t)args[2];
        zse_group_wake_at(group, &group->header->ranks[group->rank].sent, number + 1);
    }
}

void zse_group_receive(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int32_t before = (group->rank + group->size - 1) % group->size;
    uint32_t number = group->receives;
    int64_t from, to;
    if (group->nodes > 1 && leads(group)) {
        zse_group_receive_far(group, args, grid, first, last);
        return;
    }
    if (!is_running(group) || !wait_for_word(group, before, &group->header->ranks[before].sent, number + 1)) return;
    share_of((int64_t)args[2], grid[0] * grid[1] * grid[2], first, last, &from, &to);
    memcpy((uint8_t *)(uintptr_t)args[1] + from, sent_slot(group, before, number) + from, (size_t)(to - from));
    if (zse_group_is_last(group, grid, first, last)) {
        group->receives = number + 1;
        zse_group_wake_at(group, &group->header->ranks[group->rank].received, number + 1);
    }
}

int32_t zse_group_status(const zse_group *group, int32_t *culprit) {
    *culprit = atomic_load(&group->culprit);
    return atomic_load(&group->status);
}

void zse_group_close(zse_group *group) {
    zse_group_stop_pump(group);
    atomic_store(&group->header->ranks[group->rank].left, 1);
    wake_sleepers(group, group->rank);
    free(group);
}

void zse_group_run(void *call) {
    static const int64_t grid[3] = {1, 1, 1};
    zse_group_call *one = call;
    for (int phase = 0; phase < 4; phase++)
        if (one->phases[phase]) one->phases[phase](one->args, grid, 0, 1);
}
