/* Runs kernels of a CPU library in an emulator: arm64_runner LIBRARY RUNTIME MEMORY ADDRESS BYTES.
 *
 * MEMORY is a file that the host has mapped at the same address, so that pointers mean the same to both. First a line with
 * zse_cpu_features(); then for each line "SYMBOL G0 G1 G2 COUNT ARGS... BLOCKS [BLOCK...]" a launch, and a line "done". BLOCKS
 * 0: all, by a pool of two threads; else these, one after the other. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>

#include "zse_runtime.h"

static char *at; /* the rest of the line */

static uint64_t next(void) { return strtoull(at, &at, 10); }

static void *need(void *found, const char *what) {
    if (found) return found;
    fprintf(stderr, "%s: %s\n", what, dlerror() ? "not found" : "failed");
    exit(2);
}

int main(int count, char **args) {
    if (count != 6) return 2;
    void *kernels = need(dlopen(args[1], RTLD_NOW), args[1]), *runtime = need(dlopen(args[2], RTLD_NOW), args[2]);
    uint64_t (*features)(void) = need(dlsym(runtime, "zse_cpu_features"), "zse_cpu_features");
    zse_pool *(*pool_create)(int32_t, int32_t *) = need(dlsym(runtime, "zse_pool_create"), "zse_pool_create");
    int32_t (*graph_run)(zse_pool *, zse_graph *, const int64_t *, int64_t *) = need(dlsym(runtime, "zse_graph_run"), "zse_graph_run");
    void (*graph_destroy)(zse_pool *, zse_graph *) = need(dlsym(runtime, "zse_graph_destroy"), "zse_graph_destroy");
    zse_graph *(*graph_create)(const zse_launch_desc *, int64_t, const uint64_t *, int64_t, const zse_patch *, int64_t, const int64_t *,
                               int64_t, int32_t *) = need(dlsym(runtime, "zse_graph_create"), "zse_graph_create");
    int file = open(args[3], O_RDWR);
    void *wanted = (void *)strtoull(args[4], NULL, 10);
    size_t bytes = strtoull(args[5], NULL, 10);
    if (mmap(wanted, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != wanted) return 3;
    int32_t error = 0;
    zse_pool *pool = need(pool_create(2, &error), "pool");
    printf("%llu\n", (unsigned long long)features());
    fflush(stdout);
    char *line = NULL;
    size_t size = 0;
    while (getline(&line, &size, stdin) > 0) {
        char *name = line;
        at = line + strcspn(line, " ");
        *at++ = 0;
        zse_launch_desc launch = {.fn = (zse_kernel)(uintptr_t)need(dlsym(kernels, name), name), .depends = 1, .min_chunk = 1};
        for (int i = 0; i < 3; i++) launch.grid[i] = (int64_t)next();
        uint64_t slots[ZSE_MAX_ARGS];
        launch.num_args = (uint32_t)next();
        if (launch.num_args > ZSE_MAX_ARGS) return 4;
        for (uint32_t i = 0; i < launch.num_args; i++) slots[i] = next();
        uint64_t blocks = next();
        for (uint64_t i = 0; i < blocks; i++) {
            int64_t block = (int64_t)next();
            launch.fn(slots, launch.grid, block, block + 1);
        }
        if (!blocks) {
            zse_graph *graph = need(graph_create(&launch, 1, slots, launch.num_args, NULL, 0, NULL, 0, &error), "graph");
            if (graph_run(pool, graph, NULL, NULL)) return 5;
            graph_destroy(pool, graph);
        }
        puts("done");
        fflush(stdout);
    }
    return 0;
}
