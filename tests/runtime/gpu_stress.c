/* The loader and the launch list with a driver that copies at once, for the sanitizers: gpu_stress FILE ROUNDS. */
#define _GNU_SOURCE
#include "zse_load.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static _Atomic int calls, fail_at = -1;
static int step(void) {
    int at = ++calls;
    return at == fail_at ? 1 : 0;
}
static int32_t ok_current(uintptr_t current) { (void)current; return 0; }
static int32_t to_device(uint64_t device, const void *host, size_t nbytes, void *stream) {
    (void)stream;
    if (step()) return 1;
    memcpy((void *)(uintptr_t)device, host, nbytes);
    return 0;
}
static int32_t to_host(void *host, uint64_t device, size_t nbytes, void *stream) {
    (void)stream;
    memcpy(host, (void *)(uintptr_t)device, nbytes);
    return 0;
}
static int32_t event_two(void *event, void *stream) { (void)event; (void)stream; return 0; }
static int32_t event_one(void *event) { (void)event; return 0; }
static int32_t reg(void *host, size_t nbytes, uint32_t flags) { (void)host; (void)nbytes; (void)flags; return step() ? 801 : 0; }
static int32_t unreg(void *host) { (void)host; return 0; }
static int32_t pin(void **host, size_t nbytes, uint32_t flags) { (void)flags; return posix_memalign(host, 4096, nbytes ? nbytes : 1) ? 2 : 0; }
static int32_t unpin(void *host) { free(host); return 0; }
static int32_t launch(void *function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, uint32_t shared,
                      void *stream, void **params, void **extra) {
    (void)function, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    *(int64_t **)params[0] += 0;
    **(int64_t **)params[0] += *(int64_t *)params[1] * gx;
    return 0;
}

/* Of a step: the bytes of a slot, inverted, to where they belong. */
static int32_t launch_step(void *function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, uint32_t shared,
                           void *stream, void **params, void **extra) {
    (void)function, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    unsigned char *src = *(unsigned char **)params[0], *out = *(unsigned char **)params[1];
    if (step()) return 1;
    for (int64_t i = 0; i < *(int64_t *)params[2]; i++) out[i] = (unsigned char)~src[i];
    return 0;
}

static void invert(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    (void)grid;
    for (int64_t i = first; i < last; i++) ((unsigned char *)(uintptr_t)args[1])[i] = (unsigned char)~((unsigned char *)(uintptr_t)args[0])[i];
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    int fd = open(arguments[1], O_RDONLY), rounds = atoi(arguments[2]);
    struct stat facts;
    if (fd < 0 || fstat(fd, &facts)) return 2;
    int64_t size = facts.st_size, part = 10007;
    unsigned char *content = malloc((size_t)size), *device = malloc((size_t)size);
    if (pread(fd, content, (size_t)size, 0) != size) return 2;
    zse_gpu_driver driver = {.set_current = ok_current, .launch = launch, .to_device = to_device, .to_host = to_host,
                             .event_record = event_two, .event_wait = event_one, .event_query = event_one,
                             .host_register = reg, .host_unregister = unreg};
    int64_t jobs = (size + part - 1) / part;
    zse_load_job *job = calloc((size_t)jobs, sizeof *job);
    zse_load_output *output = calloc((size_t)jobs, sizeof *output);
    uint64_t *args = calloc((size_t)jobs * 4 + 8, sizeof *args);
    zse_load_step *steps = calloc((size_t)jobs, sizeof *steps);
    unsigned char *slots_of_steps = malloc((size_t)(6 * part));
    void *events[64] = {0};
    for (int round = 0; round < rounds; round++) {
        int threads = 1 + round % 7, with_kernels = round & 1, mapped = round >> 1 & 1, fails = round % 5 == 4;
        memset(device, 0, (size_t)size);
        for (int64_t i = 0; i < jobs; i++) {
            int64_t nbytes = i + 1 < jobs ? part : size - part * i;
            job[i] = (zse_load_job){.offset = part * i, .nbytes = nbytes, .fd = fd, .first_output = (uint32_t)i, .num_outputs = 1,
                                        .first_arg = (uint32_t)(2 * i), .num_args = 2, .grid = {nbytes, 1, 1}, .step = -1};
            if (with_kernels && i % 3 == 1) job[i].fn = invert;
            output[i] = (zse_load_output){.address = (uint64_t)(uintptr_t)(device + part * i), .nbytes = nbytes, .slot = 1};
        }
        zse_load_options options = {.chunk_bytes = mapped ? 65536 : 0, .window_bytes = round % 3 ? 0 : 131072, .slot_bytes = 8192,
                                        .pin = pin, .unpin = unpin, .events = events, .threads = threads, .warm_percent = 0};
        calls = 0;
        fail_at = fails ? 1 + round * 7 % 50 : -1;
        int32_t error;
        if (round % 6 == 5) { /* into the host's memory: kernels write where their arguments say */
            for (int64_t i = 0; i < jobs; i++) {
                args[2 * i + 1] = output[i].address;
                if (job[i].fn) job[i].num_outputs = 0;
            }
            options = (zse_load_options){.slot_bytes = round % 4 ? 4096 : 1ll << 40, .threads = threads};
        }
        int64_t num_steps = 0;
        if (round % 6 == 3) { /* two jobs a step, by way of three slots */
            driver.launch = launch_step;
            for (int64_t i = 0; i < jobs; i++) {
                int64_t number = i / 2, slot = number % 3 * 2 * part;
                job[i].fn = NULL, job[i].step = number, output[i].address = (uint64_t)(uintptr_t)(slots_of_steps + slot + i % 2 * part);
                if (i % 2 == 0) {
                    uint64_t *slot_args = args + 2 * jobs + 3 * number;
                    slot_args[0] = output[i].address, slot_args[1] = (uint64_t)(uintptr_t)(device + part * i), slot_args[2] = 0;
                    steps[number] = (zse_load_step){.launch = {.first_arg = (uint32_t)(2 * jobs + 3 * number), .num_args = 3, .grid = {1, 1, 1}, .threads = 1},
                                                    .after = number > 2 ? number - 2 : 0};
                }
                steps[number].nbytes += job[i].nbytes, args[2 * jobs + 3 * number + 2] += (uint64_t)job[i].nbytes;
            }
            num_steps = (jobs + 1) / 2;
        }
        zse_load *load = zse_load_start(round % 6 == 5 ? NULL : &driver, &options, job, jobs, args, 2 * jobs + 3 * num_steps, output, jobs, steps,
                                        num_steps, &error);
        driver.launch = launch;
        if (!load) return 3;
        zse_load_result result;
        if (round % 11 == 10) zse_load_cancel(load);
        zse_load_wait(load, &result);
        zse_load_close(load);
        if (round % 11 == 10 || result.job >= 0) continue;
        for (int64_t i = 0; i < size; i++)
            if (device[i] != (unsigned char)(job[i / part].fn || num_steps ? ~content[i] : content[i])) {
                fprintf(stderr, "round %d: byte %lld\n", round, (long long)i);
                return 1;
            }
    }
    int64_t total = 0, symbol_max = 100, where = 0, symbols[1];
    uint64_t slots[2] = {(uint64_t)(uintptr_t)&total, 0};
    zse_gpu_launch list[2] = {{.function = &total, .num_args = 2, .grid = {1, 1, 1}, .threads = 1}, {.function = &total, .num_args = 2, .grid = {1, 1, 1}, .threads = 1}};
    zse_patch patches[2] = {{.symbol = 0, .is_grid = 0, .target = 1, .divisor = 1, .factor = 2}, {.symbol = 0, .is_grid = 1, .target = 3, .divisor = 4, .factor = 1}};
    int32_t error;
    zse_gpu_list *made = zse_gpu_list_create(list, 2, slots, 2, patches, 2, &symbol_max, 1, &error);
    int64_t expected = 0;
    for (symbols[0] = 0; symbols[0] <= 100; symbols[0]++) {
        if (zse_gpu_list_submit(&driver, made, NULL, NULL, symbols, NULL, NULL, NULL, &where)) return 4;
        expected += 2 * symbols[0] * (1 + (symbols[0] + 3) / 4);
    }
    if (total != expected || zse_gpu_list_submit(&driver, made, NULL, NULL, symbols, NULL, NULL, NULL, &where) != ZSE_ERANGE) return 5;
    zse_gpu_list_destroy(made);
    free(content), free(device), free(job), free(output), free(args), free(steps), free(slots_of_steps);
    close(fd);
    return 0;
}
