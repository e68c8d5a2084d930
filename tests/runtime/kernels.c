/* Hand-written kernels with the entry point that the compiler generates, to test the runtime without the compiler. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static float f32_of(uint64_t slot) {
    float value;
    memcpy(&value, &slot, 4);
    return value;
}

/* out[block] += 1: every block must run exactly once a replay. args: out i32 */
void count_blocks(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    (void)grid;
    int32_t *out = (int32_t *)args[0];
    for (int64_t i = first; i < last; i++) out[i]++;
}

/* out[i] = x[total - 1 - i] + add: reads what other threads wrote one launch before. args: x i64, out i64, add i64 */
void reverse_add(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    const int64_t *x = (const int64_t *)args[0];
    int64_t *out = (int64_t *)args[1], total = grid[0] * grid[1] * grid[2];
    for (int64_t i = first; i < last; i++) out[i] = x[total - 1 - i] + (int64_t)args[2];
}

/* Rows of `width`, one block each. args: x f32, out f32, width i64, factor f32, bias f64, shift i32 */
void scale_rows(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    (void)grid;
    const float *x = (const float *)args[0];
    float *out = (float *)args[1], factor = f32_of(args[3]);
    int64_t width = (int64_t)args[2];
    double bias;
    memcpy(&bias, &args[4], 8);
    int32_t shift = (int32_t)args[5];
    for (int64_t row = first; row < last; row++)
        for (int64_t i = 0; i < width; i++) out[row * width + i] = x[row * width + i] * factor + (float)bias + (float)shift;
}

/* Writes the grid it was given. args: out i64 [3] */
void write_grid(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    (void)last;
    if (first == 0) memcpy((int64_t *)args[0], grid, 3 * sizeof *grid);
}

void empty(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    (void)args, (void)grid, (void)first, (void)last;
}

/* Spins for a while a block. args: iterations i64 */
void busy(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    (void)grid;
    for (int64_t block = first; block < last; block++)
        for (volatile int64_t i = 0; i < (int64_t)args[0]; i++) {
        }
}

static void sleep_a_while(int signal) {
    (void)signal;
    nanosleep(&(struct timespec){0, 30000000}, NULL);
}

/* The thread `caller` sleeps for 30 ms while others go on; not where it runs all of this itself. slept counts.
 * args: caller i64, slept i32 */
void send_to_sleep(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
    (void)grid;
    struct sigaction action = {.sa_handler = sleep_a_while, .sa_flags = SA_RESTART};
    sigaction(SIGUSR2, &action, NULL);
    if (last == 64 && first < last && syscall(SYS_gettid) != (long)args[0]) {
        ++*(int32_t *)args[1];
        nanosleep(&(struct timespec){0, 2000000}, NULL); /* it has ended its own blocks and waits for these */
        syscall(SYS_tgkill, getpid(), (long)args[0], SIGUSR2);
    }
}
