/* The GPU emulator as generated kernels see it (target.py prints them).
 *
 * One thread of a block is a fiber. Fibers run in a seeded random order and are switched where threads of a GPU may fall apart:
 * barriers, warp operations, waits. Memory is checked on every access: bounds, alignment, initialisation, order of accesses (vector
 * clocks), copies that nobody waited for. A failed check ends the launch with one line that names the kernel's source.
 */
#pragma once
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS 1 /* C's math.h: libstdc++'s, with its templates, is half the time of a small kernel */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <initializer_list>

typedef int8_t i8; typedef uint8_t u8; typedef int16_t i16; typedef uint16_t u16;
typedef int32_t i32; typedef uint32_t u32; typedef long long i64; typedef unsigned long long u64;
typedef uint16_t f16; typedef uint16_t bf16; typedef uint8_t e4m3; typedef float f32; typedef double f64;
typedef bool bool_;

namespace emulate {

struct Block;
struct Warp;
struct Group;
struct ThreadState;

/* What a kernel's thread may read; the rest of its state is the emulator's. */
struct Thread {
  i32 index, lane, warp;
  i32 block_index[3], num_blocks[3];
  i32 rank;                 /* in the cluster */
  u32 at;                   /* place of the statement: index into Kernel.places */
  u8 *shared;               /* this block's shared memory */
  u64 ticks;
  ThreadState *state;
};

struct Kernel {
  const char *symbol;
  void (*run)(Thread *, const u64 *args);
  i32 threads, warp, cluster, num_params, num_places, num_arrays;
  u64 shared_bytes;
  const u32 (*arrays)[2];   /* offset and size of each shared array; between them nothing may be touched */
  const i32 *params;        /* 0 number, 1 pointer to constant, 2 pointer, 3 tensor map */
  const char *const *places;
};

/* Made by zse_emulator/device.py; 128 bytes. dims, box: innermost first; strides in bytes from dimension 1 on. */
struct TensorMap {
  u64 base;
  u32 rank, element;
  u64 dims[5], strides[4];
  u32 box[5], swizzle;
};

/* One operand's table of kernel/intrinsics/fragments.py: [lane][element] → row, column. */
struct Fragment { const u8 (*place)[2]; i32 per_lane, bits, rows, columns; };
struct Mma { i32 m, n, k, lanes; const char *dtype; Fragment a, b, c; };

void check_read(Thread *, const void *, u32 size);
void check_write(Thread *, void *, u32 size);
void check_shared_read(Thread *, const void *, u32 size);
void check_shared_write(Thread *, void *, u32 size);

u64 exchange(Thread *, i32 kind, u64 value, i32 argument);      /* shuffles and votes */
enum { SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, BALLOT, ANY, ALL, WARP_TOP = 8, WARP_TOTAL };
enum { ADD, MAX, MIN, CAS };
u64 atomic(Thread *, void *, bool shared, i32 kind, i32 type, u64 value, u64 expected);   /* type: 0 i32, 1 u32, 2 i64, 3 u64, 4 f32 */
u64 acquire(Thread *, const void *, bool shared, u32 size);
void release(Thread *, void *, bool shared, u32 size, u64 value);
void relaxed_load(Thread *, const void *, bool shared, u32 size, void *value);
void relaxed_store(Thread *, void *, bool shared, u32 size, const void *value);

void barrier(Thread *);
void warp_barrier(Thread *);
void named_barrier(Thread *, i32 which, i32 threads, bool wait);
void cluster_barrier(Thread *);
void fence(Thread *);
void fence_async(Thread *);
void grid_wait(Thread *);
void grid_launch_dependents(Thread *);

void copy_async(Thread *, void *dst, const void *src, i32 size, i32 valid);
void copy_commit(Thread *);
void copy_wait(Thread *, i32 groups);
void copy_arrive(Thread *, u64 *barrier);
void mbarrier_init(Thread *, u64 *barrier, i32 count);
void mbarrier_init_fence(Thread *);
void mbarrier_arrive(Thread *, u64 *barrier, i32 rank, i32 bytes);
void mbarrier_wait(Thread *, u64 *barrier, i32 parity);
void bulk_copy(Thread *, void *dst, const void *src, i32 size, u64 *barrier);
void bulk_store(Thread *, void *dst, const void *src, i32 size);
void tma_load(Thread *, void *dst, const TensorMap &, u64 *barrier, i32 rank, const i32 *coords, i32 multicast);
void tma_store(Thread *, const TensorMap &, const void *src, i32 rank, const i32 *coords);
void bulk_commit(Thread *);
void bulk_wait(Thread *, i32 groups);

void mma(Thread *, const Mma &, f32 *const *acc, const u32 *a, const u32 *b);
void ldmatrix(Thread *, const void *row, i32 count, bool transposed, u32 *const *out, const u8 (*table)[3]);
void stmatrix(Thread *, void *row, i32 count, bool transposed, const u32 *values, const u8 (*table)[3]);
void wgmma(Thread *, i32 dtype, f32 *const *acc, i32 n, const u32 *a_registers, u64 a, u64 b, bool accumulate, bool trans_a,
           bool trans_b);        /* dtype: 0 bf16, 1 f16, 2 e4m3 */
void wgmma_fence(Thread *);
void wgmma_commit(Thread *);
void wgmma_wait(Thread *, i32 groups);

}  /* namespace emulate */

using emulate::Thread;
typedef emulate::TensorMap tensormap;

#define ZSE static inline

/* An array that lives as long as the call it is an argument of. */
template <class V> ZSE const V *zse_list(std::initializer_list<V> items) { return items.begin(); }

/* bits */

template <class To, class From> ZSE To zse_cast(From a) { static_assert(sizeof(To) == sizeof(From), "size"); To r; memcpy(&r, &a, sizeof r); return r; }
ZSE u32 zse_float_bits(f32 a) { return zse_cast<u32>(a); }
ZSE f32 zse_float(u32 a) { return zse_cast<f32>(a); }

/* Conversions of a GPU: float to integer saturates, NaN becomes 0. */
template <class To, class From> ZSE To zse_convert(From a) { return (To)a; }
#define ZSE_SATURATE(To, From, low, high) \
  template <> inline To zse_convert<To, From>(From a) { return a != a ? 0 : a <= (From)low ? low : a >= (From)high ? high : (To)a; }
ZSE_SATURATE(i32, f32, INT32_MIN, INT32_MAX) ZSE_SATURATE(u32, f32, 0, UINT32_MAX)
ZSE_SATURATE(i64, f32, INT64_MIN, INT64_MAX) ZSE_SATURATE(u64, f32, 0, UINT64_MAX)
ZSE_SATURATE(i16, f32, INT16_MIN, INT16_MAX) ZSE_SATURATE(u16, f32, 0, UINT16_MAX)
ZSE_SATURATE(i8, f32, INT8_MIN, INT8_MAX) ZSE_SATURATE(u8, f32, 0, UINT8_MAX)
ZSE_SATURATE(i32, f64, INT32_MIN, INT32_MAX) ZSE_SATURATE(u32, f64, 0, UINT32_MAX)
ZSE_SATURATE(i64, f64, INT64_MIN, INT64_MAX) ZSE_SATURATE(u64, f64, 0, UINT64_MAX)

/* small floats */

ZSE f32 zse_f32_of_bf16(bf16 a) { return zse_float((u32)a << 16); }
ZSE bf16 zse_bf16_of_f32(f32 a) {
  u32 b = zse_float_bits(a);
  return a != a ? 0x7fff : (bf16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
ZSE f32 zse_f32_of_f16(f16 a) {
  u32 sign = (u32)(a & 0x8000) << 16, exponent = a >> 10 & 31, mantissa = a & 1023;
  if (exponent == 31) return zse_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) { f32 size = (f32)mantissa * 0x1p-24f; return sign ? -size : size; }
  return zse_float(sign | (exponent + 112) << 23 | mantissa << 13);
}
ZSE f16 zse_f16_of_f32(f32 a) {
  u32 b = zse_float_bits(a), sign = b >> 16 & 0x8000, size = b & 0x7fffffff;
  if (size > 0x7f800000u) return 0x7fff;
  if (size >= 0x477ff000u) return (f16)(sign | 0x7c00);
  if (size < 0x38800000u) {                /* below 2^-14: one step is 2^-24 */
    f32 steps = zse_float(size) * 0x1p24f;
    return (f16)(sign | (u32)rintf(steps));
  }
  u32 r = size - 0x38000000u;
  return (f16)(sign | (r + 0xfff + (r >> 13 & 1)) >> 13);
}
ZSE f32 zse_f32_of_e4m3(e4m3 a) {
  u32 exponent = a >> 3 & 15, mantissa = a & 7;
  if ((a & 127) == 127) return zse_float(0x7fffffffu);
  f32 size = exponent ? zse_float((exponent + 120) << 23 | mantissa << 20) : (f32)mantissa * 0x1p-9f;
  return a & 128 ? -size : size;
}
ZSE e4m3 zse_e4m3_of_f32(f32 a) {
  u32 sign = zse_float_bits(a) >> 24 & 128;
  if (a != a) return 0x7f;
  f32 size = fminf(fabsf(a), 448.0f);
  if (size < 0x1p-6f) return (e4m3)(sign | (u32)rintf(size * 512.0f));
  u32 r = zse_float_bits(size) - 0x3c000000u;
  return (e4m3)(sign | (r + 0x7ffff + (r >> 20 & 1)) >> 20);
}

/* memory */

template <class V> ZSE V zse_load_global(Thread *T, const void *p) { emulate::check_read(T, p, sizeof(V)); V v; memcpy(&v, p, sizeof v); return v; }
template <class V> ZSE V zse_load_shared(Thread *T, const void *p) { emulate::check_shared_read(T, p, sizeof(V)); V v; memcpy(&v, p, sizeof v); return v; }
template <class V> ZSE V zse_load_local(Thread *, const void *p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class V> ZSE void zse_store_global(Thread *T, void *p, V v) { emulate::check_write(T, p, sizeof(V)); memcpy(p, &v, sizeof v); }
template <class V> ZSE void zse_store_shared(Thread *T, void *p, V v) { emulate::check_shared_write(T, p, sizeof(V)); memcpy(p, &v, sizeof v); }
template <class V> ZSE void zse_store_local(Thread *, void *p, V v) { memcpy(p, &v, sizeof v); }
ZSE u32 zse_shared_address(Thread *T, const void *p) { return (u32)((const u8 *)p - T->shared); }

/* warp, atomics */

template <class V> ZSE u64 zse_slot(V v) { u64 r = 0; memcpy(&r, &v, sizeof v); return r; }
template <class V> ZSE V zse_value(u64 slot) { V v; memcpy(&v, &slot, sizeof v); return v; }
template <class V> ZSE V zse_exchange(Thread *T, i32 kind, V v, i32 argument) { return zse_value<V>(emulate::exchange(T, kind, zse_slot(v), argument)); }
template <class V> struct zse_type_of;
template <> struct zse_type_of<i32> { static const i32 id = 0; };
template <> struct zse_type_of<u32> { static const i32 id = 1; };
template <> struct zse_type_of<i64> { static const i32 id = 2; };
template <> struct zse_type_of<u64> { static const i32 id = 3; };
template <> struct zse_type_of<f32> { static const i32 id = 4; };
template <class V> ZSE V zse_atomic(Thread *T, V *p, bool shared, i32 kind, V v, V expected = 0) {
  return zse_value<V>(emulate::atomic(T, p, shared, kind, zse_type_of<V>::id, zse_slot(v), zse_slot(expected)));
}

/* Words of `size` bytes, one after the other: between two of a vector other threads may run. */
template <class V> ZSE V zse_load_relaxed(Thread *T, const void *p, bool shared, u32 size) {
  V v;
  for (u32 at = 0; at < sizeof(V); at += size) emulate::relaxed_load(T, (const u8 *)p + at, shared, size, (u8 *)&v + at);
  return v;
}
template <class V> ZSE void zse_store_relaxed(Thread *T, void *p, bool shared, u32 size, V v) {
  for (u32 at = 0; at < sizeof(V); at += size) emulate::relaxed_store(T, (u8 *)p + at, shared, size, (const u8 *)&v + at);
}

/* Element (lane / 4, 2 (lane % 4) + half) of an 8x8 matrix becomes (2 (lane % 4) + half, lane / 4). */
ZSE u32 zse_transpose(Thread *T, u32 word) {
  i32 row = T->lane / 4, column = T->lane % 4 * 2, shift = row % 2 * 16;
  u32 low = zse_exchange<u32>(T, emulate::SHUFFLE, word, column * 4 + row / 2);
  u32 high = zse_exchange<u32>(T, emulate::SHUFFLE, word, (column + 1) * 4 + row / 2);
  return (low >> shift & 0xffff) | high >> shift << 16;
}

/* bits and pairs */

ZSE u32 zse_lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 r = 0;
  for (u32 k = 0; k < 8; ++k) if (table >> k & 1) r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  return r;
}
ZSE u32 zse_prmt(u32 a, u32 b, u32 selector) {
  u64 both = (u64)b << 32 | a;
  u32 r = 0;
  for (u32 k = 0; k < 4; ++k) {
    u32 pick = selector >> 4 * k, byte = (u32)(both >> 8 * (pick & 7)) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << 8 * k;
  }
  return r;
}
#define ZSE_PAIR2(name, of, to, expression) ZSE u32 zse_##name(u32 a, u32 b) { u32 r = 0; for (int k = 0; k < 32; k += 16) { \
  f64 x = of((u16)(a >> k)), y = of((u16)(b >> k)); r |= (u32)to((f32)(expression)) << k; } return r; }
#define ZSE_PAIR3(name, of, to) ZSE u32 zse_##name(u32 a, u32 b, u32 c) { u32 r = 0; for (int k = 0; k < 32; k += 16) { \
  f64 x = of((u16)(a >> k)), y = of((u16)(b >> k)), z = of((u16)(c >> k)); r |= (u32)to((f32)(x * y + z)) << k; } return r; }
ZSE_PAIR3(fma_bf16x2, zse_f32_of_bf16, zse_bf16_of_f32) ZSE_PAIR3(fma_f16x2, zse_f32_of_f16, zse_f16_of_f32)
ZSE_PAIR2(mul_bf16x2, zse_f32_of_bf16, zse_bf16_of_f32, x * y) ZSE_PAIR2(add_bf16x2, zse_f32_of_bf16, zse_bf16_of_f32, x + y)
ZSE_PAIR2(max_bf16x2, zse_f32_of_bf16, zse_bf16_of_f32, x != x ? y : y != y ? x : x > y ? x : y)
ZSE_PAIR2(mul_f16x2, zse_f32_of_f16, zse_f16_of_f32, x * y) ZSE_PAIR2(add_f16x2, zse_f32_of_f16, zse_f16_of_f32, x + y)
ZSE_PAIR2(sub_f16x2, zse_f32_of_f16, zse_f16_of_f32, x - y)

/* Subnormal results of the approximate instructions are zero. */
ZSE f32 zse_flushed(f32 a) { return fabsf(a) < 0x1p-126f ? copysignf(0.0f, a) : a; }
ZSE f32 zse_exp2(f32 a) { return zse_flushed(exp2f(zse_flushed(a))); }
ZSE f32 zse_rsqrt(f32 a) { a = zse_flushed(a); return 1.0f / sqrtf(a); }
ZSE f32 zse_reciprocal(f32 a) { return zse_flushed(1.0f / zse_flushed(a)); }
