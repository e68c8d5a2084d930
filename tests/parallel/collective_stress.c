/* Ranks as threads over one region, or one of each host: all-reduces, gathers, broadcasts and rings of small and large parts, their
 * numbers checked. Usage: collective_stress RANKS HOSTS ROUNDS. Exit code 0: every number was right. */
#include "collective.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { MAX = 8192, SMALL = 1024 };

static uint8_t *regions[ZSE_MAX_RANKS];
static int size, nodes, rounds;
static int sockets[2][ZSE_MAX_RANKS][ZSE_MAX_RANKS];

typedef void kernel(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last);

static void run(kernel *const *phases, int count, uint64_t a, const void *b, uint64_t c, uint64_t d, const void *e) {
    static const int64_t grid[3] = {2, 1, 1};
    uint64_t args[5] = {a, (uintptr_t)b, c, d, (uintptr_t)e};
    for (int phase = 0; phase < count; phase++)
        for (int block = 0; block < 2; block++) phases[phase](args, grid, block, block + 1);
}

static void *rank_main(void *argument) {
    static kernel *const reduce[] = {zse_group_reduce_publish, zse_group_reduce_combine, zse_group_reduce_finish};
    static kernel *const gather[] = {zse_group_gather_publish, zse_group_gather_combine, zse_group_gather_finish};
    static kernel *const tell[] = {zse_group_broadcast_publish, zse_group_broadcast_combine, zse_group_broadcast_finish};
    static kernel *const far_reduce[] = {zse_group_reduce_publish, zse_group_reduce_combine, zse_group_reduce_exchange,
                                         zse_group_reduce_finish};
    static kernel *const far_gather[] = {zse_group_gather_publish, zse_group_gather_exchange, zse_group_gather_combine,
                                         zse_group_gather_finish};
    static kernel *const far_tell[] = {zse_group_broadcast_publish, zse_group_broadcast_exchange, zse_group_broadcast_combine,
                                       zse_group_broadcast_finish};
    static kernel *const send[] = {zse_group_send}, *const receive[] = {zse_group_receive};
    int phases = nodes > 1 ? 4 : 3;
    int32_t rank = (int32_t)(intptr_t)argument, culprit;
    int64_t widths[ZSE_MAX_RANKS];
    int node = rank * nodes / size;
    zse_group *group = zse_group_open(regions[node], rank, size, nodes, MAX, SMALL, 20000, 20);
    static const uint64_t keys[4] = {1, 2, 1, 2};
    float *x = malloc(MAX), *all = malloc((size_t)MAX * (size_t)size);
    uint64_t handle = (uintptr_t)group;
    intptr_t bad = !group;
    for (int other = 0; other < nodes && rank % (size / nodes) == 0; other++)
        for (int kind = 0; kind < 2 && other != node; kind++) bad |= zse_group_link(group, kind, other, sockets[kind][node][other], keys);
    for (int round = 0; round < rounds && !bad; round++) {
        int count = 1 + round * 37 % (MAX / 4);
        for (int i = 0; i < count; i++) x[i] = (float)(round + rank);
        float sum = (float)(size * round + size * (size - 1) / 2);
        run(nodes > 1 ? far_reduce : reduce, phases, handle, x, (uintptr_t)x, (uint64_t)count, NULL);
        for (int i = 0; i < count; i++) bad |= x[i] != sum;
        for (int i = 0; i < size; i++) widths[i] = 4 * count;
        for (int i = 0; i < count; i++) x[i] = (float)rank;
        run(nodes > 1 ? far_gather : gather, phases, handle, x, (uintptr_t)(rank && nodes > 1 ? NULL : all), 1, widths);
        for (int i = 0; i < size * count && (!rank || nodes == 1); i++) bad |= all[i] != (float)(i / count);
        run(nodes > 1 ? far_tell : tell, phases, handle, x, (uint64_t)(4 * count), 0, NULL);
        for (int i = 0; i < count; i++) bad |= x[i] != 0;
        for (int turn = 0; turn < 2; turn++) { /* each sends two messages before it receives any */
            for (int i = 0; i < count; i++) x[i] = (float)(rank + turn);
            run(send, 1, handle, x, (uint64_t)(4 * count), 0, NULL);
        }
        for (int turn = 0; turn < 2; turn++) {
            run(receive, 1, handle, x, (uint64_t)(4 * count), 0, NULL);
            for (int i = 0; i < count; i++) bad |= x[i] != (float)((rank + size - 1) % size + turn);
        }
        bad |= zse_group_status(group, &culprit);
    }
    if (group) zse_group_close(group);
    free(x);
    free(all);
    return (void *)bad;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    size = atoi(argv[1]), nodes = atoi(argv[2]), rounds = atoi(argv[3]);
    size_t bytes = (size_t)zse_group_bytes(size, nodes, MAX, SMALL);
    for (int node = 0; node < nodes; node++) {
        regions[node] = aligned_alloc(4096, bytes);
        memset(regions[node], 0, bytes);
        for (int kind = 0; kind < 2; kind++)
            for (int other = 0; other < node; other++) {
                int pair[2];
                if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) return 2;
                sockets[kind][node][other] = pair[0], sockets[kind][other][node] = pair[1];
            }
    }
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
