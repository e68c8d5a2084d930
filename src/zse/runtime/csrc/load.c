/* Weight loader: threads take pieces of files, pread them into their own staging memory and run a repacking kernel on them.
 *
 * Files are read, never mapped: one that shrinks under us is a short read with the job's number, not a SIGBUS.
 */
#define _GNU_SOURCE
#include "zse_runtime.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STAGING_MAX (8ll << 20)
#define MAX_ARGS 32

struct zse_load {
    zse_load_job *jobs;
    uint64_t *args;
    int64_t num_jobs, staging_bytes;
    _Atomic int64_t next, bytes;
    _Atomic int32_t running, cancelled;
    pthread_mutex_t lock;
    int64_t failed, got; /* the failed job with the lowest index */
    int32_t code;
    int32_t threads;
    pthread_t handles[];
};

static void fail(zse_load *load, int64_t job, int32_t code, int64_t got) {
    pthread_mutex_lock(&load->lock);
    if (load->failed < 0 || job < load->failed) {
        load->failed = job;
        load->code = code;
        load->got = got;
    }
    pthread_mutex_unlock(&load->lock);
    atomic_store(&load->cancelled, 1);
}

/* Returns 1 when all bytes are there. */
static int read_all(zse_load *load, int64_t index, const zse_load_job *job, char *to) {
    int64_t got = 0;
    while (got < job->nbytes) {
        ssize_t count = pread(job->fd, to + got, (size_t)(job->nbytes - got), (off_t)(job->offset + got));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            fail(load, index, count < 0 ? errno : 0, got);
            return 0;
        }
        got += count;
    }
    atomic_fetch_add_explicit(&load->bytes, got, memory_order_relaxed);
    return 1;
}

static void *load_main(void *argument) {
    zse_load *load = argument;
    void *staging = NULL;
    uint64_t args[MAX_ARGS];
    while (!atomic_load_explicit(&load->cancelled, memory_order_relaxed)) {
        int64_t index = atomic_fetch_add_explicit(&load->next, 1, memory_order_relaxed);
        if (index >= load->num_jobs) break;
        const zse_load_job *job = &load->jobs[index];
        if (!job->fn) {
            read_all(load, index, job, (char *)(uintptr_t)load->args[job->first_arg]);
            continue;
        }
        if (!staging && posix_memalign(&staging, 4096, (size_t)load->staging_bytes)) {
            fail(load, index, ENOMEM, 0);
            break;
        }
        if (!read_all(load, index, job, staging)) break;
        memcpy(args, load->args + job->first_arg, job->num_args * sizeof *args);
        args[0] = (uint64_t)(uintptr_t)staging;
        job->fn(args, job->grid, 0, job->grid[0] * job->grid[1] * job->grid[2]);
    }
    free(staging);
    atomic_fetch_sub_explicit(&load->running, 1, memory_order_release);
    return NULL;
}

static void release(zse_load *load) {
    pthread_mutex_destroy(&load->lock);
    free(load->jobs);
    free(load->args);
    free(load);
}

zse_load *zse_load_start(const zse_load_job *jobs, int64_t num_jobs, const uint64_t *args, int64_t num_args, int32_t threads,
                         int32_t *error) {
    *error = ZSE_EINVAL;
    if (num_jobs < 0 || num_args < 0 || threads < 1 || threads > 1024) return NULL;
    int64_t staging = 64;
    for (int64_t i = 0; i < num_jobs; i++) {
        const zse_load_job *job = &jobs[i];
        if (job->nbytes < 0 || job->offset < 0 || (job->fn && job->nbytes > STAGING_MAX)) return NULL;
        if (job->num_args < 1 || job->num_args > MAX_ARGS) return NULL;
        if (job->first_arg > num_args || job->num_args > num_args - job->first_arg) return NULL;
        if (job->fn && job->nbytes > staging) staging = job->nbytes;
    }
    if (threads > num_jobs) threads = num_jobs ? (int32_t)num_jobs : 1;
    *error = ZSE_ENOMEM;
    zse_load *load = calloc(1, sizeof *load + (size_t)threads * sizeof *load->handles);
    if (!load) return NULL;
    load->jobs = malloc(num_jobs ? (size_t)num_jobs * sizeof *jobs : 1);
    load->args = malloc(num_args ? (size_t)num_args * sizeof *args : 1);
    pthread_mutex_init(&load->lock, NULL);
    if (!load->jobs || !load->args) {
        release(load);
        return NULL;
    }
    if (num_jobs) memcpy(load->jobs, jobs, (size_t)num_jobs * sizeof *jobs);
    if (num_args) memcpy(load->args, args, (size_t)num_args * sizeof *args);
    load->num_jobs = num_jobs;
    load->staging_bytes = staging;
    load->failed = -1;
    atomic_store(&load->running, threads);
    for (int32_t i = 0; i < threads; i++) {
        if (pthread_create(&load->handles[i], NULL, load_main, load)) {
            atomic_fetch_sub(&load->running, threads - i);
            if (i) break; /* the threads that started do all the work */
            release(load);
            *error = ZSE_ETHREAD;
            return NULL;
        }
        load->threads = i + 1;
    }
    *error = ZSE_OK;
    return load;
}

int64_t zse_load_bytes(const zse_load *load) {
    return atomic_load_explicit(&((zse_load *)(uintptr_t)load)->bytes, memory_order_relaxed);
}

int32_t zse_load_finished(const zse_load *load) {
    return atomic_load_explicit(&((zse_load *)(uintptr_t)load)->running, memory_order_acquire) == 0;
}

int64_t zse_load_wait(zse_load *load, int32_t *code, int64_t *got) {
    for (int32_t i = 0; i < load->threads; i++) pthread_join(load->handles[i], NULL);
    int64_t failed = load->failed;
    *code = load->code;
    *got = load->got;
    release(load);
    return failed;
}

void zse_load_cancel(zse_load *load) { atomic_store(&load->cancelled, 1); }
