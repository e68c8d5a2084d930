/* Collectives of ranks that have rows of their own each, in the order of the step's rows; see collective.h. */
#include "collective_group.h"

#include <string.h>

static const void *pointer(uint64_t arg) { return (const void *)(uintptr_t)arg; }

/* Whether a rank wants a row, or has a part of its sum. */
static bool is_wanted(const uint64_t *args, int64_t row, int32_t rank) {
    const int32_t *wanted = pointer(args[7]);
    return !wanted || (uint32_t)wanted[row] >> rank & 1;
}

/* Every rank writes its rows into one slot, that of rank 0, where they belong. */

static bool spreads_small(const zse_group *group, const uint64_t *args) {
    return (int64_t)args[3] * (int64_t)args[4] <= group->small_bytes;
}

static uint8_t *spread_slot(const zse_group *group, const uint64_t *args) {
    return spreads_small(group, args) ? small_slot(group, 0) : large_slot(group, 0);
}

void zse_group_spread_publish(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int64_t count = (int64_t)args[3], width = (int64_t)args[4], own = (int64_t)args[6], blocks = grid[0] * grid[1] * grid[2];
    const int32_t *place = pointer(args[5]);
    if (!is_running(group)) return;
    uint8_t *slot = spread_slot(group, args);
    for (int64_t row = count * first / blocks; row < count * last / blocks; row++)
        if (place[row] < own) memcpy(slot + row * width, (const uint8_t *)pointer(args[1]) + place[row] * width, (size_t)width);
    if (zse_group_is_last(group, grid, first, last)) zse_group_arrive(group);
}

void zse_group_spread_combine(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int64_t from, to, count = (int64_t)args[3], width = (int64_t)args[4], blocks = grid[0] * grid[1] * grid[2];
    uint8_t *out = (uint8_t *)(uintptr_t)args[2];
    if (!is_running(group) || !zse_group_wait_for_all(group)) return;
    const uint8_t *slot = spread_slot(group, args);
    if (args[7]) {
        for (int64_t row = count * first / blocks; row < count * last / blocks; row++)
            if (is_wanted(args, row, group->rank)) memcpy(out + row * width, slot + row * width, (size_t)width);
    } else {
        share_of(count * width, blocks, first, last, &from, &to);
        memcpy(out + from, slot + from, (size_t)(to - from));
    }
    if (zse_group_is_last(group, grid, first, last)) zse_group_after_combine(group, spreads_small(group, args));
}

void zse_group_spread_finish(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    if (!spreads_small(group, args)) zse_group_after_large(group, grid, first, last);
}

/* Every rank writes what it has of others' rows into its slot, and adds, in the order of ranks, what all have of its own. */

static bool collects_small(const zse_group *group, const uint64_t *args) {
    return 4 * (int64_t)args[3] * (int64_t)args[4] <= group->small_bytes;
}

void zse_group_collect_publish(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int64_t count = (int64_t)args[3], width = (int64_t)args[4], own = (int64_t)args[6], blocks = grid[0] * grid[1] * grid[2];
    const int32_t *place = pointer(args[5]);
    const float *x = pointer(args[1]);
    if (!is_running(group)) return;
    float *slot = (float *)(collects_small(group, args) ? small_slot(group, group->rank) : large_slot(group, group->rank));
    for (int64_t row = count * first / blocks; row < count * last / blocks; row++)
        if (place[row] >= own && is_wanted(args, row, group->rank)) memcpy(slot + row * width, x + row * width, (size_t)width * 4);
    if (zse_group_is_last(group, grid, first, last)) zse_group_arrive(group);
}

void zse_group_collect_combine(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int64_t width = (int64_t)args[4], own = (int64_t)args[6], blocks = grid[0] * grid[1] * grid[2];
    const int32_t *rows = pointer(args[8]);
    bool small = collects_small(group, args);
    const float *parts[ZSE_MAX_RANKS];
    if (!is_running(group) || !zse_group_wait_for_all(group)) return;
    for (int64_t i = own * first / blocks; i < own * last / blocks; i++) {
        int32_t count = 0; /* of parts: this rank's own is zeros where it computed nothing */
        for (int32_t rank = 0; rank < group->size; rank++) {
            const uint8_t *slot = small ? small_slot(group, rank) : large_slot(group, rank);
            if (rank == group->rank || is_wanted(args, rows[i], rank))
                parts[count++] = (const float *)(rank == group->rank ? pointer(args[1]) : slot) + rows[i] * width;
        }
        zse_group_sum_f32((float *)(uintptr_t)args[2] + i * width, parts, count, 0, width);
    }
    if (zse_group_is_last(group, grid, first, last)) zse_group_after_combine(group, small);
}

void zse_group_collect_finish(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    if (!collects_small(group, args)) zse_group_after_large(group, grid, first, last);
}
