#include <math.h>
#include <stdint.h>
#include <immintrin.h>
typedef union { uint64_t slot; float f32; double f64; } zse_slot;

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x16_mem __attribute__((vector_size(64), aligned(1), may_alias));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x8_mem __attribute__((vector_size(32), aligned(1), may_alias));
typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x4_mem __attribute__((vector_size(16), aligned(1), may_alias));
typedef float f32x2 __attribute__((vector_size(8)));
typedef float f32x2_mem __attribute__((vector_size(8), aligned(1), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16_mem __attribute__((vector_size(64), aligned(1), may_alias));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8_mem __attribute__((vector_size(32), aligned(1), may_alias));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4_mem __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t i32x2 __attribute__((vector_size(8)));
typedef int32_t i32x2_mem __attribute__((vector_size(8), aligned(1), may_alias));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16_mem __attribute__((vector_size(16), aligned(1), may_alias));

static inline f32x16 zse_splat_f32x16(float a) { return (f32x16)_mm512_set1_ps(a); }
static inline float zse_reduce_add_f32x16(f32x16 v) { f32x8 a8 = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), b8 = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); f32x8 r8 = a8 + b8; f32x4 a4 = __builtin_shufflevector(r8, r8, 0, 1, 2, 3), b4 = __builtin_shufflevector(r8, r8, 4, 5, 6, 7); f32x4 r4 = a4 + b4; f32x2 a2 = __builtin_shufflevector(r4, r4, 0, 1), b2 = __builtin_shufflevector(r4, r4, 2, 3); f32x2 r2 = a2 + b2; return r2[0] + r2[1]; }
static inline i32x16 zse_splat_i32x16(int32_t a) { return (i32x16)_mm512_set1_epi32(a); }
static inline i32x2 zse_maximum_i32x2(i32x2 a, i32x2 b) { i32x2 r; for (int i = 0; i < 2; ++i) r[i] = (a[i] > b[i] ? a[i] : b[i]); return r; }
static inline int32_t zse_reduce_max_i32x16(i32x16 v) { i32x8 a8 = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), b8 = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); i32x8 r8 = ((i32x8)_mm256_max_epi32((__m256i)a8, (__m256i)b8)); i32x4 a4 = __builtin_shufflevector(r8, r8, 0, 1, 2, 3), b4 = __builtin_shufflevector(r8, r8, 4, 5, 6, 7); i32x4 r4 = ((i32x4)_mm_max_epi32((__m128i)a4, (__m128i)b4)); i32x2 a2 = __builtin_shufflevector(r4, r4, 0, 1), b2 = __builtin_shufflevector(r4, r4, 2, 3); i32x2 r2 = zse_maximum_i32x2(a2, b2); return r2[0] > r2[1] ? r2[0] : r2[1]; }
static inline float zse_bits_i32_f32(int32_t a) { float r; __builtin_memcpy(&r, &a, sizeof r); return r; }
static inline int32_t zse_reduce_add_i32x16(i32x16 v) { i32x8 a8 = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), b8 = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); i32x8 r8 = a8 + b8; i32x4 a4 = __builtin_shufflevector(r8, r8, 0, 1, 2, 3), b4 = __builtin_shufflevector(r8, r8, 4, 5, 6, 7); i32x4 r4 = a4 + b4; i32x2 a2 = __builtin_shufflevector(r4, r4, 0, 1), b2 = __builtin_shufflevector(r4, r4, 2, 3); i32x2 r2 = a2 + b2; return r2[0] + r2[1]; }

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
    int64_t stop = (start + (((width - start) / 64LL) * 64LL));
    for (int64_t i = start; i < stop; i += 64LL) {
      int64_t at = (i + 0LL);
      *(f32x16_mem *)(xs + at) = ((*(const f32x16_mem *)(xs + at)) + (*(const f32x16_mem *)(ds + at)));
      at = (i + 16LL);
      *(f32x16_mem *)(xs + at) = ((*(const f32x16_mem *)(xs + at)) + (*(const f32x16_mem *)(ds + at)));
      at = (i + 32LL);
      *(f32x16_mem *)(xs + at) = ((*(const f32x16_mem *)(xs + at)) + (*(const f32x16_mem *)(ds + at)));
      at = (i + 48LL);
      *(f32x16_mem *)(xs + at) = ((*(const f32x16_mem *)(xs + at)) + (*(const f32x16_mem *)(ds + at)));
    }
    start = stop;
    stop = (start + (((width - start) / 16LL) * 16LL));
    for (int64_t i_1 = start; i_1 < stop; i_1 += 16LL) {
      int64_t at_1 = (i_1 + 0LL);
      *(f32x16_mem *)(xs + at_1) = ((*(const f32x16_mem *)(xs + at_1)) + (*(const f32x16_mem *)(ds + at_1)));
    }
    start = stop;
    stop = (start + (((width - start) / 1LL) * 1LL));
    for (int64_t i_2 = start; i_2 < stop; i_2 += 1LL) {
      int64_t at_2 = (i_2 + 0LL);
      *(xs + at_2) = ((*(xs + at_2)) + (*(ds + at_2)));
    }
    start = stop;
    f32x16 sums = zse_splat_f32x16((0.0f));
    f32x16 sums_1 = zse_splat_f32x16((0.0f));
    f32x16 sums_2 = zse_splat_f32x16((0.0f));
    f32x16 sums_3 = zse_splat_f32x16((0.0f));
    float tail = (0.0f);
    int64_t start_1 = 0LL;
    int64_t stop_1 = (start_1 + (((width - start_1) / 64LL) * 64LL));
    for (int64_t i_3 = start_1; i_3 < stop_1; i_3 += 64LL) {
      f32x16 value = (*(const f32x16_mem *)(xs + i_3));
      sums = ((f32x16)_mm512_fmadd_ps(value, value, sums));
      value = (*(const f32x16_mem *)((xs + i_3) + 16LL));
      sums_1 = ((f32x16)_mm512_fmadd_ps(value, value, sums_1));
      value = (*(const f32x16_mem *)((xs + i_3) + 32LL));
      sums_2 = ((f32x16)_mm512_fmadd_ps(value, value, sums_2));
      value = (*(const f32x16_mem *)((xs + i_3) + 48LL));
      sums_3 = ((f32x16)_mm512_fmadd_ps(value, value, sums_3));
    }
    start_1 = stop_1;
    stop_1 = (start_1 + (((width - start_1) / 16LL) * 16LL));
    for (int64_t i_4 = start_1; i_4 < stop_1; i_4 += 16LL) {
      f32x16 value_1 = (*(const f32x16_mem *)(xs + i_4));
      sums = ((f32x16)_mm512_fmadd_ps(value_1, value_1, sums));
    }
    start_1 = stop_1;
    stop_1 = (start_1 + (((width - start_1) / 1LL) * 1LL));
    for (int64_t i_5 = start_1; i_5 < stop_1; i_5 += 1LL) {
      float value_2 = (*(xs + i_5));
      tail = (tail + (value_2 * value_2));
    }
    start_1 = stop_1;
    float total_1 = (zse_reduce_add_f32x16(((sums + sums_1) + (sums_2 + sums_3))) + tail);
    float inverse = ((1.0f) / sqrtf(((total_1 / ((float)width)) + eps)));
    for (int64_t k = 0LL; k < width; k += 32LL) {
      int64_t at_3 = (k + 0LL);
      f32x16 value_3 = (*(const f32x16_mem *)(xs + at_3));
      f32x16 values = ((value_3 * zse_splat_f32x16(inverse)) * (*(const f32x16_mem *)(weight + at_3)));
      int64_t at_4 = (k + 16LL);
      f32x16 value_4 = (*(const f32x16_mem *)(xs + at_4));
      f32x16 values_1 = ((value_4 * zse_splat_f32x16(inverse)) * (*(const f32x16_mem *)(weight + at_4)));
      int64_t place = ((row * width) + k);
      int8_t * q_1 = (q + place);
      float * scale_1 = (scale + (place / 32LL));
      float * total_2 = (total + (place / 32LL));
      i32x16 top = zse_splat_i32x16(0);
      top = ((i32x16)_mm512_max_epi32((__m512i)top, (__m512i)(((i32x16)values) & zse_splat_i32x16(2147483647))));
      top = ((i32x16)_mm512_max_epi32((__m512i)top, (__m512i)(((i32x16)values_1) & zse_splat_i32x16(2147483647))));
      float peak = zse_bits_i32_f32(zse_reduce_max_i32x16(top));
      float inverse_1 = ((peak > (1e-30f)) ? ((127.0f) / peak) : (0.0f));
      i32x16 count = zse_splat_i32x16(0);
      f32x16 nearest = _mm512_roundscale_ps((values * zse_splat_f32x16(inverse_1)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      i32x16 rounded = __builtin_convertvector(nearest, i32x16);
      count = (count + rounded);
      *(i8x16_mem *)q_1 = ((i8x16)_mm512_cvtsepi32_epi8((__m512i)rounded));
      nearest = _mm512_roundscale_ps((values_1 * zse_splat_f32x16(inverse_1)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      rounded = __builtin_convertvector(nearest, i32x16);
      count = (count + rounded);
      *(i8x16_mem *)(q_1 + 16LL) = ((i8x16)_mm512_cvtsepi32_epi8((__m512i)rounded));
      float unit = (peak / (127.0f));
      *scale_1 = unit;
      *total_2 = (unit * ((float)zse_reduce_add_i32x16(count)));
    }
  }
}
