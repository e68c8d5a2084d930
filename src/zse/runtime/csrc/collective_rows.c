/* Collectives of ranks that have rows of their own each, in the order of the step's rows; see collective.h. */
#include "collective_group.h"

#include <string.h>

static const void *pointer(uint64_t arg) { return (const void *)(uintptr_t)arg; }

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
    int64_t from, to;
    if (!is_running(group) || !zse_group_wait_for_all(group)) return;
    share_of((int64_t)args[3] * (int64_t)args[4], grid[0] * grid[1] * grid[2], first, last, &from, &to);
    memcpy((uint8_t *)(uintptr_t)args[2] + from, spread_slot(group, args) + from, (size_t)(to - from));
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
    int64_t count = (int64_t)args[3], width = (int64_t)args[4], own = (int64_t)args[7], blocks = grid[0] * grid[1] * grid[2];
    const int32_t *place = pointer(args[5]);
    const float *x = pointer(args[1]);
    if (!is_running(group)) return;
    float *slot = (float *)(collects_small(group, args) ? small_slot(group, group->rank) : large_slot(group, group->rank));
    for (int64_t row = count * first / blocks; row < count * last / blocks; row++)
        if (place[row] >= own) memcpy(slot + row * width, x + row * width, (size_t)width * 4);
    if (zse_group_is_last(group, grid, first, last)) zse_group_arrive(group);
}

void zse_group_collect_combine(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    int64_t width = (int64_t)args[4], own = (int64_t)args[7], blocks = grid[0] * grid[1] * grid[2];
    const int32_t *rows = pointer(args[6]);
    bool small = collects_small(group, args);
    const float *parts[ZSE_MAX_RANKS];
    if (!is_running(group) || !zse_group_wait_for_all(group)) return;
    for (int64_t i = own * first / blocks; i < own * last / blocks; i++) {
        for (int32_t rank = 0; rank < group->size; rank++)
            parts[rank] = (const float *)(small ? small_slot(group, rank) : large_slot(group, rank)) + rows[i] * width;
        parts[group->rank] = (const float *)pointer(args[1]) + rows[i] * width;
        zse_group_sum_f32((float *)(uintptr_t)args[2] + i * width, parts, group->size, 0, width);
    }
    if (zse_group_is_last(group, grid, first, last)) zse_group_after_combine(group, small);
}

void zse_group_collect_finish(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    zse_group *group = (zse_group *)(uintptr_t)args[0];
    if (!collects_small(group, args)) zse_group_after_large(group, grid, first, last);
}
