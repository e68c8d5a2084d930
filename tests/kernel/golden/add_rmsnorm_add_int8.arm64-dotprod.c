#include <math.h>
#include <stdint.h>
#include <arm_neon.h>
typedef union { uint64_t slot; float f32; double f64; } zse_slot;

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x4_mem __attribute__((vector_size(16), aligned(1), may_alias));
typedef float f32x2 __attribute__((vector_size(8)));
typedef float f32x2_mem __attribute__((vector_size(8), aligned(1), may_alias));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4_mem __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t i32x2 __attribute__((vector_size(8)));
typedef int32_t i32x2_mem __attribute__((vector_size(8), aligned(1), may_alias));
typedef int8_t i8x4 __attribute__((vector_size(4)));
typedef int8_t i8x4_mem __attribute__((vector_size(4), aligned(1), may_alias));

static inline __attribute__((always_inline)) f32x4 zse_splat_f32x4(float a) { return (f32x4){a, a, a, a}; }
static inline __attribute__((always_inline)) float zse_reduce_add_f32x4(f32x4 v) { f32x2 a2 = __builtin_shufflevector(v, v, 0, 1), b2 = __builtin_shufflevector(v, v, 2, 3); f32x2 r2 = a2 + b2; return r2[0] + r2[1]; }
static inline __attribute__((always_inline)) i32x4 zse_splat_i32x4(int32_t a) { return (i32x4){a, a, a, a}; }
static inline __attribute__((always_inline)) i32x4 zse_maximum_i32x4(i32x4 a, i32x4 b) { i32x4 m = a > b; return (i32x4)((m & (i32x4)a) | (~m & (i32x4)b)); }
static inline __attribute__((always_inline)) i32x2 zse_maximum_i32x2(i32x2 a, i32x2 b) { i32x2 m = a > b; return (i32x2)((m & (i32x2)a) | (~m & (i32x2)b)); }
static inline __attribute__((always_inline)) int32_t zse_reduce_max_i32x4(i32x4 v) { i32x2 a2 = __builtin_shufflevector(v, v, 0, 1), b2 = __builtin_shufflevector(v, v, 2, 3); i32x2 r2 = zse_maximum_i32x2(a2, b2); return r2[0] > r2[1] ? r2[0] : r2[1]; }
static inline __attribute__((always_inline)) float zse_bits_i32_f32(int32_t a) { float r; __builtin_memcpy(&r, &a, sizeof r); return r; }
static inline __attribute__((always_inline)) i8x4 zse_narrow_s8_4(i32x4 a) { int16x4_t h = vqmovn_s32((int32x4_t)a); return (i8x4)vget_lane_s32(vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(h, h))), 0); }
static inline __attribute__((always_inline)) int32_t zse_reduce_add_i32x4(i32x4 v) { i32x2 a2 = __builtin_shufflevector(v, v, 0, 1), b2 = __builtin_shufflevector(v, v, 2, 3); i32x2 r2 = a2 + b2; return r2[0] + r2[1]; }

/* zse/kernels/norm.py: add_rmsnorm_row(DELTA=add, OUT=int8, NORM=rms) */
void add_rmsnorm_add_int8(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
  float *const x = (float *)(uintptr_t)args[0];
  const float *const delta = (const float *)(uintptr_t)args[1];
  const float *const weight = (const float *)(uintptr_t)args[3];
  int8_t *const q = (int8_t *)(uintptr_t)args[6];
  float *const scale = (float *)(uintptr_t)args[7];
  float *const total = (float *)(uintptr_t)args[8];
  int64_t const width = (int64_t)args[10];
  float const eps = ((const zse_slot *)args)[11].f32;
  for (int64_t block = first; block < last; ++block) {
    const int64_t block_0 = block % grid[0];
    int64_t row = block_0;
    float * xs = (x + (row * width));
    const float * ds = (delta + (row * width));
    int64_t start = 0LL;
    int64_t stop = (start + (((width - start) / 16LL) * 16LL));
    for (int64_t i = start; i < stop; i += 16LL) {
      int64_t at = (i + 0LL);
      *(f32x4_mem *)(xs + at) = ((*(const f32x4_mem *)(xs + at)) + (*(const f32x4_mem *)(ds + at)));
      at = (i + 4LL);
      *(f32x4_mem *)(xs + at) = ((*(const f32x4_mem *)(xs + at)) + (*(const f32x4_mem *)(ds + at)));
      at = (i + 8LL);
      *(f32x4_mem *)(xs + at) = ((*(const f32x4_mem *)(xs + at)) + (*(const f32x4_mem *)(ds + at)));
      at = (i + 12LL);
      *(f32x4_mem *)(xs + at) = ((*(const f32x4_mem *)(xs + at)) + (*(const f32x4_mem *)(ds + at)));
    }
    start = stop;
    stop = (start + (((width - start) / 4LL) * 4LL));
    for (int64_t i_1 = start; i_1 < stop; i_1 += 4LL) {
      int64_t at_1 = (i_1 + 0LL);
      *(f32x4_mem *)(xs + at_1) = ((*(const f32x4_mem *)(xs + at_1)) + (*(const f32x4_mem *)(ds + at_1)));
    }
    start = stop;
    stop = (start + (((width - start) / 1LL) * 1LL));
    for (int64_t i_2 = start; i_2 < stop; i_2 += 1LL) {
      int64_t at_2 = (i_2 + 0LL);
      *(xs + at_2) = ((*(xs + at_2)) + (*(ds + at_2)));
    }
    start = stop;
    f32x4 sums = zse_splat_f32x4((0.0f));
    f32x4 sums_1 = zse_splat_f32x4((0.0f));
    f32x4 sums_2 = zse_splat_f32x4((0.0f));
    f32x4 sums_3 = zse_splat_f32x4((0.0f));
    float tail = (0.0f);
    int64_t start_1 = 0LL;
    int64_t stop_1 = (start_1 + (((width - start_1) / 16LL) * 16LL));
    for (int64_t i_3 = start_1; i_3 < stop_1; i_3 += 16LL) {
      f32x4 value = (*(const f32x4_mem *)(xs + i_3));
      sums = ((f32x4)vfmaq_f32(sums, value, value));
      value = (*(const f32x4_mem *)((xs + i_3) + 4LL));
      sums_1 = ((f32x4)vfmaq_f32(sums_1, value, value));
      value = (*(const f32x4_mem *)((xs + i_3) + 8LL));
      sums_2 = ((f32x4)vfmaq_f32(sums_2, value, value));
      value = (*(const f32x4_mem *)((xs + i_3) + 12LL));
      sums_3 = ((f32x4)vfmaq_f32(sums_3, value, value));
    }
    start_1 = stop_1;
    stop_1 = (start_1 + (((width - start_1) / 4LL) * 4LL));
    for (int64_t i_4 = start_1; i_4 < stop_1; i_4 += 4LL) {
      f32x4 value_1 = (*(const f32x4_mem *)(xs + i_4));
      sums = ((f32x4)vfmaq_f32(sums, value_1, value_1));
    }
    start_1 = stop_1;
    stop_1 = (start_1 + (((width - start_1) / 1LL) * 1LL));
    for (int64_t i_5 = start_1; i_5 < stop_1; i_5 += 1LL) {
      float value_2 = (*(xs + i_5));
      tail = (tail + (value_2 * value_2));
    }
    start_1 = stop_1;
    float total_1 = (zse_reduce_add_f32x4(((sums + sums_1) + (sums_2 + sums_3))) + tail);
    float inverse = ((1.0f) / sqrtf(((total_1 / ((float)width)) + eps)));
    for (int64_t k = 0LL; k < width; k += 32LL) {
      int64_t at_3 = (k + 0LL);
      f32x4 value_3 = (*(const f32x4_mem *)(xs + at_3));
      f32x4 values = ((value_3 * zse_splat_f32x4(inverse)) * (*(const f32x4_mem *)(weight + at_3)));
      int64_t at_4 = (k + 4LL);
      f32x4 value_4 = (*(const f32x4_mem *)(xs + at_4));
      f32x4 values_1 = ((value_4 * zse_splat_f32x4(inverse)) * (*(const f32x4_mem *)(weight + at_4)));
      int64_t at_5 = (k + 8LL);
      f32x4 value_5 = (*(const f32x4_mem *)(xs + at_5));
      f32x4 values_2 = ((value_5 * zse_splat_f32x4(inverse)) * (*(const f32x4_mem *)(weight + at_5)));
      int64_t at_6 = (k + 12LL);
      f32x4 value_6 = (*(const f32x4_mem *)(xs + at_6));
      f32x4 values_3 = ((value_6 * zse_splat_f32x4(inverse)) * (*(const f32x4_mem *)(weight + at_6)));
      int64_t at_7 = (k + 16LL);
      f32x4 value_7 = (*(const f32x4_mem *)(xs + at_7));
      f32x4 values_4 = ((value_7 * zse_splat_f32x4(inverse)) * (*(const f32x4_mem *)(weight + at_7)));
      int64_t at_8 = (k + 20LL);
      f32x4 value_8 = (*(const f32x4_mem *)(xs + at_8));
      f32x4 values_5 = ((value_8 * zse_splat_f32x4(inverse)) * (*(const f32x4_mem *)(weight + at_8)));
      int64_t at_9 = (k + 24LL);
      f32x4 value_9 = (*(const f32x4_mem *)(xs + at_9));
      f32x4 values_6 = ((value_9 * zse_splat_f32x4(inverse)) * (*(const f32x4_mem *)(weight + at_9)));
      int64_t at_10 = (k + 28LL);
      f32x4 value_10 = (*(const f32x4_mem *)(xs + at_10));
      f32x4 values_7 = ((value_10 * zse_splat_f32x4(inverse)) * (*(const f32x4_mem *)(weight + at_10)));
      int64_t place = ((row * width) + k);
      int8_t * q_1 = (q + place);
      float * scale_1 = (scale + (place / 32LL));
      float * total_2 = (total + (place / 32LL));
      i32x4 top = zse_splat_i32x4(0);
      top = zse_maximum_i32x4(top, (((i32x4)values) & zse_splat_i32x4(2147483647)));
      top = zse_maximum_i32x4(top, (((i32x4)values_1) & zse_splat_i32x4(2147483647)));
      top = zse_maximum_i32x4(top, (((i32x4)values_2) & zse_splat_i32x4(2147483647)));
      top = zse_maximum_i32x4(top, (((i32x4)values_3) & zse_splat_i32x4(2147483647)));
      top = zse_maximum_i32x4(top, (((i32x4)values_4) & zse_splat_i32x4(2147483647)));
      top = zse_maximum_i32x4(top, (((i32x4)values_5) & zse_splat_i32x4(2147483647)));
      top = zse_maximum_i32x4(top, (((i32x4)values_6) & zse_splat_i32x4(2147483647)));
      top = zse_maximum_i32x4(top, (((i32x4)values_7) & zse_splat_i32x4(2147483647)));
      float peak = zse_bits_i32_f32(zse_reduce_max_i32x4(top));
      float inverse_1 = ((peak > (1e-30f)) ? ((127.0f) / peak) : (0.0f));
      i32x4 count = zse_splat_i32x4(0);
      f32x4 nearest = ((f32x4)vrndnq_f32((values * zse_splat_f32x4(inverse_1))));
      i32x4 rounded = __builtin_convertvector(nearest, i32x4);
      count = (count + rounded);
      *(i8x4_mem *)q_1 = zse_narrow_s8_4(rounded);
      nearest = ((f32x4)vrndnq_f32((values_1 * zse_splat_f32x4(inverse_1))));
      rounded = __builtin_convertvector(nearest, i32x4);
      count = (count + rounded);
      *(i8x4_mem *)(q_1 + 4LL) = zse_narrow_s8_4(rounded);
      nearest = ((f32x4)vrndnq_f32((values_2 * zse_splat_f32x4(inverse_1))));
      rounded = __builtin_convertvector(nearest, i32x4);
      count = (count + rounded);
      *(i8x4_mem *)(q_1 + 8LL) = zse_narrow_s8_4(rounded);
      nearest = ((f32x4)vrndnq_f32((values_3 * zse_splat_f32x4(inverse_1))));
      rounded = __builtin_convertvector(nearest, i32x4);
      count = (count + rounded);
      *(i8x4_mem *)(q_1 + 12LL) = zse_narrow_s8_4(rounded);
      nearest = ((f32x4)vrndnq_f32((values_4 * zse_splat_f32x4(inverse_1))));
      rounded = __builtin_convertvector(nearest, i32x4);
      count = (count + rounded);
      *(i8x4_mem *)(q_1 + 16LL) = zse_narrow_s8_4(rounded);
      nearest = ((f32x4)vrndnq_f32((values_5 * zse_splat_f32x4(inverse_1))));
      rounded = __builtin_convertvector(nearest, i32x4);
      count = (count + rounded);
      *(i8x4_mem *)(q_1 + 20LL) = zse_narrow_s8_4(rounded);
      nearest = ((f32x4)vrndnq_f32((values_6 * zse_splat_f32x4(inverse_1))));
      rounded = __builtin_convertvector(nearest, i32x4);
      count = (count + rounded);
      *(i8x4_mem *)(q_1 + 24LL) = zse_narrow_s8_4(rounded);
      nearest = ((f32x4)vrndnq_f32((values_7 * zse_splat_f32x4(inverse_1))));
      rounded = __builtin_convertvector(nearest, i32x4);
      count = (count + rounded);
      *(i8x4_mem *)(q_1 + 28LL) = zse_narrow_s8_4(rounded);
      float unit = (peak / (127.0f));
      *scale_1 = unit;
      *total_2 = (unit * ((float)zse_reduce_add_i32x4(count)));
    }
  }
}
