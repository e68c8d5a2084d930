/* Weight loader: threads take pieces of files and bring them into memory, while Python imports and records.
 *
 * To the host's memory (no driver) a thread reads a piece where it belongs, or into memory of its own, out of which a kernel
 * repacks it.
 *
 * To a GPU, pages that are in the page cache already are not copied by the CPU at all: the file is mapped, the mapping is registered
 * with the driver in chunks (read-only) and the copy engine reads it. One thread does that at the speed of the bus: on an H200
 * 4 GiB take 82 ms (52 GB/s), of which registering is 79 ms beside the copies; more threads gain nothing (load_map.c).
 * What is on the disk, or what a kernel must repack first, goes through pinned memory of several threads. So does what a load begins
 * with while the engine's memory is still asked for, which the driver does not give while it registers.
 *
 * The CPU never reads a mapping: a file that shrinks under us is a short read or fails in the driver's registration, not a SIGBUS.
 * C threads, because Python's have to wait for imports that run meanwhile.
 */
#define _GNU_SOURCE
#include "load.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#define ALIGN 256
#define HUGE_PAGE (2 << 20)
#define PORTABLE 1 /* CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTALLOC_PORTABLE and HIP's */

void load_fail(zse_load *load, int64_t job, int32_t from_driver, int32_t code, int64_t got) {
    pthread_mutex_lock(&load->lock);
    if (load->result.job < 0 || job < load->result.job || (job == load->result.job && got < load->result.got)) {
        load->result.job = job;
        load->result.from_driver = from_driver;
        load->result.code = code;
        load->result.got = got;
    }
    atomic_store(&load->cancelled, 1);
    pthread_cond_broadcast(&load->stepped);
    pthread_mutex_unlock(&load->lock);
}

/* nbytes at `offset` of the file; `at`: how many of the job's bytes come before these. to: NULL where the bytes are summed and
 * forgotten. */
static int read_all(zse_load *load, int64_t job, int32_t fd, int64_t offset, int64_t nbytes, char *to, int64_t at) {
    int64_t got = 0, most = load->sums ? SUM_BYTES : nbytes;
    char scratch[SUM_BYTES];
    while (got < nbytes) {
        int64_t left = nbytes - got;
        char *here = to ? to + got : scratch;
        ssize_t count = pread(fd, here, (size_t)(left < most ? left : most), (off_t)(offset + got));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            load_fail(load, job, 0, count < 0 ? errno : 0, at + got);
            return 0;
        }
        if (load->sums) load->sums[job] = zse_crc32(load->sums[job], here, count);
        got += count;
    }
    return 1;
}

static int64_t aligned(int64_t nbytes) { return (nbytes + ALIGN - 1) / ALIGN * ALIGN; }

/* Bytes of a thread's own memory that a job with a kernel is read into. */
static int64_t staging_bytes(const zse_load_job *job) { return aligned(job->nbytes) + aligned(job->more_nbytes); }

/* Reads a piece, by way of `staging` and the kernel if there is one. slot: pinned memory from which copies are put into the stream;
 * NULL: the memory is the host's own. 0, a driver's status, or -1 when the failure is noted already, or the load was given up. */
static int32_t bring(zse_load *load, const struct piece *piece, char *slot, char *staging) {
    const zse_load_job *job = &load->jobs[piece->job];
    const zse_load_output *outputs = load->outputs + job->first_output;
    int32_t status = 0;
    if (!job->fn) {
        uint64_t address = job->num_outputs ? outputs->address + (uint64_t)piece->offset : 0;
        char *to = slot ? slot : load->options.ahead ? staging : (char *)(uintptr_t)address;
        if (!read_all(load, piece->job, job->fd, job->offset + piece->offset, piece->nbytes, to, piece->offset)) return -1;
        return slot ? load_copy(load, piece->job, address, slot, piece->nbytes) : 0;
    }
    uint64_t args[ZSE_MAX_ARGS];
    char *more = staging + aligned(job->nbytes);
    int64_t runs = job->runs > 1 ? job->runs : 1, nbytes = job->nbytes / runs;
    for (int64_t i = 0; i < runs; i++)
        if (!read_all(load, piece->job, job->fd, job->offset + i * job->stride, nbytes, staging + i * nbytes, i * nbytes)) return -1;
    if (!read_all(load, piece->job, job->more_fd, job->more_offset, job->more_nbytes, more, job->nbytes)) return -1;
    memcpy(args, load->args + job->first_arg, job->num_args * sizeof *args);
    args[0] = (uint64_t)(uintptr_t)staging;
    if (job->more_nbytes) args[1] = (uint64_t)(uintptr_t)more;
    int64_t at = 0;
    for (uint32_t i = 0; i < job->num_outputs; i++) {
        args[outputs[i].slot] = (uint64_t)(uintptr_t)(slot + at);
        at += aligned(outputs[i].nbytes);
    }
    job->fn(args, job->grid, 0, job->grid[0] * job->grid[1] * job->grid[2]);
    at = 0;
    for (uint32_t i = 0; i < job->num_outputs && !status; i++) {
        if (outputs[i].nbytes) status = load->driver.to_device(outputs[i].address, slot + at, (size_t)outputs[i].nbytes, load->options.stream);
        at += aligned(outputs[i].nbytes);
    }
    return status;
}

struct worker {
    zse_load *load;
    int32_t index;
};

/* Pinned memory for a thread. Its own, in large pages where the system has them, takes 1.5 ms to touch and 0.2 to register, beside other
 * threads'; of the driver's all of them wait for each other (12 to 18 ms for 32 MiB, H200). 0, or the driver's status. */
static int32_t take_slots(zse_load *load, struct slots *slots) {
    int64_t nbytes = (SLOTS * load->slot_bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    char *map = mmap(NULL, (size_t)(nbytes + HUGE_PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map != MAP_FAILED) {
        char *start = (char *)(((uintptr_t)map + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE), *end = start + nbytes;
        if (start > map) munmap(map, (size_t)(start - map));
        if (end < map + nbytes + HUGE_PAGE) munmap(end, (size_t)(map + nbytes + HUGE_PAGE - end));
        madvise(start, (size_t)nbytes, MADV_HUGEPAGE);
        madvise(start, (size_t)nbytes, MADV_DONTFORK); /* a child's copy would leave the driver with the page that nobody writes to */
        memset(start, 0, (size_t)nbytes);
        if (!load->driver.host_register(start, (size_t)nbytes, PORTABLE)) {
            *slots = (struct slots){start, nbytes, 1};
            return 0;
        }
        munmap(start, (size_t)nbytes);
    }
    *slots = (struct slots){NULL, SLOTS * load->slot_bytes, 0};
    void *memory = NULL;
    int32_t status = load->options.pin(&memory, (size_t)slots->nbytes, PORTABLE);
    if (!status) slots->memory = memory;
    return status;
}

static void *worker_main(void *argument) {
    struct worker *worker = argument;
    zse_load *load = worker->load;
    struct slots *own = load->options.pin ? &load->slots[worker->index] : NULL;
    void **events = load->events + worker->index * SLOTS;
    void *staging = NULL;
    int64_t staged = 0;
    int used[SLOTS] = {0}, slot = 0;
    free(worker);
    int32_t status = own ? load->driver.set_current(load->driver.current) : 0;
    if (own && !status && !own->memory) status = take_slots(load, own);
    char *slots = own ? own->memory : NULL;
    while (!atomic_load_explicit(&load->cancelled, memory_order_relaxed)) {
        int64_t index = atomic_fetch_add_explicit(&load->next, 1, memory_order_relaxed);
        if (index >= load->num_pieces) break;
        const struct piece *piece = &load->pieces[index];
        int64_t needed = load->jobs[piece->job].fn ? staging_bytes(&load->jobs[piece->job]) : load->options.ahead ? piece->nbytes : 0;
        if (needed > staged) {
            free(staging);
            staged = needed;
            if (posix_memalign(&staging, 4096, (size_t)staged)) {
                staging = NULL;
                load_fail(load, piece->job, 0, ENOMEM, 0);
                break;
            }
        }
        if (!status && used[slot]) status = load->driver.event_wait(events[slot]);
        if (!status) status = bring(load, piece, slots ? slots + slot * load->slot_bytes : NULL, staging);
        if (!status && slots) status = load->driver.event_record(events[slot], load->options.stream);
        if (status) {
            if (status > 0) load_fail(load, piece->job, 1, status, piece->offset);
            break; /* below 0: said already, or the load was given up */
        }
        used[slot] = slots != NULL;
        slot = (slot + 1) % SLOTS;
    }
    free(staging);
    return NULL;
}

/* Pieces of the jobs from `first` on (those with a kernel only, or all; of job `first` what is not done yet), and the threads that
 * bring them. 0, or the error is set. */
static int32_t start_workers(zse_load *load, struct piece first, int direct_too) {
    int64_t count = 0, most = load->options.slot_bytes;
    load->slot_bytes = most;
    for (int64_t i = first.job; i < load->num_jobs; i++) {
        const zse_load_job *job = &load->jobs[i];
        if (job->fn) {
            int64_t made = 0;
            for (uint32_t j = 0; j < job->num_outputs; j++) made += aligned(load->outputs[job->first_output + j].nbytes);
            if (made > load->slot_bytes) load->slot_bytes = made;
            count++;
        } else if (direct_too)
            count += (job->nbytes + most - 1) / most;
    }
    if (!count) return 0;
    load->pieces = malloc((size_t)count * sizeof *load->pieces);
    if (!load->pieces) {
        load_fail(load, first.job, 0, ENOMEM, 0);
        return -1;
    }
    for (int64_t i = first.job; i < load->num_jobs; i++) {
        const zse_load_job *job = &load->jobs[i];
        if (job->fn) load->pieces[load->num_pieces++] = (struct piece){i, 0, job->nbytes};
        else if (direct_too)
            for (int64_t at = i == first.job ? first.offset : 0; at < job->nbytes; at += most)
                load->pieces[load->num_pieces++] = (struct piece){i, at, job->nbytes - at < most ? job->nbytes - at : most};
    }
    int32_t threads = load->options.threads;
    if (threads > load->num_pieces) threads = (int32_t)load->num_pieces;
    for (int32_t i = 0; i < threads; i++) {
        struct worker *worker = malloc(sizeof *worker);
        if (worker) *worker = (struct worker){load, i};
        if (!worker || pthread_create(&load->workers[i], NULL, worker_main, worker)) {
            free(worker);
            if (i) break; /* the threads that started do all the work */
            load_fail(load, load->pieces[0].job, 0, EAGAIN, 0);
            return -1;
        }
        load->threads = i + 1;
    }
    return 0;
}

/* Until the workers are done. */
static void end_workers(zse_load *load) {
    for (int32_t i = 0; i < load->threads; i++) pthread_join(load->workers[i], NULL);
    load->threads = 0;
}

static void give_slots(zse_load *load) {
    for (int32_t i = 0; i < load->options.threads && load->slots; i++) {
        struct slots *slots = &load->slots[i];
        if (slots->registered) {
            load->driver.host_unregister(slots->memory);
            munmap(slots->memory, (size_t)slots->nbytes);
        } else if (slots->memory)
            load->options.unpin(slots->memory);
    }
}

/* Direct jobs through mappings of their files, beside them the kernels' through pinned memory. 0: nothing is done, the files are to be
 * read. */
static int load_mapped(zse_load *load) {
    if (!load_map(load)) return 0;
    load->result.mapped = 1;
    if (start_workers(load, (struct piece){0}, 0)) return 1;
    struct piece rest = load_copy_mapped(load);
    if (rest.job == load->num_jobs) return 1;
    /* The driver does not take the mapping: read from there on. The kernels' threads end first. */
    end_workers(load);
    /* Their copies, too: the threads that come read into the same memory. */
    void *event = load->events[load->options.threads * SLOTS];
    int32_t status = load->driver.event_record(event, load->options.stream);
    if (!status) status = load->driver.event_wait(event);
    if (status) {
        load_fail(load, rest.job, 1, status, rest.offset);
        return 1;
    }
    free(load->pieces);
    load->pieces = NULL;
    load->num_pieces = 0;
    atomic_store(&load->next, 0);
    for (int64_t i = rest.job; i < load->num_jobs; i++)
        if (load->jobs[i].fn) load->jobs[i].fn = NULL, load->jobs[i].nbytes = 0; /* done */
    load->result.mapped = 0;
    start_workers(load, rest, 1);
    return 1;
}

static void *manager_main(void *argument) {
    zse_load *load = argument;
    const zse_gpu_driver *driver = &load->driver;
    int64_t last = load->num_jobs ? load->num_jobs - 1 : 0;
    int32_t status = driver->set_current ? driver->set_current(driver->current) : 0;
    if (status) load_fail(load, 0, 1, status, 0);
    else if (!load_mapped(load)) start_workers(load, (struct piece){0}, 1);
    end_workers(load);
    if (driver->set_current) {
        /* The end of the copies: after this the caller may use the weights; the rest is tidying up. */
        void *event = load->events[load->options.threads * SLOTS];
        status = driver->event_record(event, load->options.stream);
        if (!status) status = driver->event_wait(event);
        if (status) load_fail(load, last, 1, status, 0);
    }
    pthread_mutex_lock(&load->lock);
    atomic_store(&load->finished, 1);
    pthread_cond_broadcast(&load->changed);
    pthread_mutex_unlock(&load->lock);
    load_unregister(load);
    for (int64_t i = 0; i < load->num_files; i++)
        if (load->files[i].map) munmap(load->files[i].map, (size_t)load->files[i].mapped);
    give_slots(load);
    atomic_store(&load->tidy, 1);
    return NULL;
}

/* ---- the outside ---- */

static void release(zse_load *load) {
    for (int64_t i = 0; i < load->num_files; i++) {
        free(load->files[i].low);
        free(load->files[i].high);
    }
    pthread_mutex_destroy(&load->lock);
    pthread_cond_destroy(&load->changed);
    pthread_cond_destroy(&load->stepped);
    void *owned[] = {load->files, load->sums, load->jobs, load->args, load->outputs, load->steps, load->pieces, load->events, load->kept, load->pinned, load->slots, load};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
}

zse_load *zse_load_start(const zse_gpu_driver *driver, const zse_load_options *options, const zse_load_job *jobs, int64_t num_jobs,
                         const uint64_t *args, int64_t num_args, const zse_load_output *outputs, int64_t num_outputs,
                         const zse_load_step *steps, int64_t num_steps, int32_t *error) {
    *error = ZSE_EINVAL;
    if (num_jobs < 0 || options->num_kept < 0 || (options->num_kept && (!driver || options->chunk_bytes <= 0)) || num_args < 0 || num_outputs < 0 || num_steps < 0 || options->threads < 1 || options->threads > 1024) return NULL;
    if ((driver && options->sums) || !driver != !options->pin || options->slot_bytes < 4096 || options->slot_bytes % ALIGN || options->chunk_bytes % PAGE_MAX) return NULL;
    for (int64_t i = 0; i < num_jobs; i++) {
        const zse_load_job *job = &jobs[i];
        if (job->nbytes < 0 || job->offset < 0 || job->num_args > ZSE_MAX_ARGS || (job->fn && !job->num_args)) return NULL;
        if (job->more_nbytes < 0 || job->more_offset < 0 || (job->more_nbytes && (!job->fn || job->num_args < 2))) return NULL;
        if (job->runs < 0 || job->stride < 0 || (job->runs > 1 && (!job->fn || job->nbytes % job->runs || job->stride < job->nbytes / job->runs))) return NULL;
        if (job->step >= num_steps || (job->step >= 0 && (job->fn || !driver))) return NULL;
        if (job->first_arg > num_args || job->num_args > num_args - job->first_arg) return NULL;
        if (job->first_output > num_outputs || job->num_outputs > num_outputs - job->first_output) return NULL;
        /* On the host kernels write by their arguments. */
        if (job->fn && !driver ? job->num_outputs != 0 : !job->num_outputs && !options->sums && !options->ahead) return NULL;
        for (uint32_t j = 0; j < job->num_outputs; j++)
            if (job->fn && outputs[job->first_output + j].slot >= job->num_args) return NULL;
    }
    for (int64_t i = 0; i < num_steps; i++) {
        const zse_gpu_launch *launch = &steps[i].launch;
        if (steps[i].nbytes <= 0 || steps[i].after < 0 || steps[i].after > i) return NULL;
        if (launch->num_args > ZSE_MAX_ARGS || launch->first_arg > num_args || launch->num_args > num_args - launch->first_arg) return NULL;
    }
    *error = ZSE_ENOMEM;
    zse_load *load = calloc(1, sizeof *load + (size_t)options->threads * sizeof *load->workers);
    if (!load) return NULL;
    pthread_mutex_init(&load->lock, NULL);
    pthread_cond_init(&load->changed, NULL);
    pthread_cond_init(&load->stepped, NULL);
    if (driver) load->driver = *driver;
    load->options = *options;
    load->num_jobs = num_jobs;
    load->jobs = zse_copied(jobs, num_jobs, sizeof *jobs);
    load->args = zse_copied(args, num_args, sizeof *args);
    load->outputs = zse_copied(outputs, num_outputs, sizeof *outputs);
    load->steps = zse_copied(steps, num_steps, sizeof *steps);
    load->num_steps = num_steps;
    load->events = zse_copied(options->events, driver ? options->threads * SLOTS + 1 : 0, sizeof *load->events);
    load->files = calloc((size_t)(num_jobs + options->num_kept + 1), sizeof *load->files);
    load->sums = options->sums ? calloc(num_jobs ? (size_t)num_jobs : 1, sizeof *load->sums) : NULL;
    load->slots = driver ? calloc((size_t)options->threads, sizeof *load->slots) : NULL;
    load->result.job = -1;
    int has_all = load->jobs && load->args && load->outputs && load->steps && load->events && load->files && (load->slots || !driver) && load_take_kept(load);
    if (has_all && (load->sums || !options->sums)) {
        if (!pthread_create(&load->manager, NULL, manager_main, load)) {
            *error = ZSE_OK;
            return load;
        }
        *error = ZSE_ETHREAD;
    }
    release(load);
    return NULL;
}

int32_t zse_load_finished(zse_load *load) { return atomic_load_explicit(&load->finished, memory_order_acquire); }

int32_t zse_load_tidy(zse_load *load) { return atomic_load_explicit(&load->tidy, memory_order_acquire); }

void zse_load_wait(zse_load *load, zse_load_result *result) {
    pthread_mutex_lock(&load->lock);
    while (!atomic_load(&load->finished)) pthread_cond_wait(&load->changed, &load->lock);
    *result = load->result;
    pthread_mutex_unlock(&load->lock);
}

void zse_load_sums(const zse_load *load, uint32_t *sums) { memcpy(sums, load->sums, (size_t)load->num_jobs * sizeof *sums); }

void zse_load_cancel(zse_load *load) {
    pthread_mutex_lock(&load->lock);
    atomic_store(&load->cancelled, 1);
    pthread_cond_broadcast(&load->stepped); /* who waits for a step to be launched gives up */
    pthread_mutex_unlock(&load->lock);
}

void zse_load_close(zse_load *load) {
    pthread_mutex_lock(&load->lock);
    atomic_store(&load->closing, 1);
    pthread_cond_broadcast(&load->changed);
    pthread_mutex_unlock(&load->lock);
    pthread_join(load->manager, NULL);
    release(load);
}
