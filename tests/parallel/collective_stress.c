/* Ranks as threads over one region: all-reduces, gathers and broadcasts of small and large parts, their numbers checked.
 * Usage: collective_stress RANKS ROUNDS. Exit code 0: every number was right. */
#include "collective.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX = 8192, SMALL = 1024 };

static uint8_t *region;
static int size, rounds;

typedef void kernel(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last);

static void run(kernel *const *phases, uint64_t a, const void *b, uint64_t c, uint64_t d, const void *e) {
    static const int64_t grid[3] = {2, 1, 1};
    uint64_t args[5] = {a, (uintptr_t)b, c, d, (uintptr_t)e};
    for (int phase = 0; phase < 3; phase++)
        for (int block = 0; block < 2; block++) phases[phase](args, grid, block, block + 1);
}

static void *rank_main(void *argument) {
    static kernel *const reduce[] = {zse_group_reduce_publish, zse_group_reduce_combine, zse_group_reduce_finish};
    static kernel *const gather[] = {zse_group_gather_publish, zse_group_gather_combine, zse_group_gather_finish};
    static kernel *const send[] = {zse_group_broadcast_publish, zse_group_broadcast_combine, zse_group_broadcast_finish};
    int32_t rank = (int32_t)(intptr_t)argument, culprit;
    int64_t widths[ZSE_MAX_RANKS];
    zse_group *group = zse_group_open(region, rank, size, MAX, SMALL, 20000, 20);
    float *x = malloc(MAX), *all = malloc((size_t)MAX * (size_t)size);
    uint64_t handle = (uintptr_t)group;
    intptr_t bad = !group;
    for (int round = 0; round < rounds && !bad; round++) {
        int count = 1 + round * 37 % (MAX / 4);
        for (int i = 0; i < count; i++) x[i] = (float)(round + rank);
        float sum = (float)(size * round + size * (size - 1) / 2);
        run(reduce, handle, x, (uintptr_t)x, (uint64_t)count, NULL);
        for (int i = 0; i < count; i++) bad |= x[i] != sum;
        for (int i = 0; i < size; i++) widths[i] = 4 * count;
        for (int i = 0; i < count; i++) x[i] = (float)rank;
        run(gather, handle, x, (uintptr_t)all, 1, widths);
        for (int i = 0; i < size * count; i++) bad |= all[i] != (float)(i / count);
        run(send, handle, x, (uint64_t)(4 * count), 0, NULL);
        for (int i = 0; i < count; i++) bad |= x[i] != 0;
        bad |= zse_group_status(group, &culprit);
    }
    if (group) zse_group_close(group);
    free(x);
    free(all);
    return (void *)bad;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    size = atoi(argv[1]), rounds = atoi(argv[2]);
    size_t bytes = (size_t)zse_group_bytes(size, MAX, SMALL);
    region = aligned_alloc(4096, bytes);
    memset(region, 0, bytes);
    pthread_t threads[ZSE_MAX_RANKS];
    intptr_t failed = 0;
    for (int i = 0; i < size; i++) pthread_create(&threads[i], NULL, rank_main, (void *)(intptr_t)i);
    for (int i = 0; i < size; i++) {
        void *bad;
        pthread_join(threads[i], &bad);
        failed |= (intptr_t)bad;
    }
    if (failed) fprintf(stderr, "wrong numbers\n");
    return failed != 0;
}
