/* Loads weights: bytes of files to the host's memory or a GPU's, as they are or through a kernel that repacks them. */
#ifndef ZSE_LOAD_H
#define ZSE_LOAD_H

#include "zse_gpu.h"

/* A job: the bytes [offset, offset + nbytes) of `fd`, or, for a kernel, `runs` > 1 equal runs, each `stride` bytes behind the one before. Without `fn` they go to outputs[first_output] as they are (without outputs they
 * are read for their checksum alone, or for the page cache). With it, `fn` (a kernel of the CPU) is run over the whole grid; its argument slot 0 is the
 * piece, slot 1 that at `more_offset` if more_nbytes > 0. On the host it writes where its arguments say and there are no outputs; for
 * a GPU it makes the outputs in pinned memory: the slot of each is where that output is to be written. step: on a GPU the number of
 * the step that waits for a job without `fn`, or -1. */
typedef struct {
    zse_kernel fn;
    int64_t offset, nbytes, more_offset, more_nbytes;
    int32_t fd, more_fd;
    uint32_t first_arg, num_args, first_output, num_outputs;
    int64_t grid[3], step, runs, stride;
} zse_load_job;

/* A launch in the stream of the copies, once `nbytes` of its jobs were put into it. Its arguments lie among those of the jobs.
 * after: that many steps have been launched before one of its bytes is copied: they read the memory that it is copied to. */
typedef struct {
    zse_gpu_launch launch;
    int64_t nbytes, after;
} zse_load_step;

typedef struct {
    uint64_t address; /* in the device's memory */
    int64_t nbytes;
    uint32_t slot, reserved;
} zse_load_output;

/* A file that lies in the page cache and of whose mapping the driver has registered `num_chunks` chunks of chunk_bytes, from its beginning on.
 * map: where the whole file is mapped. Jobs that read it copy from there; whether it is the same file its size and times tell. */
typedef struct {
    uint64_t device, inode;
    int64_t nbytes, changed_ns, num_chunks; /* changed_ns: the time of its last change */
    void *map;
} zse_load_kept;

/* How. threads: that read. slot_bytes: most that is read at once, and of a pinned slot. The rest is for a GPU. chunk_bytes: of file
 * mappings that are registered at once, 0: never map. window_bytes: most that is registered. pin, unpin: pinned memory for
 * who has none of its own that the driver registers. warm_percent: a load of which that much is in the page cache is mapped, another one read.
 * slow_us: a chunk that takes longer to register is slow: after some of them the rest is read; 0: never. events: threads * 2 + 1.
 * sums (the host's memory alone): the CRC-32 of what each job read is taken while it lies in the core's cache. ahead: jobs without
 * outputs bring their bytes into the page cache and no further. kept: files that are registered already, whether jobs need them or not; a
 * load that was started gives them back with those that it registers itself. */
typedef struct {
    int64_t chunk_bytes, window_bytes, slot_bytes;
    int32_t (*pin)(void **host, size_t nbytes, uint32_t flags);
    int32_t (*unpin)(void *host);
    void *stream;
    void *const *events;
    int32_t threads, warm_percent;
    uint32_t register_flags, slow_us;
    int32_t sums, ahead;
    const zse_load_kept *kept;
    int64_t num_kept;
} zse_load_options;

/* What failed: job (-1: nothing) and why. */
typedef struct {
    int64_t job, got; /* got: bytes of the job that were read */
    int32_t from_driver, code; /* code: the driver's, else errno, 0 where the file ends early */
    int32_t mapped, reserved; /* whether the mapping was used, for the log */
} zse_load_result;

typedef struct zse_load zse_load;

/* driver: NULL for the host's memory, where there are no steps. */
zse_load *zse_load_start(const zse_gpu_driver *driver, const zse_load_options *options, const zse_load_job *jobs, int64_t num_jobs,
                         const uint64_t *args, int64_t num_args, const zse_load_output *outputs, int64_t num_outputs,
                         const zse_load_step *steps, int64_t num_steps, int32_t *error);
int32_t zse_load_finished(zse_load *load); /* whether wait would return at once */
int32_t zse_load_tidy(zse_load *load);     /* whether close would return at once */
/* Until all jobs are done, or one failed and none runs. */
void zse_load_wait(zse_load *load, zse_load_result *result);
void zse_load_cancel(zse_load *load); /* start no further job */
/* After wait, where no job failed: the CRC-32 of each job's bytes. */
void zse_load_sums(const zse_load *load, uint32_t *sums);
/* Until the threads have given everything back; the handle is gone after this. */
void zse_load_close(zse_load *load);

/* CRC-32 as zlib's crc32(). joined: of `first`'s bytes and then the nbytes of `second`. is_fast: above 5 GB/s. */
uint32_t zse_crc32(uint32_t crc, const void *bytes, int64_t nbytes);
uint32_t zse_crc32_joined(uint32_t first, uint32_t second, int64_t nbytes);
int32_t zse_crc32_is_fast(void);

#endif
