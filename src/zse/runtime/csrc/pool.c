/* Thread pool that replays a graph: every thread walks the launch list on its own.
 *
 * The threads of a pool, the caller among them, take chunks of blocks from each launch's counter; they meet only where a
 * launch depends on what is before it. Nobody ever waits for a *thread*, only for blocks: a worker that the system has
 * descheduled delays the chunk it holds and nothing else, and a pool whose workers are gone (after a fork) still finishes.
 *
 * A worker may therefore be arbitrarily late, still walking a replay that ended long ago. Three rules make that safe:
 *  - Every counter carries the generation of the replay that it counts for. A counter of another generation counts as
 *    zero, so nobody resets counters, and a chunk is taken by compare-and-swap, so a late thread cannot move a newer count.
 *  - Block counts change from replay to replay. They are read between two looks at pool->generation (a seqlock): the
 *    caller makes the generation odd before it writes them. A taken chunk is unfinished work, which keeps its replay alive,
 *    so arguments and grid are stable while a kernel runs.
 *  - A graph is freed only when no worker is inside a walk.
 */
#define _GNU_SOURCE
#include "zse_runtime.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>
#include <sys/types.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define LINE 64
#define COUNT_BITS 28 /* blocks of one launch < 2^28; the other 36 bits are the generation */
#define COUNT_MASK ((1ull << COUNT_BITS) - 1)
#define CHUNKS_PER_THREAD 4
/* A pause is 40 to 140 cycles. Inside a graph the wait is for a chunk, tens of microseconds at most; between graphs the
 * host prepares the next step. After that another process may need the core more. */
#define SPINS_IN_GRAPH 1000
#define SPINS_BETWEEN_GRAPHS 1000

struct launch {
    _Alignas(LINE) _Atomic uint64_t next; /* generation | first block that nobody took */
    _Alignas(LINE) zse_kernel fn;
    uint64_t *args;
    int64_t grid[3];
    _Atomic uint32_t blocks, chunk;
    uint32_t min_chunk, group;
};

/* A launch that depends and the independent ones that follow it: done together. */
struct group {
    _Alignas(LINE) _Atomic uint64_t done; /* generation | blocks done */
    _Alignas(LINE) _Atomic uint32_t blocks;
    uint32_t first_launch, end_launch;
};

struct zse_graph {
    struct launch *launches;
    struct group *groups;
    uint64_t *args;
    zse_patch *patches;
    int64_t *symbol_max;
    int64_t num_launches, num_groups, num_patches, num_symbols;
    int32_t planned_threads; /* the thread count that `chunk` was computed for; 0: not yet */
};

struct worker {
    _Alignas(LINE) _Atomic uint32_t inside; /* in a walk: the graph it reads must not be freed */
    zse_pool *pool;
    pthread_t thread;
};

struct zse_pool {
    _Alignas(LINE) _Atomic uint64_t generation; /* even: a replay runs; odd: idle, or being prepared */
    _Atomic(zse_graph *) graph;
    int64_t *times_ns, start; /* of this replay, when each launch was done; NULL: nobody asks */
    _Atomic uint32_t stop;
    _Alignas(LINE) _Atomic uint32_t signal; /* changes when there is something to look at */
    _Atomic uint32_t sleepers;
    _Alignas(LINE) pthread_mutex_t run_lock; /* one replay at a time */
    pthread_mutex_t sleep_lock;
    pthread_cond_t sleep_cond;
    int32_t threads;
    pid_t owner; /* workers do not follow a fork */
    struct worker *workers;
};

static inline void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static inline void spin(uint32_t *count, uint32_t limit) {
    if (*count < limit) {
        ++*count;
        pause_core();
    } else {
        sched_yield();
    }
}

static inline uint64_t pack(uint64_t generation, uint64_t count) { return generation << COUNT_BITS | count; }

static inline uint64_t count_for(uint64_t word, uint64_t generation) {
    return word >> COUNT_BITS == (generation & (~0ull >> COUNT_BITS)) ? word & COUNT_MASK : 0;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void *aligned_zeroed(size_t count, size_t size) {
    void *memory = NULL;
    size_t bytes = count ? count * size : LINE;
    if (posix_memalign(&memory, LINE, bytes)) return NULL;
    return memset(memory, 0, bytes);
}

/* Sleeping and waking. */

static void sleep_until_signal(zse_pool *pool, uint32_t seen) {
#if defined(__linux__)
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(&pool->signal) == seen)
        syscall(SYS_futex, &pool->signal, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&pool->sleepers, 1);
#else
    pthread_mutex_lock(&pool->sleep_lock);
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(&pool->signal) == seen) pthread_cond_wait(&pool->sleep_cond, &pool->sleep_lock);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->sleep_lock);
#endif
}

/* Wakes two; each of them wakes two more, so that the caller of a large pool starts computing at once. */
static void wake_some(zse_pool *pool) {
    if (!atomic_load(&pool->sleepers)) return;
#if defined(__linux__)
    syscall(SYS_futex, &pool->signal, FUTEX_WAKE_PRIVATE, 2, NULL, NULL, 0);
#else
    pthread_mutex_lock(&pool->sleep_lock);
    pthread_cond_broadcast(&pool->sleep_cond);
    pthread_mutex_unlock(&pool->sleep_lock);
#endif
}

/* Walking a graph. Both return false when the replay is over. */

static bool wait_group(zse_pool *pool, struct group *group, uint64_t generation) {
    uint32_t spins = 0;
    for (;;) {
        uint32_t blocks = atomic_load_explicit(&group->blocks, memory_order_acquire);
        uint64_t done = atomic_load_explicit(&group->done, memory_order_acquire);
        if (atomic_load_explicit(&pool->generation, memory_order_acquire) != generation) return false;
        if (count_for(done, generation) >= blocks) return true;
        spin(&spins, SPINS_IN_GRAPH);
    }
}

static void set_times(int64_t *times_ns, const struct group *group, int64_t time) {
    for (uint32_t i = group->first_launch; i < group->end_launch; i++) times_ns[i] = time;
}

static bool run_launch(zse_pool *pool, zse_graph *graph, struct launch *launch, uint64_t generation) {
    uint64_t finished = 0;
    for (;;) {
        uint64_t word = atomic_load_explicit(&launch->next, memory_order_acquire);
        uint64_t blocks = atomic_load_explicit(&launch->blocks, memory_order_acquire);
        uint64_t chunk = atomic_load_explicit(&launch->chunk, memory_order_acquire);
        if (!finished && atomic_load_explicit(&pool->generation, memory_order_acquire) != generation) return false;
        uint64_t first = count_for(word, generation);
        if (first >= blocks) break;
        uint64_t last = first + chunk < blocks ? first + chunk : blocks;
        if (!atomic_compare_exchange_weak_explicit(&launch->next, &word, pack(generation, last), memory_order_acq_rel,
                                                   memory_order_relaxed))
            continue;
        launch->fn(launch->args, launch->grid, (int64_t)first, (int64_t)last);
        finished += last - first;
    }
    if (finished) {
        struct group *group = &graph->groups[launch->group];
        uint64_t blocks = atomic_load_explicit(&group->blocks, memory_order_relaxed);
        uint64_t word = atomic_load_explicit(&group->done, memory_order_relaxed), all;
        do {
            all = count_for(word, generation) + finished;
            /* Whoever ends a group says when: the caller may sleep through some on a busy machine. */
            if (all == blocks && pool->times_ns) set_times(pool->times_ns, group, now_ns() - pool->start);
        } while (!atomic_compare_exchange_weak_explicit(&group->done, &word, pack(generation, all), memory_order_acq_rel,
                                                        memory_order_relaxed));
    }
    return true;
}

static void walk(zse_pool *pool, zse_graph *graph, uint64_t generation) {
    for (int64_t g = 0; g < graph->num_groups; g++) {
        struct group *group = &graph->groups[g];
        if (g && !wait_group(pool, group - 1, generation)) return;
        for (uint32_t i = group->first_launch; i < group->end_launch; i++)
            if (!run_launch(pool, graph, &graph->launches[i], generation)) return;
    }
}

static void *worker_main(void *argument) {
    struct worker *worker = argument;
    zse_pool *pool = worker->pool;
    uint64_t walked = 1;
    for (;;) {
        uint32_t signal = atomic_load(&pool->signal);
        if (atomic_load_explicit(&pool->stop, memory_order_acquire)) return NULL;
        atomic_store(&worker->inside, 1);
        uint64_t generation = atomic_load(&pool->generation);
        zse_graph *graph = atomic_load_explicit(&pool->graph, memory_order_acquire);
        bool current = !(generation & 1) && generation != walked && atomic_load(&pool->generation) == generation;
        if (current) walk(pool, graph, generation);
        atomic_store_explicit(&worker->inside, 0, memory_order_release);
        if (current) {
            walked = generation;
            continue;
        }
        uint32_t spins = 0;
        while (atomic_load_explicit(&pool->signal, memory_order_acquire) == signal && spins < SPINS_BETWEEN_GRAPHS) {
            spins++;
            pause_core();
        }
        if (spins == SPINS_BETWEEN_GRAPHS) {
            sleep_until_signal(pool, signal);
            wake_some(pool);
        }
    }
}

static void announce(zse_pool *pool) {
    atomic_fetch_add(&pool->signal, 1);
    wake_some(pool);
}

zse_pool *zse_pool_create(int32_t threads, int32_t *error) {
    *error = ZSE_EINVAL;
    if (threads < 1 || threads > 1024) return NULL;
    *error = ZSE_ENOMEM;
    zse_pool *pool = aligned_zeroed(1, sizeof *pool);
    if (!pool) return NULL;
    pool->workers = aligned_zeroed((size_t)threads, sizeof *pool->workers);
    if (!pool->workers) {
        free(pool);
        return NULL;
    }
    atomic_store(&pool->generation, 1);
    pthread_mutex_init(&pool->run_lock, NULL);
    pthread_mutex_init(&pool->sleep_lock, NULL);
    pthread_cond_init(&pool->sleep_cond, NULL);
    pool->owner = getpid();
    pool->threads = 1;
    for (int32_t i = 1; i < threads; i++) {
        struct worker *worker = &pool->workers[i];
        worker->pool = pool;
        if (pthread_create(&worker->thread, NULL, worker_main, worker)) {
            zse_pool_destroy(pool);
            *error = ZSE_ETHREAD;
            return NULL;
        }
        pool->threads = i + 1;
    }
    *error = ZSE_OK;
    return pool;
}

void zse_pool_destroy(zse_pool *pool) {
    if (pool->owner != getpid()) return;
    atomic_store_explicit(&pool->stop, 1, memory_order_release);
    for (int32_t i = 1; i < pool->threads; i++) announce(pool);
    for (int32_t i = 1; i < pool->threads; i++) {
        announce(pool);
        pthread_join(pool->workers[i].thread, NULL);
    }
    pthread_mutex_destroy(&pool->run_lock);
    pthread_mutex_destroy(&pool->sleep_lock);
    pthread_cond_destroy(&pool->sleep_cond);
    free(pool->workers);
    free(pool);
}

zse_graph *zse_graph_create(const zse_launch_desc *launches, int64_t num_launches, const uint64_t *args, int64_t num_args,
                            const zse_patch *patches, int64_t num_patches, const int64_t *symbol_max, int64_t num_symbols,
                            int32_t *error) {
    *error = ZSE_ENOMEM;
    zse_graph *graph = aligned_zeroed(1, sizeof *graph);
    if (!graph) return NULL;
    graph->launches = aligned_zeroed((size_t)num_launches, sizeof *graph->launches);
    graph->groups = aligned_zeroed((size_t)num_launches, sizeof *graph->groups);
    graph->args = aligned_zeroed((size_t)num_args, sizeof *graph->args);
    graph->patches = zse_copied(patches, num_patches, sizeof *patches);
    graph->symbol_max = zse_copied(symbol_max, num_symbols, sizeof *symbol_max);
    if (!graph->launches || !graph->groups || !graph->args || !graph->patches || !graph->symbol_max) goto fail;
    graph->num_launches = num_launches;
    graph->num_patches = num_patches;
    graph->num_symbols = num_symbols;
    if (num_args) memcpy(graph->args, args, (size_t)num_args * sizeof *args);
    *error = ZSE_EINVAL;
    for (int64_t i = 0; i < num_launches; i++) {
        const zse_launch_desc *from = &launches[i];
        struct launch *launch = &graph->launches[i];
        if (!from->fn || from->first_arg > num_args || from->num_args > num_args - from->first_arg) goto fail;
        if (!i || from->depends) {
            graph->groups[graph->num_groups].first_launch = (uint32_t)i;
            graph->num_groups++;
        }
        launch->fn = from->fn;
        launch->args = graph->args + from->first_arg;
        memcpy(launch->grid, from->grid, sizeof launch->grid);
        launch->min_chunk = from->min_chunk > 1 ? (uint32_t)from->min_chunk : 1;
        launch->group = (uint32_t)(graph->num_groups - 1);
        graph->groups[graph->num_groups - 1].end_launch = (uint32_t)(i + 1);
    }
    if (!zse_patches_fit(patches, num_patches, num_launches, num_args, num_symbols)) goto fail;
    *error = ZSE_OK;
    return graph;
fail:
    zse_graph_destroy(NULL, graph);
    return NULL;
}

/* Stores only what changed: the line stays in the other cores' caches from replay to replay. */
static void set_u32(_Atomic uint32_t *slot, uint32_t value) {
    if (atomic_load_explicit(slot, memory_order_relaxed) != value) atomic_store_explicit(slot, value, memory_order_release);
}

static void set_i64(int64_t *slot, int64_t value) {
    if (*slot != value) *slot = value;
}

/* Writes this replay's numbers. The generation is odd: nobody runs blocks of this graph. */
static int32_t prepare(zse_graph *graph, const int64_t *symbols, int32_t threads) {
    for (int64_t i = 0; i < graph->num_patches; i++) {
        const zse_patch *patch = &graph->patches[i];
        int64_t value = zse_patch_value(patch, symbols);
        if (patch->is_grid)
            set_i64(&graph->launches[patch->target / 3].grid[patch->target % 3], value);
        else
            set_i64((int64_t *)&graph->args[patch->target], value);
    }
    if (graph->planned_threads == threads && !graph->num_patches) return ZSE_OK;
    graph->planned_threads = 0;
    for (int64_t g = 0; g < graph->num_groups; g++) {
        struct group *group = &graph->groups[g];
        uint64_t total = 0;
        for (uint32_t i = group->first_launch; i < group->end_launch; i++) {
            struct launch *launch = &graph->launches[i];
            uint64_t blocks = 1;
            for (int d = 0; d < 3; d++) {
                if (launch->grid[d] < 0 || launch->grid[d] > (int64_t)COUNT_MASK) return ZSE_ERANGE;
                blocks *= (uint64_t)launch->grid[d];
                if (blocks > COUNT_MASK) return ZSE_ERANGE;
            }
            total += blocks;
            if (total > COUNT_MASK) return ZSE_ERANGE;
            uint64_t parts = (uint64_t)threads * CHUNKS_PER_THREAD;
            uint64_t chunk = threads == 1 ? blocks : (blocks + parts - 1) / parts;
            if (chunk < launch->min_chunk) chunk = launch->min_chunk;
            set_u32(&launch->blocks, (uint32_t)blocks);
            set_u32(&launch->chunk, (uint32_t)chunk);
        }
        set_u32(&group->blocks, (uint32_t)total);
    }
    graph->planned_threads = threads;
    return ZSE_OK;
}

int32_t zse_graph_run(zse_pool *pool, zse_graph *graph, const int64_t *symbols, int64_t *times_ns) {
    if (zse_bad_symbol(symbols, graph->symbol_max, graph->num_symbols) >= 0) return ZSE_ERANGE;
    pthread_mutex_lock(&pool->run_lock);
    int32_t status = prepare(graph, symbols, pool->threads);
    if (status == ZSE_OK && graph->num_groups) {
        uint64_t generation = atomic_load_explicit(&pool->generation, memory_order_relaxed) + 1;
        pool->times_ns = times_ns;
        pool->start = times_ns ? now_ns() : 0; /* before the workers can begin */
        atomic_store_explicit(&pool->graph, graph, memory_order_release);
        atomic_store(&pool->generation, generation);
        if (pool->threads > 1) announce(pool);
        walk(pool, graph, generation);
        wait_group(pool, &graph->groups[graph->num_groups - 1], generation);
        for (int64_t g = 0; times_ns && g < graph->num_groups; g++) /* what has no blocks takes no time */
            if (!atomic_load_explicit(&graph->groups[g].blocks, memory_order_relaxed))
                set_times(times_ns, &graph->groups[g], g ? times_ns[graph->groups[g].first_launch - 1] : 0);
        atomic_store(&pool->generation, generation + 1);
    }
    pthread_mutex_unlock(&pool->run_lock);
    return status;
}

void zse_graph_destroy(zse_pool *pool, zse_graph *graph) {
    if (pool) {
        pthread_mutex_lock(&pool->run_lock); /* no replay runs: a worker that enters now finds an odd generation */
        for (int32_t i = 1; i < pool->threads && pool->owner == getpid(); i++) {
            uint32_t spins = 0;
            while (atomic_load(&pool->workers[i].inside)) spin(&spins, SPINS_IN_GRAPH);
        }
        pthread_mutex_unlock(&pool->run_lock);
    }
    free(graph->launches);
    free(graph->groups);
    free(graph->args);
    free(graph->patches);
    free(graph->symbol_max);
    free(graph);
}
