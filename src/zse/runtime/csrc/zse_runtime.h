/* The CPU runtime: a thread pool that replays recorded launches, and a loader that reads and repacks weights.
 *
 * A launch is a kernel over `blocks` independent blocks. Every kernel has the signature `zse_kernel`: it runs the
 * blocks [first, last) of a grid; each argument is one 8-byte slot.
 */
#ifndef ZSE_RUNTIME_H
#define ZSE_RUNTIME_H

#include <stdint.h>

typedef void (*zse_kernel)(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last);

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

/* One piece of a file: read `nbytes` at `offset` of `fd` into the thread's staging memory, put its address in argument
 * slot 0 and run the whole grid. Without `fn` the bytes go straight to the address in slot 0. */
typedef struct {
    zse_kernel fn;
    int64_t offset, nbytes;
    int32_t fd;
    uint32_t first_arg, num_args, reserved;
    int64_t grid[3];
} zse_load_job;

typedef struct zse_pool zse_pool;
typedef struct zse_graph zse_graph;
typedef struct zse_load zse_load;

zse_pool *zse_pool_create(int32_t threads, int32_t *error);
void zse_pool_destroy(zse_pool *pool);

zse_graph *zse_graph_create(const zse_launch_desc *launches, int64_t num_launches, const uint64_t *args, int64_t num_args,
                            const zse_patch *patches, int64_t num_patches, const int64_t *symbol_max, int64_t num_symbols,
                            int32_t *error);
/* Runs every launch once. `times_ns`, when given, has one entry a launch: when the launches up to it were done, counted
 * from the start (meaningful when every launch depends). `bad_symbol` receives the index of a symbol out of range. */
int32_t zse_graph_run(zse_pool *pool, zse_graph *graph, const int64_t *symbols, int64_t *times_ns, int64_t *bad_symbol);
void zse_graph_destroy(zse_pool *pool, zse_graph *graph);

zse_load *zse_load_start(const zse_load_job *jobs, int64_t num_jobs, const uint64_t *args, int64_t num_args, int32_t threads,
                         int32_t *error);
int64_t zse_load_bytes(const zse_load *load);
int32_t zse_load_finished(const zse_load *load);
/* Joins the threads. Returns the index of the failed job or -1; `code` is its errno (0: the file ended early), `got` the
 * bytes that were read. The handle is gone after this. */
int64_t zse_load_wait(zse_load *load, int32_t *code, int64_t *got);
void zse_load_cancel(zse_load *load);

uint64_t zse_cpu_features(void);

#endif
