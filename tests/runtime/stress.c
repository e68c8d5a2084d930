/* Drives the pool for ThreadSanitizer: dependent and independent launches over shared plain memory, sizes that change from
 * replay to replay, graphs that come and go, two host threads. Any missing ordering is a data race here.
 * Usage: stress THREADS REPLAYS. Exit code 0: every number was right. */
#include "zse_runtime.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { WIDTH = 48, STEPS = 24, LAUNCHES = STEPS + STEPS / 2 };

/* out[i] = x[total - 1 - i] + add */
static void reverse_add(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    const int64_t *x = (const int64_t *)args[0];
    int64_t *out = (int64_t *)args[1];
    for (int64_t i = first; i < last; i++) out[i] = x[grid[0] - 1 - i] + (int64_t)args[2];
}

struct host {
    zse_pool *pool;
    int replays, wrong;
};

static void *host_main(void *argument) {
    struct host *host = argument;
    int32_t error;
    int64_t a[WIDTH] = {0}, b[WIDTH] = {0}, side[WIDTH] = {0}, expected[WIDTH] = {0};
    uint64_t args[3 * LAUNCHES];
    zse_launch_desc launches[LAUNCHES];
    zse_patch patches[LAUNCHES];
    int count = 0, num_args = 0;
    for (int step = 0; step < STEPS; step++) {
        for (int extra = 0; extra < 1 + step % 2; extra++) { /* every other step also writes `side`, beside the main launch */
            args[num_args] = (uint64_t)(step % 2 ? b : a);
            args[num_args + 1] = (uint64_t)(extra ? side : step % 2 ? a : b);
            args[num_args + 2] = 1;
            launches[count] = (zse_launch_desc){reverse_add, (uint32_t)num_args, 3, {0, 1, 1}, !extra, 1 + step % 3};
            patches[count] = (zse_patch){0, 1, (uint32_t)count * 3, 0, 1, 1};
            num_args += 3;
            count++;
        }
    }
    int64_t most = WIDTH;
    zse_graph *graph = NULL;
    for (int replay = 0; replay < host->replays; replay++) {
        if (replay % 16 == 0) { /* a late worker may still be inside the old one */
            if (graph) zse_graph_destroy(host->pool, graph);
            graph = zse_graph_create(launches, count, args, num_args, patches, count, &most, 1, &error);
            if (!graph) abort();
        }
        int64_t size = 1 + replay * 7 % WIDTH;
        if (zse_graph_run(host->pool, graph, &size, NULL)) abort();
        for (int64_t i = 0; i < size; i++) expected[i] += STEPS;
        for (int i = 0; i < WIDTH; i++) host->wrong += a[i] != expected[i];
        for (int i = 0; i < size; i++) host->wrong += side[i] != a[i];
        /* An even number of reversals leaves the order; equal items would hide a wrong one. */
        if (replay % 5 == 0)
            for (int i = 0; i < WIDTH; i++) a[i] = expected[i] = i * 1000 + replay;
    }
    zse_graph_destroy(host->pool, graph);
    return NULL;
}

int main(int argc, char **argv) {
    int32_t error;
    if (argc != 3) return 2;
    zse_pool *pool = zse_pool_create(atoi(argv[1]), &error);
    if (!pool) return 2;
    struct host hosts[2] = {{pool, atoi(argv[2]), 0}, {pool, atoi(argv[2]), 0}};
    pthread_t thread;
    if (pthread_create(&thread, NULL, host_main, &hosts[1])) return 2;
    host_main(&hosts[0]);
    pthread_join(thread, NULL);
    zse_pool_destroy(pool);
    if (hosts[0].wrong || hosts[1].wrong) fprintf(stderr, "%d and %d wrong numbers\n", hosts[0].wrong, hosts[1].wrong);
    return hosts[0].wrong || hosts[1].wrong;
}
