/* What the parts of the weight loader share: load.c (threads, pinned memory), load_map.c (mappings), load_step.c (kernels of the GPU). */
#ifndef LOAD_H
#define LOAD_H

#include "zse_load.h"

#include <pthread.h>
#include <stdatomic.h>

#define SLOTS 2
#define SUM_BYTES 65536 /* read and summed at once: they stay in the second-level cache */
#define PAGE_MAX 65536 /* arm64 has pages of up to 64 KiB */

/* A file of the load: its mapping, and what of each chunk is needed. */
struct file {
    int32_t fd; /* below 0: kept, and no job needs it so far */
    int64_t base, end, num_chunks; /* base: page-aligned offset of the mapping; end: of the file's last needed byte */
    char *map;
    int64_t mapped; /* bytes */
    const zse_load_kept *kept; /* as it was registered before, or NULL */
    int64_t *low, *high; /* needed bytes of each chunk, from base; low < 0 once registered */
};

/* Part of a direct job, or a whole job with a kernel. */
struct piece {
    int64_t job, offset, nbytes; /* offset: inside the job */
};

/* Pinned memory of a thread that reads: of its own, registered with the driver, or the driver's. */
struct slots {
    char *memory;
    int64_t nbytes;
    int registered;
};

/* A chunk of a file that is registered with the driver: bytes [start, end) of the mapping. */
struct pinned {
    struct file *file;
    int64_t chunk, start, end;
};

struct zse_load {
    zse_gpu_driver driver; /* zeroed: the memory is the host's */
    zse_load_options options;
    zse_load_job *jobs;
    uint64_t *args;
    zse_load_output *outputs;
    int64_t num_jobs;
    uint32_t *sums; /* of each job, or NULL */
    zse_load_step *steps; /* nbytes: what is still to come */
    int64_t num_steps, num_launched; /* the steps before num_launched are launched */
    struct file *files;
    int64_t num_files;
    zse_load_kept *kept;
    struct pinned *pinned; /* of them those from first_pinned on are registered */
    int64_t num_pinned, first_pinned;
    struct piece *pieces;
    int64_t num_pieces;
    _Atomic int64_t next; /* piece */
    _Atomic int32_t cancelled, finished, closing, tidy;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* finished or closing */
    pthread_cond_t stepped; /* num_launched or cancelled */
    zse_load_result result;
    void **events; /* of the slots, then one */
    struct slots *slots; /* of each thread */
    int64_t slot_bytes;
    int32_t threads;
    pthread_t manager;
    pthread_t workers[];
};

/* The first failure counts; nothing more is started. code: the driver's, else errno, 0 where the file ends early. */
void load_fail(zse_load *load, int64_t job, int32_t from_driver, int32_t code, int64_t got);

/* Files that were registered before come first, and memory for all that will be. 0: there is none. */
int load_take_kept(zse_load *load);
/* Maps the files of a load that the page cache holds. 0 when they are to be read. */
int load_map(zse_load *load);
/* All direct jobs, in order. Returns where it stopped: the first job that is not done, and the offset in it. */
struct piece load_copy_mapped(zse_load *load);
/* Gives the registrations back. */
void load_unregister(zse_load *load);

/* Puts the copy of bytes of a direct job into the stream: before it, waits for the steps that read their destination; after it,
 * launches the step that has all of its bytes. 0, a driver's status, or -1 when the load was given up meanwhile. */
int32_t load_copy(zse_load *load, int64_t job, uint64_t device, const void *host, int64_t nbytes);

#endif
