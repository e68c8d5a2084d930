/* GPU runtime: walks recorded launch lists. Nothing here links against a driver: its functions are passed in, so this
 * compiles on every machine and a test can pass a driver of its own. CUDA and HIP share the signatures below. */
#ifndef ZSE_GPU_H
#define ZSE_GPU_H

#include "zse_runtime.h"
#include <stddef.h>
#include <time.h>

static inline int64_t zse_now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000ll + time.tv_nsec / 1000;
}

/* CUlaunchConfig and CUlaunchAttribute of cuda.h (CUDA 12 and 13). */
typedef struct {
    uint32_t id, pad;
    union {
        char bytes[64];
        uint32_t cluster[3];
        int32_t flag;
    } value;
} zse_gpu_attribute;

typedef struct {
    uint32_t grid[3], block[3], shared_bytes;
    void *stream;
    zse_gpu_attribute *attributes;
    uint32_t num_attributes;
} zse_gpu_config;

/* The driver. `set_current(current)` makes the context (HIP: the device) the calling thread's. `launch_ex` may be NULL
 * (HIP): `launch` is used then, without attributes. */
typedef struct {
    int32_t (*set_current)(uintptr_t current);
    int32_t (*launch_ex)(const zse_gpu_config *config, void *function, void **params, void **extra);
    int32_t (*launch)(void *function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x, uint32_t block_y,
                      uint32_t block_z, uint32_t shared_bytes, void *stream, void **params, void **extra);
    int32_t (*to_device)(uint64_t device, const void *host, size_t nbytes, void *stream);
    int32_t (*to_host)(void *host, uint64_t device, size_t nbytes, void *stream);
    int32_t (*event_record)(void *event, void *stream);
    int32_t (*event_wait)(void *event);
    int32_t (*event_query)(void *event);
    int32_t (*graph_launch)(void *executable, void *stream);
    int32_t (*host_register)(void *host, size_t nbytes, uint32_t flags);
    int32_t (*host_unregister)(void *host);
    int32_t (*stream_wait_event)(void *stream, void *event, uint32_t flags);
    int32_t (*stream_wait)(void *stream); /* not NULL: called after every entry, so that a failure has a name (slow) */
    int32_t (*launch_host)(void *stream, void (*function)(void *), void *argument);
    uintptr_t current;
} zse_gpu_driver;

enum { ZSE_GPU_KERNEL = 0, ZSE_GPU_UPLOAD = 1, ZSE_GPU_DOWNLOAD = 2, ZSE_GPU_FETCH = 3, ZSE_GPU_AWAIT = 4, ZSE_GPU_HOST = 5 };

/* One entry of a launch list. Kernel: arguments are 8-byte slots [first_arg, first_arg + num_args); bit i of `wide` says
 * that slot i is the address of the argument's bytes (a tensor map) instead of the argument. Copy: slots are device
 * address, host address, bytes. Fetch: a copy to the device in the stream of copies, once all that stands before it is done;
 * slots are those of a copy, an event of its own use, the event that says it is done. Await: what follows waits for the
 * event in its slot. Host: a C function and its argument, called by a thread of the driver's; what follows waits for it. */
typedef struct {
    void *function;
    uint32_t kind, first_arg, num_args, wide;
    int64_t grid[3];
    uint32_t threads, shared_bytes, cluster, overlaps; /* overlaps: may start before the launch before has ended (PDL) */
} zse_gpu_launch;

typedef struct zse_gpu_opening zse_gpu_opening;

/* cuInit and the primary context of GPU `ordinal` on a thread of its own; path: of the driver's library. NULL: no thread.
 * wait: 1 if the context was retained (release it once more then). */
zse_gpu_opening *zse_gpu_open_start(const char *path, int32_t ordinal);
int32_t zse_gpu_open_done(const zse_gpu_opening *opening); /* whether wait would return at once */
int32_t zse_gpu_open_wait(zse_gpu_opening *opening);

typedef struct zse_gpu_list zse_gpu_list;

zse_gpu_list *zse_gpu_list_create(const zse_gpu_launch *launches, int64_t num_launches, const uint64_t *args, int64_t num_args,
                                  const zse_patch *patches, int64_t num_patches, const int64_t *symbol_max, int64_t num_symbols,
                                  int32_t *error);
void zse_gpu_list_destroy(zse_gpu_list *list);

/* Puts the whole list into `stream`, fetches into `copies` (NULL where there are none), then records `event` (NULL: none). `executable`: a captured graph to launch instead of
 * walking the list. `marks` (NULL: none): num_launches + 1 events, one recorded before each entry and one after the last;
 * launches do not overlap then. Callers serialise calls on one list.
 * Returns 0; ZSE_ERANGE with where = index of the symbol, or -1 for a grid, out of range; or a driver's code with
 * where = index of the entry (num_launches: the graph launch or the event). */
int32_t zse_gpu_list_submit(const zse_gpu_driver *driver, zse_gpu_list *list, void *stream, void *copies, const int64_t *symbols,
                            void *executable, void *event, void *const *marks, int64_t *where);

/* Waits for the event: polls for up to spin_us, then blocks in the driver. */
int32_t zse_gpu_wait(const zse_gpu_driver *driver, void *event, int64_t spin_us);

#endif
