/* Weight loader of a GPU.
 *
 * Pages that are in the page cache already are not copied by the CPU at all: the file is mapped, the mapping is registered
 * with the driver in chunks (read-only) and the copy engine reads it. One thread does that at the speed of the bus: on an H200
 * 4 GiB take 82 ms (52 GB/s), of which registering is 79 ms beside the copies; more threads gain nothing (gpu_load_map.c).
 * What is on the disk, or what a kernel must repack first, goes through a ring of pinned memory with several threads.
 *
 * The CPU never reads a mapping: a file that shrinks under us fails in the driver's registration, not with SIGBUS. C threads,
 * because Python's have to wait for imports that run meanwhile.
 */
#define _GNU_SOURCE
#include "gpu_load.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_ARGS 32
#define ALIGN 256

void gpu_load_fail(zse_gpu_load *load, int64_t job, int32_t kind, int32_t code, int64_t got) {
    pthread_mutex_lock(&load->lock);
    if (load->result.job < 0 || job < load->result.job || (job == load->result.job && got < load->result.got)) {
        load->result.job = job;
        load->result.kind = kind;
        load->result.code = code;
        load->result.got = got;
    }
    atomic_store(&load->cancelled, 1);
    pthread_cond_broadcast(&load->changed);
    pthread_mutex_unlock(&load->lock);
}

void gpu_load_issued(zse_gpu_load *load, int64_t job, int64_t nbytes) {
    atomic_fetch_add_explicit(&load->bytes, nbytes, memory_order_relaxed);
    pthread_mutex_lock(&load->lock);
    load->left[job] -= nbytes;
    int moved = 0;
    while (load->issued < load->num_jobs && load->left[load->issued] <= 0) load->issued++, moved = 1;
    if (moved) pthread_cond_broadcast(&load->changed);
    pthread_mutex_unlock(&load->lock);
}

static int read_all(zse_gpu_load *load, const struct piece *piece, char *to) {
    const zse_gpu_load_job *job = &load->jobs[piece->job];
    int64_t got = 0;
    while (got < piece->nbytes) {
        ssize_t count = pread(job->fd, to + got, (size_t)(piece->nbytes - got), (off_t)(job->offset + piece->offset + got));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            gpu_load_fail(load, piece->job, count < 0 ? ZSE_LOAD_READ : ZSE_LOAD_SHORT, count < 0 ? errno : 0, piece->offset + got);
            return 0;
        }
        got += count;
    }
    return 1;
}

/* ---- through the ring ---- */

struct worker {
    zse_gpu_load *load;
    int32_t index;
};

/* Reads a piece into `slot`, by way of `staging` and the kernel if there is one, and puts the copies into the stream. */
static int32_t bring(zse_gpu_load *load, const struct piece *piece, char *slot, char *staging) {
    const zse_gpu_load_job *job = &load->jobs[piece->job];
    const zse_gpu_load_output *outputs = load->outputs + job->first_output;
    int32_t status = 0;
    if (!job->fn) {
        if (!read_all(load, piece, slot)) return -1;
        return load->driver.to_device(outputs->device + (uint64_t)piece->offset, slot, (size_t)piece->nbytes, load->options.stream);
    }
    uint64_t args[MAX_ARGS];
    if (!read_all(load, piece, staging)) return -1;
    memcpy(args, load->args + job->first_arg, job->num_args * sizeof *args);
    args[0] = (uint64_t)(uintptr_t)staging;
    int64_t at = 0;
    for (uint32_t i = 0; i < job->num_outputs; i++) {
        args[outputs[i].slot] = (uint64_t)(uintptr_t)(slot + at);
        at += (outputs[i].nbytes + ALIGN - 1) / ALIGN * ALIGN;
    }
    job->fn(args, job->grid, 0, job->grid[0] * job->grid[1] * job->grid[2]);
    at = 0;
    for (uint32_t i = 0; i < job->num_outputs && !status; i++) {
        if (outputs[i].nbytes) status = load->driver.to_device(outputs[i].device, slot + at, (size_t)outputs[i].nbytes, load->options.stream);
        at += (outputs[i].nbytes + ALIGN - 1) / ALIGN * ALIGN;
    }
    return status;
}

static void *worker_main(void *argument) {
    struct worker *worker = argument;
    zse_gpu_load *load = worker->load;
    char *slots = (char *)load->ring + (int64_t)worker->index * SLOTS * load->slot_bytes;
    void **events = load->events + worker->index * SLOTS;
    void *staging = NULL;
    int64_t staged = 0;
    int used[SLOTS] = {0}, slot = 0;
    free(worker);
    int32_t status = load->driver.set_current(load->driver.current);
    while (!atomic_load_explicit(&load->cancelled, memory_order_relaxed)) {
        int64_t index = atomic_fetch_add_explicit(&load->next, 1, memory_order_relaxed);
        if (index >= load->num_pieces) break;
        const struct piece *piece = &load->pieces[index];
        if (load->jobs[piece->job].fn && piece->nbytes > staged) {
            free(staging);
            staged = piece->nbytes;
            if (posix_memalign(&staging, 4096, (size_t)staged)) {
                staging = NULL;
                gpu_load_fail(load, piece->job, ZSE_LOAD_MEMORY, ENOMEM, 0);
                break;
            }
        }
        if (!status && used[slot]) status = load->driver.event_wait(events[slot]);
        if (!status) status = bring(load, piece, slots + slot * load->slot_bytes, staging);
        if (!status) status = load->driver.event_record(events[slot], load->options.stream);
        if (status) {
            if (status > 0) gpu_load_fail(load, piece->job, ZSE_LOAD_DRIVER, status, piece->offset);
            break;
        }
        used[slot] = 1;
        slot = (slot + 1) % SLOTS;
        gpu_load_issued(load, piece->job, piece->nbytes);
    }
    free(staging);
    pthread_mutex_lock(&load->lock);
    load->running--;
    pthread_cond_broadcast(&load->changed);
    pthread_mutex_unlock(&load->lock);
    return NULL;
}

/* Pieces of the jobs from `first` on (those with a kernel only, or all), and the threads that bring them. 0, or the error is set. */
static int32_t start_ring(zse_gpu_load *load, int64_t first, int direct_too) {
    int64_t count = 0;
    load->slot_bytes = load->options.slot_bytes;
    for (int64_t i = first; i < load->num_jobs; i++) {
        const zse_gpu_load_job *job = &load->jobs[i];
        if (job->fn) {
            int64_t made = 0;
            for (uint32_t j = 0; j < job->num_outputs; j++)
                made += (load->outputs[job->first_output + j].nbytes + ALIGN - 1) / ALIGN * ALIGN;
            if (made > load->slot_bytes) load->slot_bytes = made;
            count++;
        } else if (direct_too)
            count += (job->nbytes + load->options.slot_bytes - 1) / load->options.slot_bytes;
    }
    if (!count) return 0;
    load->pieces = malloc((size_t)count * sizeof *load->pieces);
    if (!load->pieces) {
        gpu_load_fail(load, first, ZSE_LOAD_MEMORY, ENOMEM, 0);
        return -1;
    }
    for (int64_t i = first; i < load->num_jobs; i++) {
        const zse_gpu_load_job *job = &load->jobs[i];
        if (job->fn) load->pieces[load->num_pieces++] = (struct piece){i, 0, job->nbytes};
        else if (direct_too)
            for (int64_t at = job->nbytes - load->left[i]; at < job->nbytes; at += load->options.slot_bytes) {
                int64_t rest = job->nbytes - at;
                load->pieces[load->num_pieces++] = (struct piece){i, at, rest < load->options.slot_bytes ? rest : load->options.slot_bytes};
            }
    }
    int32_t threads = load->options.threads;
    if (threads > load->num_pieces) threads = (int32_t)load->num_pieces;
    int32_t status = load->options.pin(&load->ring, (size_t)(threads * SLOTS * load->slot_bytes), 1);
    if (status) {
        load->ring = NULL;
        gpu_load_fail(load, load->pieces[0].job, ZSE_LOAD_DRIVER, status, 0);
        return -1;
    }
    for (int32_t i = 0; i < threads; i++) {
        struct worker *worker = malloc(sizeof *worker);
        if (worker) *worker = (struct worker){load, i};
        pthread_mutex_lock(&load->lock);
        load->running++;
        pthread_mutex_unlock(&load->lock);
        if (!worker || pthread_create(&load->workers[i], NULL, worker_main, worker)) {
            free(worker);
            pthread_mutex_lock(&load->lock);
            load->running--;
            pthread_mutex_unlock(&load->lock);
            if (i) break; /* the threads that started do all the work */
            gpu_load_fail(load, load->pieces[0].job, ZSE_LOAD_MEMORY, EAGAIN, 0);
            return -1;
        }
        load->threads = i + 1;
    }
    return 0;
}

/* Jobs of no bytes, and their place in the order. */
static void skip_empty(zse_gpu_load *load) {
    pthread_mutex_lock(&load->lock);
    while (load->issued < load->num_jobs && load->left[load->issued] <= 0) load->issued++;
    pthread_mutex_unlock(&load->lock);
}

static void *manager_main(void *argument) {
    zse_gpu_load *load = argument;
    void *event = load->events[load->options.threads * SLOTS];
    struct pinned *pinned = NULL;
    int64_t num_pinned = 0, first_pinned = 0, visits = 1;
    int32_t status = load->driver.set_current(load->driver.current);
    skip_empty(load);
    if (status) gpu_load_fail(load, 0, ZSE_LOAD_DRIVER, status, 0);
    else {
        int mapped = gpu_load_map(load);
        /* With a window a chunk may be registered again for each job that touches it. */
        for (int64_t i = 0; mapped && i < load->num_jobs; i++) visits += load->jobs[i].nbytes / load->options.chunk_bytes + 2;
        if (mapped) mapped = (pinned = malloc((size_t)visits * sizeof *pinned)) != NULL;
        if (!mapped) start_ring(load, 0, 1);
        else {
            load->result.mapped = 1;
            int ring = start_ring(load, 0, 0);
            int64_t undone = ring ? load->num_jobs : gpu_load_copy_mapped(load, pinned, &num_pinned, &first_pinned);
            if (undone < load->num_jobs) {
                /* The driver does not take the mapping: read from there on. The kernels' threads end first. */
                for (int32_t i = 0; i < load->threads; i++) pthread_join(load->workers[i], NULL);
                load->threads = 0;
                free(load->pieces);
                load->pieces = NULL;
                load->num_pieces = 0;
                atomic_store(&load->next, 0);
                if (load->ring) load->options.unpin(load->ring);
                load->ring = NULL;
                for (int64_t i = undone; i < load->num_jobs; i++)
                    if (load->jobs[i].fn) load->jobs[i].fn = NULL, load->left[i] = 0, load->jobs[i].nbytes = 0; /* done */
                load->result.mapped = 0;
                start_ring(load, undone, 1);
            }
        }
    }
    for (int32_t i = 0; i < load->threads; i++) pthread_join(load->workers[i], NULL);
    /* The end of the copies: after this the caller may use the weights; the rest is tidying up. */
    status = load->driver.event_record(event, load->options.stream);
    if (!status) status = load->driver.event_wait(event);
    if (status) gpu_load_fail(load, load->num_jobs ? load->num_jobs - 1 : 0, ZSE_LOAD_DRIVER, status, 0);
    pthread_mutex_lock(&load->lock);
    atomic_store(&load->finished, 1);
    pthread_cond_broadcast(&load->changed);
    pthread_mutex_unlock(&load->lock);
    gpu_load_unregister(load, pinned, first_pinned, num_pinned);
    free(pinned);
    for (int64_t i = 0; i < load->num_files; i++)
        if (load->files[i].map) munmap(load->files[i].map, (size_t)(load->files[i].end - load->files[i].base));
    if (load->ring) load->options.unpin(load->ring);
    atomic_store(&load->tidy, 1);
    return NULL;
}

/* ---- the outside ---- */

static void *copied(const void *from, int64_t count, size_t size) {
    void *to = malloc(count > 0 ? (size_t)count * size : 1);
    if (to && count > 0) memcpy(to, from, (size_t)count * size);
    return to;
}

static void release(zse_gpu_load *load) {
    if (load->files)
        for (int64_t i = 0; i < load->num_files; i++) {
            free(load->files[i].low);
            free(load->files[i].high);
        }
    pthread_mutex_destroy(&load->lock);
    pthread_cond_destroy(&load->changed);
    free(load->files);
    free(load->jobs);
    free(load->args);
    free(load->outputs);
    free(load->left);
    free(load->pieces);
    free(load->events);
    free(load);
}

zse_gpu_load *zse_gpu_load_start(const zse_gpu_driver *driver, const zse_gpu_load_options *options, const zse_gpu_load_job *jobs,
                                 int64_t num_jobs, const uint64_t *args, int64_t num_args, const zse_gpu_load_output *outputs,
                                 int64_t num_outputs, int32_t *error) {
    *error = ZSE_EINVAL;
    if (num_jobs < 0 || num_args < 0 || num_outputs < 0 || options->threads < 1 || options->threads > 256) return NULL;
    if (options->slot_bytes < 4096 || options->slot_bytes % ALIGN || options->chunk_bytes % PAGE_MAX) return NULL;
    for (int64_t i = 0; i < num_jobs; i++) {
        const zse_gpu_load_job *job = &jobs[i];
        if (job->nbytes < 0 || job->offset < 0 || job->num_args > MAX_ARGS || (job->fn && !job->num_args)) return NULL;
        if (job->first_arg > num_args || job->num_args > num_args - job->first_arg) return NULL;
        if (job->first_output > num_outputs || job->num_outputs > num_outputs - job->first_output || !job->num_outputs) return NULL;
        for (uint32_t j = 0; j < job->num_outputs; j++)
            if (job->fn && outputs[job->first_output + j].slot >= job->num_args) return NULL;
    }
    *error = ZSE_ENOMEM;
    zse_gpu_load *load = calloc(1, sizeof *load + (size_t)options->threads * sizeof *load->workers);
    if (!load) return NULL;
    pthread_mutex_init(&load->lock, NULL);
    pthread_cond_init(&load->changed, NULL);
    load->driver = *driver;
    load->options = *options;
    load->num_jobs = num_jobs;
    load->jobs = copied(jobs, num_jobs, sizeof *jobs);
    load->args = copied(args, num_args, sizeof *args);
    load->outputs = copied(outputs, num_outputs, sizeof *outputs);
    load->events = copied(options->events, options->threads * SLOTS + 1, sizeof *load->events);
    load->files = calloc(num_jobs ? (size_t)num_jobs : 1, sizeof *load->files);
    load->left = malloc(num_jobs ? (size_t)num_jobs * sizeof *load->left : 1);
    if (!load->jobs || !load->args || !load->outputs || !load->events || !load->files || !load->left) {
        release(load);
        return NULL;
    }
    for (int64_t i = 0; i < num_jobs; i++) load->left[i] = jobs[i].nbytes;
    load->result.job = -1;
    if (pthread_create(&load->manager, NULL, manager_main, load)) {
        release(load);
        *error = ZSE_ETHREAD;
        return NULL;
    }
    *error = ZSE_OK;
    return load;
}

int64_t zse_gpu_load_bytes(const zse_gpu_load *load) {
    return atomic_load_explicit(&((zse_gpu_load *)(uintptr_t)load)->bytes, memory_order_relaxed);
}

int32_t zse_gpu_load_finished(const zse_gpu_load *load) {
    return atomic_load_explicit(&((zse_gpu_load *)(uintptr_t)load)->finished, memory_order_acquire);
}

int32_t zse_gpu_load_tidy(const zse_gpu_load *load) {
    return atomic_load_explicit(&((zse_gpu_load *)(uintptr_t)load)->tidy, memory_order_acquire);
}

void zse_gpu_load_wait(zse_gpu_load *load, int64_t num_jobs, zse_gpu_load_result *result) {
    pthread_mutex_lock(&load->lock);
    while (!atomic_load(&load->finished) && load->issued < num_jobs && load->result.job < 0)
        pthread_cond_wait(&load->changed, &load->lock);
    if (num_jobs >= load->num_jobs || load->result.job >= 0)
        while (!atomic_load(&load->finished)) pthread_cond_wait(&load->changed, &load->lock);
    *result = load->result;
    pthread_mutex_unlock(&load->lock);
}

void zse_gpu_load_cancel(zse_gpu_load *load) { atomic_store(&load->cancelled, 1); }

void zse_gpu_load_close(zse_gpu_load *load) {
    pthread_mutex_lock(&load->lock);
    atomic_store(&load->closing, 1);
    pthread_cond_broadcast(&load->changed);
    pthread_mutex_unlock(&load->lock);
    pthread_join(load->manager, NULL);
    release(load);
}
