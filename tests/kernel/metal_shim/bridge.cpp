/* Between Metal text compiled for the host (metal_stdlib) and the emulator: one thread of the emulator calls the kernel, and what it
 * needs of the others comes back through these functions. */
#include "emulate.h"

extern "C" void metal_entry(const u64 *args, u8 *shared, u32 thread, const u32 *block, const u32 *grid);

static Thread *current;        /* fibers change only inside the emulator, that is inside the functions below */

static void run(Thread *T, const u64 *args) {
  u32 block[3], grid[3];
  for (i32 i = 0; i < 3; ++i) { block[i] = (u32)T->block_index[i]; grid[i] = (u32)T->num_blocks[i]; }
  current = T;
  metal_entry(args, T->shared, (u32)T->index, block, grid);
}

template <class F> static auto with(F f) {
  Thread *const T = current;
  auto result = f(T);
  current = T;
  return result;
}

extern "C" u32 shim_shuffle(u32 value, u16 lane) {
  return with([&](Thread *T) { return (u32)emulate::exchange(T, emulate::SHUFFLE, value, lane); });
}
extern "C" unsigned long shim_vote(int kind, bool value) {
  return with([&](Thread *T) { return (unsigned long)emulate::exchange(T, emulate::BALLOT + kind, value, 0); });
}
extern "C" void shim_barrier(int warp) {
  with([&](Thread *T) { if (warp) emulate::warp_barrier(T); else emulate::barrier(T); return 0; });
}
extern "C" unsigned long shim_atomic(void *p, int kind, int type, unsigned long value, unsigned long expected) {
  return with([&](Thread *T) {
    const bool shared = (u8 *)p >= T->shared && (u8 *)p < T->shared + SHARED_BYTES;
    return (unsigned long)emulate::atomic(T, p, shared, kind, type, value, expected);
  });
}

static const i32 params[] = {PARAMS};
static const char *const places[] = {SYMBOL};
static const u32 arrays[][2] = {{0, SHARED_BYTES}};
extern "C" const emulate::Kernel zse_kernel = {SYMBOL, run, THREADS, 32, 1, NUM_PARAMS, 1, SHARED_BYTES ? 1 : 0, SHARED_BYTES, arrays, params, places};
