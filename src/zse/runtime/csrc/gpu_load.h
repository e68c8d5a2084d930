/* What the parts of the GPU's weight loader share: gpu_load.c (threads, pinned ring) and gpu_load_map.c (mappings). */
#ifndef GPU_LOAD_H
#define GPU_LOAD_H

#include "zse_gpu.h"

#include <pthread.h>
#include <stdatomic.h>

#define SLOTS 2
#define PAGE_MAX 65536 /* arm64 has pages of up to 64 KiB */

/* A file of the load: its mapping, and what of each chunk is needed. */
struct file {
    int32_t fd;
    int64_t base, end, num_chunks; /* base: page-aligned offset of the mapping; end: of the file's last needed byte */
    char *map;
    int64_t *low, *high; /* needed bytes of each chunk, from base; low < 0 once registered */
};

/* Part of a direct job, or a whole job with a kernel. */
struct piece {
    int64_t job, offset, nbytes; /* offset: inside the job */
};

struct zse_gpu_load {
    zse_gpu_driver driver;
    zse_gpu_load_options options;
    zse_gpu_load_job *jobs;
    uint64_t *args;
    zse_gpu_load_output *outputs;
    int64_t num_jobs;
    struct file *files;
    int64_t num_files;
    int64_t *left; /* bytes of each job that are not in the copy stream yet */
    int64_t issued; /* leading jobs that are */
    struct piece *pieces;
    int64_t num_pieces;
    _Atomic int64_t next, bytes; /* next: piece */
    _Atomic int32_t cancelled, finished, closing, tidy;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    zse_gpu_load_result result;
    void **events; /* of the ring's slots, then one */
    void *ring;
    int64_t slot_bytes;
    int32_t threads, running, mapping, use_map;
    pthread_t manager;
    pthread_t workers[];
};

/* A chunk of a file that is registered with the driver: bytes [start, end) of the mapping. */
struct pinned {
    struct file *file;
    int64_t chunk, start, end;
};

/* The first failure counts; nothing more is started. */
void gpu_load_fail(zse_gpu_load *load, int64_t job, int32_t kind, int32_t code, int64_t got);
/* `nbytes` of the job's input are on their way. */
void gpu_load_issued(zse_gpu_load *load, int64_t job, int64_t nbytes);

/* Maps the files of a load that the page cache holds. 0 when they are to be read. */
int gpu_load_map(zse_gpu_load *load);
/* All direct jobs, in order. Returns the first job that is not done. */
int64_t gpu_load_copy_mapped(zse_gpu_load *load, struct pinned *pinned, int64_t *num_pinned, int64_t *first_pinned);
void gpu_load_unregister(zse_gpu_load *load, const struct pinned *pinned, int64_t first, int64_t end);

#endif
