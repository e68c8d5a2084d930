/* Weight loader, for a GPU: files that the page cache holds, mapped and registered with the driver in chunks. */
#define _GNU_SOURCE
#include "load.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SLOW_CHUNKS 2 /* the first is not counted: it is slow anyway. Where they are slow each costs 4 ms (a virtual machine's H200) */
#define TIDY_AFTER_S 1
#define TIDY_PAUSE_NS 10000000l
#define SAMPLES 512
#define LEAST_STEP (256 << 10)

static struct file *file_of(zse_load *load, int32_t fd) {
    for (int64_t i = 0; i < load->num_files; i++)
        if (load->files[i].fd == fd) return &load->files[i];
    return NULL;
}

int load_take_kept(zse_load *load) {
    const zse_load_options *options = &load->options;
    int64_t visits = 1;
    if (options->chunk_bytes <= 0) return 1;
    /* With a window a chunk may be registered again for each job that touches it. */
    for (int64_t i = 0; i < load->num_jobs; i++) visits += load->jobs[i].nbytes / options->chunk_bytes + 2;
    for (int64_t i = 0; i < options->num_kept; i++) visits += options->kept[i].num_chunks;
    load->kept = zse_copied(options->kept, options->num_kept, sizeof *load->kept);
    load->pinned = malloc((size_t)visits * sizeof *load->pinned);
    if (!load->kept || !load->pinned) return 0;
    for (; load->num_files < options->num_kept; load->num_files++) {
        const zse_load_kept *kept = &load->kept[load->num_files];
        struct file *file = &load->files[load->num_files];
        *file = (struct file){.fd = -1, .map = kept->map, .mapped = kept->nbytes, .kept = kept};
        for (int64_t c = 0; c < kept->num_chunks; c++)
            load->pinned[load->num_pinned++] = (struct pinned){file, c, c * options->chunk_bytes, (c + 1) * options->chunk_bytes};
    }
    return 1;
}

/* The place of a job's file among the load's: of one that was kept, if it is what it was. NULL: it cannot be told. */
static struct file *place_of(zse_load *load, const zse_load_job *job) {
    struct file *file = file_of(load, job->fd);
    struct stat facts;
    if (file) return file;
    if (fstat(job->fd, &facts)) return NULL;
    int64_t changed_ns = (int64_t)facts.st_mtim.tv_sec * 1000000000 + facts.st_mtim.tv_nsec;
    for (int64_t i = 0; i < load->options.num_kept; i++) {
        const zse_load_kept *kept = (file = &load->files[i])->kept;
        if (file->fd < 0 && kept->device == facts.st_dev && kept->inode == facts.st_ino && kept->nbytes == facts.st_size && kept->changed_ns == changed_ns) {
            file->fd = job->fd;
            return file;
        }
    }
    file = &load->files[load->num_files++];
    *file = (struct file){.fd = job->fd, .base = job->offset};
    return file;
}

/* Maps the files and finds what is needed of every chunk. 0 when they cannot be mapped. */
static int map_files(zse_load *load) {
    int64_t page = sysconf(_SC_PAGESIZE), chunk = load->options.chunk_bytes;
    if (chunk <= 0 || page > PAGE_MAX) return 0;
    for (int64_t i = 0; i < load->num_jobs; i++) {
        const zse_load_job *job = &load->jobs[i];
        if (job->fn || !job->nbytes) continue;
        struct file *file = place_of(load, job);
        if (!file) return 0;
        if (job->offset < file->base) file->base = job->offset;
        if (job->offset + job->nbytes > file->end) file->end = job->offset + job->nbytes;
    }
    for (int64_t i = 0; i < load->num_files; i++) {
        struct file *file = &load->files[i];
        struct stat facts;
        if (file->fd < 0) continue;
        file->base -= file->base % page;
        file->num_chunks = (file->end - file->base + chunk - 1) / chunk;
        file->low = malloc((size_t)file->num_chunks * sizeof *file->low);
        file->high = calloc((size_t)file->num_chunks, sizeof *file->high);
        if (!file->low || !file->high) return 0;
        for (int64_t c = 0; c < file->num_chunks; c++) file->low[c] = file->kept && c < file->kept->num_chunks ? -1 : INT64_MAX;
        if (fstat(file->fd, &facts) || facts.st_size < file->end) return 0; /* the reading path says where the file ends */
        if (file->map) continue;
        file->mapped = file->end - file->base;
        void *map = mmap(NULL, (size_t)file->mapped, PROT_READ, MAP_SHARED, file->fd, (off_t)file->base);
        if (map == MAP_FAILED) return 0;
        file->map = map;
    }
    for (int64_t i = 0; i < load->num_jobs; i++) {
        const zse_load_job *job = &load->jobs[i];
        if (job->fn || !job->nbytes) continue;
        struct file *file = file_of(load, job->fd);
        int64_t start = job->offset - file->base, end = start + job->nbytes;
        for (int64_t c = start / chunk; c <= (end - 1) / chunk; c++) {
            int64_t low = start > c * chunk ? start : c * chunk, high = end < (c + 1) * chunk ? end : (c + 1) * chunk;
            if (low < file->low[c]) file->low[c] = low;
            if (high > file->high[c]) file->high[c] = high;
        }
    }
    return 1;
}

/* Whether the page cache holds the load: asked for some pages, one of every job at least. */
static int is_warm(zse_load *load) {
    int64_t asked = 0, there = 0, total = 0, page = sysconf(_SC_PAGESIZE);
    for (int64_t i = 0; i < load->num_jobs; i++)
        if (!load->jobs[i].fn) total += load->jobs[i].nbytes;
    int64_t step = total / SAMPLES > LEAST_STEP ? total / SAMPLES : LEAST_STEP;
    for (int64_t i = 0; i < load->num_jobs; i++) {
        const zse_load_job *job = &load->jobs[i];
        if (job->fn || !job->nbytes) continue;
        struct file *file = file_of(load, job->fd);
        for (int64_t at = 0; at < job->nbytes; at += step) {
            unsigned char state = 0;
            char *address = file->map + (job->offset - file->base + at) / page * page;
            if (mincore(address, (size_t)page, &state)) return 0;
            asked++;
            there += state & 1;
        }
    }
    return there * 100 >= asked * load->options.warm_percent;
}

static void unregister_first(zse_load *load) {
    const struct pinned *pinned = &load->pinned[load->first_pinned++];
    load->driver.host_unregister(pinned->file->map + pinned->start);
}

/* Gives the registrations back a while after the load, one at a time: a call takes 0.5 ms or more in which launches wait
 * (steps of 0.5 ms took 1.3 ms beside all of them in a row, H200). close() is not kept waiting. */
void load_unregister(zse_load *load) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += TIDY_AFTER_S;
    while (load->first_pinned < load->num_pinned) {
        pthread_mutex_lock(&load->lock);
        while (!atomic_load(&load->closing))
            if (pthread_cond_timedwait(&load->changed, &load->lock, &until) == ETIMEDOUT) break;
        pthread_mutex_unlock(&load->lock);
        unregister_first(load);
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += TIDY_PAUSE_NS;
        if (until.tv_nsec >= 1000000000l) until.tv_nsec -= 1000000000l, until.tv_sec++;
    }
}

/* All direct jobs, in order. Returns where it stopped: a chunk that cannot be registered ends it, and so do
 * chunks that take too long. Registering moves pages that lie where the kernel wants none pinned, and costs more for small
 * pages of the cache: 190 ms for 4 GiB, where reading takes 100 (H200). */
struct piece load_copy_mapped(zse_load *load) {
    const struct piece all = {.job = load->num_jobs};
    int64_t chunk = load->options.chunk_bytes, page = sysconf(_SC_PAGESIZE), spent_us = 0, full_chunks = 0;
    int64_t held = load->num_pinned * chunk; /* what was kept */
    void *event = load->events[load->options.threads * SLOTS];
    for (int64_t i = 0; i < load->num_jobs; i++) {
        const zse_load_job *job = &load->jobs[i];
        if (job->fn || !job->nbytes) continue;
        struct file *file = file_of(load, job->fd);
        int64_t first = job->offset - file->base, start = first, end = start + job->nbytes;
        uint64_t device = load->outputs[job->first_output].address;
        while (start < end) {
            if (atomic_load_explicit(&load->cancelled, memory_order_relaxed)) return all;
            int64_t c = start / chunk, stop = (c + 1) * chunk < end ? (c + 1) * chunk : end;
            if (file->low[c] >= 0) {
                int64_t low = file->low[c] / page * page, high = (file->high[c] + page - 1) / page * page;
                if (load->options.window_bytes && held + high - low > load->options.window_bytes) {
                    /* Everything so far is copied before more is pinned. */
                    int32_t status = load->driver.event_record(event, load->options.stream);
                    if (!status) status = load->driver.event_wait(event);
                    if (status) {
                        load_fail(load, i, 1, status, start - first);
                        return all;
                    }
                    while (load->first_pinned < load->num_pinned) unregister_first(load);
                    held = 0;
                }
                const struct piece here = {.job = i, .offset = start - first};
                if (load->options.slow_us && full_chunks == SLOW_CHUNKS && spent_us > (SLOW_CHUNKS - 1) * (int64_t)load->options.slow_us)
                    return here;
                int64_t started = zse_now_us();
                if (load->driver.host_register(file->map + low, (size_t)(high - low), load->options.register_flags)) return here;
                if (high - low == chunk && full_chunks < SLOW_CHUNKS && full_chunks++) spent_us += zse_now_us() - started;
                load->pinned[load->num_pinned++] = (struct pinned){file, c, low, high};
                held += high - low;
                file->low[c] = -1;
            } else if (load->options.window_bytes) {
                /* A chunk that came before may have been given back: then it is registered again. */
                int64_t at = load->num_pinned - 1;
                while (at >= load->first_pinned && (load->pinned[at].file != file || load->pinned[at].chunk != c)) at--;
                if (at < load->first_pinned) {
                    file->low[c] = c * chunk;
                    continue;
                }
            }
            int32_t status = load_copy(load, i, device, file->map + start, stop - start);
            if (status) {
                if (status > 0) load_fail(load, i, 1, status, start - first);
                return all;
            }
            device += (uint64_t)(stop - start);
            start = stop;
        }
    }
    return all;
}

int load_map(zse_load *load) { return map_files(load) && load->num_files && is_warm(load); }
