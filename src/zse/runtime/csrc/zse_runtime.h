/* The CPU runtime: a thread pool that replays recorded launches.
 *
 * A launch is a kernel over `blocks` independent blocks. Every kernel has the signature `zse_kernel`: it runs the
 * blocks [first, last) of a grid; each argument is one 8-byte slot.
 */
#ifndef ZSE_RUNTIME_H
#define ZSE_RUNTIME_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*zse_kernel)(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last);

enum { ZSE_MAX_ARGS = 48 };
enum { ZSE_OK = 0, ZSE_EINVAL = -1, ZSE_ENOMEM = -2, ZSE_ERANGE = -3, ZSE_ETHREAD = -4 };

/* One recorded launch, as the host describes it. `depends`: wait for everything before; else overlap with the
 * launch just before. `min_chunk`: fewest blocks that a thread takes at once. */
typedef struct {
    zse_kernel fn;
    uint32_t first_arg, num_args;
    int64_t grid[3];
    int32_t depends, min_chunk;
} zse_launch_desc;

/* A number known at replay: slot = ceil(symbol / divisor) * factor. `is_grid`: target is launch * 3 + dimension,
 * else an argument slot. */
typedef struct {
    uint32_t symbol, is_grid, target, reserved;
    int64_t divisor, factor;
} zse_patch;

typedef struct zse_pool zse_pool;
typedef struct zse_graph zse_graph;

zse_pool *zse_pool_create(int32_t threads, int32_t *error);
void zse_pool_destroy(zse_pool *pool);

zse_graph *zse_graph_create(const zse_launch_desc *launches, int64_t num_launches, const uint64_t *args, int64_t num_args,
                            const zse_patch *patches, int64_t num_patches, const int64_t *symbol_max, int64_t num_symbols,
                            int32_t *error);
/* Runs every launch once. `times_ns`, when given, has one entry a launch: when the launches up to it were done, counted
 * from the start (meaningful when every launch depends). ZSE_ERANGE: a symbol or a grid is out of range. */
int32_t zse_graph_run(zse_pool *pool, zse_graph *graph, const int64_t *symbols, int64_t *times_ns);
void zse_graph_destroy(zse_pool *pool, zse_graph *graph);

uint64_t zse_cpu_features(void);

/* A copy of an array, to be freed. NULL without memory. */
static inline void *zse_copied(const void *from, int64_t count, size_t size) {
    void *to = malloc(count ? (size_t)count * size : 1);
    return to && count ? memcpy(to, from, (size_t)count * size) : to;
}

static inline int zse_patches_fit(const zse_patch *patches, int64_t num_patches, int64_t num_launches, int64_t num_args,
                                  int64_t num_symbols) {
    for (const zse_patch *patch = patches; patch < patches + num_patches; patch++)
        if (patch->symbol >= num_symbols || patch->divisor < 1 || patch->target >= (patch->is_grid ? num_launches * 3 : num_args))
            return 0;
    return 1;
}

static inline int64_t zse_patch_value(const zse_patch *patch, const int64_t *symbols) {
    int64_t value = symbols[patch->symbol];
    return (value / patch->divisor + (value % patch->divisor != 0)) * patch->factor;
}

/* The first symbol that is not from 0 to its maximum, or -1. */
static inline int64_t zse_bad_symbol(const int64_t *symbols, const int64_t *symbol_max, int64_t num_symbols) {
    for (int64_t i = 0; i < num_symbols; i++)
        if (symbols[i] < 0 || symbols[i] > symbol_max[i]) return i;
    return -1;
}

#endif
