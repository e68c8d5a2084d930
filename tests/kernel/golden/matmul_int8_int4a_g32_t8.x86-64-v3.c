#include <math.h>
#include <stdint.h>
#include <immintrin.h>
typedef union { uint64_t slot; float f32; double f64; } zse_slot;

typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x8_mem __attribute__((vector_size(32), aligned(1), may_alias));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8_mem __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint16_t f16x8 __attribute__((vector_size(16)));
typedef uint16_t f16x8_mem __attribute__((vector_size(16), aligned(1), may_alias));

static inline int64_t zse_minimum_i64(int64_t a, int64_t b) { return (a < b ? a : b); }
static inline f32x8 zse_splat_f32x8(float a) { return (f32x8)_mm256_set1_ps(a); }
static inline i32x8 zse_splat_i32x8(int32_t a) { return (i32x8)_mm256_set1_epi32(a); }
static inline i32x8 zse_add_i16_i32x8(i32x8 a, i32x8 b) { __asm__("vpaddw %2, %1, %0" : "=x"(a) : "x"(a), "x"(b)); return a; }

/* zse/kernels/matmul_affine.py: matmul_int8(BITS=4, SYMMETRIC=False, CODE=f16, GROUP=32, WIDE=False, PARTS=1, TOKENS=8) */
void matmul_int8_int4a_g32_t8(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
  const int32_t *const q = (const int32_t *)(uintptr_t)args[0];
  const uint16_t *const scale = (const uint16_t *)(uintptr_t)args[2];
  const uint16_t *const offset = (const uint16_t *)(uintptr_t)args[3];
  const int8_t *const aq = (const int8_t *)(uintptr_t)args[4];
  const float *const a_scale = (const float *)(uintptr_t)args[6];
  const float *const a_sum = (const float *)(uintptr_t)args[7];
  const float *const bias = (const float *)(uintptr_t)args[8];
  float *const out = (float *)(uintptr_t)args[9];
  int64_t const tokens = (int64_t)args[10];
  int64_t const rows = (int64_t)args[11];
  int64_t const blocks = (int64_t)args[12];
  int64_t const has_bias = (int64_t)args[14];
  const int32_t *const tasks = (const int32_t *)(uintptr_t)args[15];
  const int32_t *const source = (const int32_t *)(uintptr_t)args[16];
  int64_t const experts = (int64_t)args[17];
  for (int64_t block = first; block < last; ++block) {
    const int64_t block_0 = block % grid[0];
    const int64_t block_1 = block / grid[0] % grid[1];
    int64_t first_ = (block_1 * 64LL);
    int64_t value = first_;
    int64_t value_1 = zse_minimum_i64((first_ + 64LL), tokens);
    int64_t first__1 = value;
    int64_t last_ = value_1;
    if ((experts != 0LL)) {
      const int32_t * task = (tasks + (block_1 * 3LL));
      first__1 = ((int64_t)(*(task + 1LL)));
      last_ = ((int64_t)(*(task + 2LL)));
    }
    int64_t value_2 = first__1;
    int64_t value_3 = last_;
    int64_t first__2 = value_2;
    int64_t last__1 = value_3;
    if (((last__1 - first__2) <= 4LL)) {
      int64_t tile = block_0;
      int64_t expert_1 = 0LL;
      int64_t first__3 = (block_1 * 64LL);
      int64_t value_4 = first__3;
      int64_t value_5 = zse_minimum_i64((first__3 + 64LL), tokens);
      int64_t first__4 = value_4;
      int64_t last__2 = value_5;
      if ((experts != 0LL)) {
        const int32_t * task_1 = (tasks + (block_1 * 3LL));
        expert_1 = ((int64_t)(*task_1));
        first__4 = ((int64_t)(*(task_1 + 1LL)));
        last__2 = ((int64_t)(*(task_1 + 2LL)));
      }
      int64_t value_6 = expert_1;
      int64_t value_7 = first__4;
      int64_t value_8 = last__2;
      int64_t expert_2 = value_6;
      int64_t token_first = value_7;
      int64_t token_last = value_8;
      int64_t groups = blocks;
      int64_t tile_1 = ((expert_2 * ((rows + 15LL) / 16LL)) + tile);
      const int32_t * planes = (q + ((tile_1 * blocks) * 64LL));
      const uint16_t * planes_2 = (scale + ((tile_1 * groups) * 16LL));
      const uint16_t * planes_3 = (offset + ((tile_1 * groups) * 16LL));
      for (int64_t first_part = 0LL; first_part < 2LL; first_part += 1LL) {
        for (int64_t token = token_first; token < token_last; token += 4LL) {
          if (((token_last - token) <= 2LL)) {
            int64_t parts = (first_part + 0LL);
            int64_t at = zse_minimum_i64((token + 0LL), (token_last - 1LL));
            int64_t at_1 = zse_minimum_i64((token + 1LL), (token_last - 1LL));
            int64_t row = (at + 0LL);
            if ((experts == 2LL)) {
              row = ((int64_t)(*(source + at)));
            }
            int64_t rows_1 = row;
            int64_t row_1 = (at_1 + 0LL);
            if ((experts == 2LL)) {
              row_1 = ((int64_t)(*(source + at_1)));
            }
            int64_t rows_2 = row_1;
            const int8_t * item = (aq + (rows_1 * (blocks * 32LL)));
            const int8_t * item_1 = (aq + (rows_2 * (blocks * 32LL)));
            const float * item_2 = (a_scale + (rows_1 * blocks));
            const float * item_3 = (a_scale + (rows_2 * blocks));
            const float * item_4 = (a_sum + (rows_1 * blocks));
            const float * item_5 = (a_sum + (rows_2 * blocks));
            const int8_t * a = item;
            const int8_t * a_1 = item_1;
            const float * a_2 = item_2;
            const float * a_3 = item_3;
            const float * a_4 = item_4;
            const float * a_5 = item_5;
            f32x8 acc = zse_splat_f32x8((0.0f));
            f32x8 acc_1 = zse_splat_f32x8((0.0f));
            for (int64_t block_ = 0LL; block_ < blocks; block_ += 1LL) {
              int64_t block__1 = (block_ + 16LL);
              __builtin_prefetch((planes + (block__1 * 64LL)), 0, 2);
              __builtin_prefetch(((planes + (block__1 * 64LL)) + 16LL), 0, 2);
              __builtin_prefetch(((planes + (block__1 * 64LL)) + 32LL), 0, 2);
              __builtin_prefetch(((planes + (block__1 * 64LL)) + 48LL), 0, 2);
              int64_t group = block__1;
              __builtin_prefetch((planes_2 + (group * 16LL)), 0, 2);
              __builtin_prefetch((planes_3 + (group * 16LL)), 0, 2);
              int64_t row_2 = (parts * 8LL);
              i32x8 packed = (*(const i32x8_mem *)((planes + (block_ * 64LL)) + (0LL + row_2)));
              i32x8 packed_1 = (*(const i32x8_mem *)((planes + (block_ * 64LL)) + (16LL + row_2)));
              i32x8 packed_2 = (*(const i32x8_mem *)((planes + (block_ * 64LL)) + (32LL + row_2)));
              i32x8 packed_3 = (*(const i32x8_mem *)((planes + (block_ * 64LL)) + (48LL + row_2)));
              i32x8 w = (packed & zse_splat_i32x8(252645135));
              i32x8 w_1 = (packed_1 & zse_splat_i32x8(252645135));
              i32x8 w_2 = (packed_2 & zse_splat_i32x8(252645135));
              i32x8 w_3 = (packed_3 & zse_splat_i32x8(252645135));
              i32x8 w_4 = ((packed >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 w_5 = ((packed_1 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 w_6 = ((packed_2 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 w_7 = ((packed_3 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              f32x8 s = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((planes_2 + (block_ * 16LL)) + (parts * 8LL)))));
              f32x8 value_9 = s;
              f32x8 value_10 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((planes_3 + (block_ * 16LL)) + (parts * 8LL)))));
              f32x8 s_1 = value_9;
              f32x8 o = value_10;
              f32x8 unit = s_1;
              f32x8 scales = unit;
              f32x8 scales_1 = o;
              const int32_t * q_1 = ((const int32_t *)(a + (block_ * 32LL)));
              const int32_t * q_2 = ((const int32_t *)(a_1 + (block_ * 32LL)));
              i32x8 totals = zse_splat_i32x8(0);
              i32x8 totals_1 = zse_splat_i32x8(0);
              i32x8 sums = ((i32x8)_mm256_maddubs_epi16((__m256i)w, (__m256i)zse_splat_i32x8((*q_1))));
              i32x8 sums_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w, (__m256i)zse_splat_i32x8((*q_2))));
              sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_1, (__m256i)zse_splat_i32x8((*(q_1 + 1LL))))));
              sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_1, (__m256i)zse_splat_i32x8((*(q_2 + 1LL))))));
              sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_2, (__m256i)zse_splat_i32x8((*(q_1 + 2LL))))));
              sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_2, (__m256i)zse_splat_i32x8((*(q_2 + 2LL))))));
              sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_3, (__m256i)zse_splat_i32x8((*(q_1 + 3LL))))));
              sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_3, (__m256i)zse_splat_i32x8((*(q_2 + 3LL))))));
              sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_4, (__m256i)zse_splat_i32x8((*(q_1 + 4LL))))));
              sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_4, (__m256i)zse_splat_i32x8((*(q_2 + 4LL))))));
              sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_5, (__m256i)zse_splat_i32x8((*(q_1 + 5LL))))));
              sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_5, (__m256i)zse_splat_i32x8((*(q_2 + 5LL))))));
              sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_6, (__m256i)zse_splat_i32x8((*(q_1 + 6LL))))));
              sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_6, (__m256i)zse_splat_i32x8((*(q_2 + 6LL))))));
              sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_7, (__m256i)zse_splat_i32x8((*(q_1 + 7LL))))));
              sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_7, (__m256i)zse_splat_i32x8((*(q_2 + 7LL))))));
              totals = (totals + ((i32x8)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1))));
              totals_1 = (totals_1 + ((i32x8)_mm256_madd_epi16((__m256i)sums_1, _mm256_set1_epi16(1))));
              acc = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals, f32x8), (scales * zse_splat_f32x8((*(a_2 + block_)))), acc));
              acc = ((f32x8)_mm256_fmadd_ps(scales_1, zse_splat_f32x8((*(a_4 + block_))), acc));
              acc_1 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_1, f32x8), (scales * zse_splat_f32x8((*(a_3 + block_)))), acc_1));
              acc_1 = ((f32x8)_mm256_fmadd_ps(scales_1, zse_splat_f32x8((*(a_5 + block_))), acc_1));
            }
            if (((token + 0LL) < token_last)) {
              float * out_1 = (out + (at * rows));
              const float * bias_1 = (bias + (expert_2 * rows));
              int64_t row_3 = ((tile * 16LL) + (parts * 8LL));
              f32x8 total = acc;
              if ((has_bias != 0LL)) {
                if (((row_3 + 8LL) <= rows)) {
                  total = (total + (*(const f32x8_mem *)(bias_1 + row_3)));
                }
              }
              if (((row_3 + 8LL) <= rows)) {
                *(f32x8_mem *)(out_1 + row_3) = total;
              } else {
                float scratch[16] __attribute__((aligned(64)));
                float * spill = scratch;
                *(f32x8_mem *)spill = total;
                for (int64_t r = row_3; r < rows; r += 1LL) {
                  if ((has_bias != 0LL)) {
                    *(out_1 + r) = ((*(spill + (r - row_3))) + (*(bias_1 + r)));
                  } else {
                    *(out_1 + r) = (*(spill + (r - row_3)));
                  }
                }
              }
            }
            if (((token + 1LL) < token_last)) {
              float * out_2 = (out + (at_1 * rows));
              const float * bias_2 = (bias + (expert_2 * rows));
              int64_t row_4 = ((tile * 16LL) + (parts * 8LL));
              f32x8 total_1 = acc_1;
              if ((has_bias != 0LL)) {
                if (((row_4 + 8LL) <= rows)) {
                  total_1 = (total_1 + (*(const f32x8_mem *)(bias_2 + row_4)));
                }
              }
              if (((row_4 + 8LL) <= rows)) {
                *(f32x8_mem *)(out_2 + row_4) = total_1;
              } else {
                float scratch_1[16] __attribute__((aligned(64)));
                float * spill_1 = scratch_1;
                *(f32x8_mem *)spill_1 = total_1;
                for (int64_t r_1 = row_4; r_1 < rows; r_1 += 1LL) {
                  if ((has_bias != 0LL)) {
                    *(out_2 + r_1) = ((*(spill_1 + (r_1 - row_4))) + (*(bias_2 + r_1)));
                  } else {
                    *(out_2 + r_1) = (*(spill_1 + (r_1 - row_4)));
                  }
                }
              }
            }
          } else {
            int64_t parts_1 = (first_part + 0LL);
            int64_t at_2 = zse_minimum_i64((token + 0LL), (token_last - 1LL));
            int64_t at_3 = zse_minimum_i64((token + 1LL), (token_last - 1LL));
            int64_t at_4 = zse_minimum_i64((token + 2LL), (token_last - 1LL));
            int64_t at_5 = zse_minimum_i64((token + 3LL), (token_last - 1LL));
            int64_t row_5 = (at_2 + 0LL);
            if ((experts == 2LL)) {
              row_5 = ((int64_t)(*(source + at_2)));
            }
            int64_t rows_3 = row_5;
            int64_t row_6 = (at_3 + 0LL);
            if ((experts == 2LL)) {
              row_6 = ((int64_t)(*(source + at_3)));
            }
            int64_t rows_4 = row_6;
            int64_t row_7 = (at_4 + 0LL);
            if ((experts == 2LL)) {
              row_7 = ((int64_t)(*(source + at_4)));
            }
            int64_t rows_5 = row_7;
            int64_t row_8 = (at_5 + 0LL);
            if ((experts == 2LL)) {
              row_8 = ((int64_t)(*(source + at_5)));
            }
            int64_t rows_6 = row_8;
            const int8_t * item_6 = (aq + (rows_3 * (blocks * 32LL)));
            const int8_t * item_7 = (aq + (rows_4 * (blocks * 32LL)));
            const int8_t * item_8 = (aq + (rows_5 * (blocks * 32LL)));
            const int8_t * item_9 = (aq + (rows_6 * (blocks * 32LL)));
            const float * item_10 = (a_scale + (rows_3 * blocks));
            const float * item_11 = (a_scale + (rows_4 * blocks));
            const float * item_12 = (a_scale + (rows_5 * blocks));
            const float * item_13 = (a_scale + (rows_6 * blocks));
            const float * item_14 = (a_sum + (rows_3 * blocks));
            const float * item_15 = (a_sum + (rows_4 * blocks));
            const float * item_16 = (a_sum + (rows_5 * blocks));
            const float * item_17 = (a_sum + (rows_6 * blocks));
            const int8_t * a_6 = item_6;
            const int8_t * a_7 = item_7;
            const int8_t * a_8 = item_8;
            const int8_t * a_9 = item_9;
            const float * a_10 = item_10;
            const float * a_11 = item_11;
            const float * a_12 = item_12;
            const float * a_13 = item_13;
            const float * a_14 = item_14;
            const float * a_15 = item_15;
            const float * a_16 = item_16;
            const float * a_17 = item_17;
            f32x8 acc_2 = zse_splat_f32x8((0.0f));
            f32x8 acc_3 = zse_splat_f32x8((0.0f));
            f32x8 acc_4 = zse_splat_f32x8((0.0f));
            f32x8 acc_5 = zse_splat_f32x8((0.0f));
            for (int64_t block__2 = 0LL; block__2 < blocks; block__2 += 1LL) {
              int64_t block__3 = (block__2 + 16LL);
              __builtin_prefetch((planes + (block__3 * 64LL)), 0, 2);
              __builtin_prefetch(((planes + (block__3 * 64LL)) + 16LL), 0, 2);
              __builtin_prefetch(((planes + (block__3 * 64LL)) + 32LL), 0, 2);
              __builtin_prefetch(((planes + (block__3 * 64LL)) + 48LL), 0, 2);
              int64_t group_1 = block__3;
              __builtin_prefetch((planes_2 + (group_1 * 16LL)), 0, 2);
              __builtin_prefetch((planes_3 + (group_1 * 16LL)), 0, 2);
              int64_t row_9 = (parts_1 * 8LL);
              i32x8 packed_4 = (*(const i32x8_mem *)((planes + (block__2 * 64LL)) + (0LL + row_9)));
              i32x8 packed_5 = (*(const i32x8_mem *)((planes + (block__2 * 64LL)) + (16LL + row_9)));
              i32x8 packed_6 = (*(const i32x8_mem *)((planes + (block__2 * 64LL)) + (32LL + row_9)));
              i32x8 packed_7 = (*(const i32x8_mem *)((planes + (block__2 * 64LL)) + (48LL + row_9)));
              i32x8 w_8 = (packed_4 & zse_splat_i32x8(252645135));
              i32x8 w_9 = (packed_5 & zse_splat_i32x8(252645135));
              i32x8 w_10 = (packed_6 & zse_splat_i32x8(252645135));
              i32x8 w_11 = (packed_7 & zse_splat_i32x8(252645135));
              i32x8 w_12 = ((packed_4 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 w_13 = ((packed_5 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 w_14 = ((packed_6 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 w_15 = ((packed_7 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              f32x8 s_2 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((planes_2 + (block__2 * 16LL)) + (parts_1 * 8LL)))));
              f32x8 value_11 = s_2;
              f32x8 value_12 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((planes_3 + (block__2 * 16LL)) + (parts_1 * 8LL)))));
              f32x8 s_3 = value_11;
              f32x8 o_1 = value_12;
              f32x8 unit_1 = s_3;
              f32x8 scales_2 = unit_1;
              f32x8 scales_3 = o_1;
              const int32_t * q_3 = ((const int32_t *)(a_6 + (block__2 * 32LL)));
              const int32_t * q_4 = ((const int32_t *)(a_7 + (block__2 * 32LL)));
              const int32_t * q_5 = ((const int32_t *)(a_8 + (block__2 * 32LL)));
              const int32_t * q_6 = ((const int32_t *)(a_9 + (block__2 * 32LL)));
              i32x8 totals_2 = zse_splat_i32x8(0);
              i32x8 totals_3 = zse_splat_i32x8(0);
              i32x8 totals_4 = zse_splat_i32x8(0);
              i32x8 totals_5 = zse_splat_i32x8(0);
              i32x8 sums_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)zse_splat_i32x8((*q_3))));
              i32x8 sums_3 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)zse_splat_i32x8((*q_4))));
              i32x8 sums_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)zse_splat_i32x8((*q_5))));
              i32x8 sums_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)zse_splat_i32x8((*q_6))));
              sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)zse_splat_i32x8((*(q_3 + 1LL))))));
              sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)zse_splat_i32x8((*(q_4 + 1LL))))));
              sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)zse_splat_i32x8((*(q_5 + 1LL))))));
              sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)zse_splat_i32x8((*(q_6 + 1LL))))));
              sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)zse_splat_i32x8((*(q_3 + 2LL))))));
              sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)zse_splat_i32x8((*(q_4 + 2LL))))));
              sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)zse_splat_i32x8((*(q_5 + 2LL))))));
              sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)zse_splat_i32x8((*(q_6 + 2LL))))));
              sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)zse_splat_i32x8((*(q_3 + 3LL))))));
              sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)zse_splat_i32x8((*(q_4 + 3LL))))));
              sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)zse_splat_i32x8((*(q_5 + 3LL))))));
              sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)zse_splat_i32x8((*(q_6 + 3LL))))));
              sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)zse_splat_i32x8((*(q_3 + 4LL))))));
              sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)zse_splat_i32x8((*(q_4 + 4LL))))));
              sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)zse_splat_i32x8((*(q_5 + 4LL))))));
              sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)zse_splat_i32x8((*(q_6 + 4LL))))));
              sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)zse_splat_i32x8((*(q_3 + 5LL))))));
              sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)zse_splat_i32x8((*(q_4 + 5LL))))));
              sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)zse_splat_i32x8((*(q_5 + 5LL))))));
              sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)zse_splat_i32x8((*(q_6 + 5LL))))));
              sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)zse_splat_i32x8((*(q_3 + 6LL))))));
              sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)zse_splat_i32x8((*(q_4 + 6LL))))));
              sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)zse_splat_i32x8((*(q_5 + 6LL))))));
              sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)zse_splat_i32x8((*(q_6 + 6LL))))));
              sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)zse_splat_i32x8((*(q_3 + 7LL))))));
              sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)zse_splat_i32x8((*(q_4 + 7LL))))));
              sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)zse_splat_i32x8((*(q_5 + 7LL))))));
              sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)zse_splat_i32x8((*(q_6 + 7LL))))));
              totals_2 = (totals_2 + ((i32x8)_mm256_madd_epi16((__m256i)sums_2, _mm256_set1_epi16(1))));
              totals_3 = (totals_3 + ((i32x8)_mm256_madd_epi16((__m256i)sums_3, _mm256_set1_epi16(1))));
              totals_4 = (totals_4 + ((i32x8)_mm256_madd_epi16((__m256i)sums_4, _mm256_set1_epi16(1))));
              totals_5 = (totals_5 + ((i32x8)_mm256_madd_epi16((__m256i)sums_5, _mm256_set1_epi16(1))));
              acc_2 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_2, f32x8), (scales_2 * zse_splat_f32x8((*(a_10 + block__2)))), acc_2));
              acc_2 = ((f32x8)_mm256_fmadd_ps(scales_3, zse_splat_f32x8((*(a_14 + block__2))), acc_2));
              acc_3 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_3, f32x8), (scales_2 * zse_splat_f32x8((*(a_11 + block__2)))), acc_3));
              acc_3 = ((f32x8)_mm256_fmadd_ps(scales_3, zse_splat_f32x8((*(a_15 + block__2))), acc_3));
              acc_4 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_4, f32x8), (scales_2 * zse_splat_f32x8((*(a_12 + block__2)))), acc_4));
              acc_4 = ((f32x8)_mm256_fmadd_ps(scales_3, zse_splat_f32x8((*(a_16 + block__2))), acc_4));
              acc_5 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_5, f32x8), (scales_2 * zse_splat_f32x8((*(a_13 + block__2)))), acc_5));
              acc_5 = ((f32x8)_mm256_fmadd_ps(scales_3, zse_splat_f32x8((*(a_17 + block__2))), acc_5));
            }
            if (((token + 0LL) < token_last)) {
              float * out_3 = (out + (at_2 * rows));
              const float * bias_3 = (bias + (expert_2 * rows));
              int64_t row_10 = ((tile * 16LL) + (parts_1 * 8LL));
              f32x8 total_2 = acc_2;
              if ((has_bias != 0LL)) {
                if (((row_10 + 8LL) <= rows)) {
                  total_2 = (total_2 + (*(const f32x8_mem *)(bias_3 + row_10)));
                }
              }
              if (((row_10 + 8LL) <= rows)) {
                *(f32x8_mem *)(out_3 + row_10) = total_2;
              } else {
                float scratch_2[16] __attribute__((aligned(64)));
                float * spill_2 = scratch_2;
                *(f32x8_mem *)spill_2 = total_2;
                for (int64_t r_2 = row_10; r_2 < rows; r_2 += 1LL) {
                  if ((has_bias != 0LL)) {
                    *(out_3 + r_2) = ((*(spill_2 + (r_2 - row_10))) + (*(bias_3 + r_2)));
                  } else {
                    *(out_3 + r_2) = (*(spill_2 + (r_2 - row_10)));
                  }
                }
              }
            }
            if (((token + 1LL) < token_last)) {
              float * out_4 = (out + (at_3 * rows));
              const float * bias_4 = (bias + (expert_2 * rows));
              int64_t row_11 = ((tile * 16LL) + (parts_1 * 8LL));
              f32x8 total_3 = acc_3;
              if ((has_bias != 0LL)) {
                if (((row_11 + 8LL) <= rows)) {
                  total_3 = (total_3 + (*(const f32x8_mem *)(bias_4 + row_11)));
                }
              }
              if (((row_11 + 8LL) <= rows)) {
                *(f32x8_mem *)(out_4 + row_11) = total_3;
              } else {
                float scratch_3[16] __attribute__((aligned(64)));
                float * spill_3 = scratch_3;
                *(f32x8_mem *)spill_3 = total_3;
                for (int64_t r_3 = row_11; r_3 < rows; r_3 += 1LL) {
                  if ((has_bias != 0LL)) {
                    *(out_4 + r_3) = ((*(spill_3 + (r_3 - row_11))) + (*(bias_4 + r_3)));
                  } else {
                    *(out_4 + r_3) = (*(spill_3 + (r_3 - row_11)));
                  }
                }
              }
            }
            if (((token + 2LL) < token_last)) {
              float * out_5 = (out + (at_4 * rows));
              const float * bias_5 = (bias + (expert_2 * rows));
              int64_t row_12 = ((tile * 16LL) + (parts_1 * 8LL));
              f32x8 total_4 = acc_4;
              if ((has_bias != 0LL)) {
                if (((row_12 + 8LL) <= rows)) {
                  total_4 = (total_4 + (*(const f32x8_mem *)(bias_5 + row_12)));
                }
              }
              if (((row_12 + 8LL) <= rows)) {
                *(f32x8_mem *)(out_5 + row_12) = total_4;
              } else {
                float scratch_4[16] __attribute__((aligned(64)));
                float * spill_4 = scratch_4;
                *(f32x8_mem *)spill_4 = total_4;
                for (int64_t r_4 = row_12; r_4 < rows; r_4 += 1LL) {
                  if ((has_bias != 0LL)) {
                    *(out_5 + r_4) = ((*(spill_4 + (r_4 - row_12))) + (*(bias_5 + r_4)));
                  } else {
                    *(out_5 + r_4) = (*(spill_4 + (r_4 - row_12)));
                  }
                }
              }
            }
            if (((token + 3LL) < token_last)) {
              float * out_6 = (out + (at_5 * rows));
              const float * bias_6 = (bias + (expert_2 * rows));
              int64_t row_13 = ((tile * 16LL) + (parts_1 * 8LL));
              f32x8 total_5 = acc_5;
              if ((has_bias != 0LL)) {
                if (((row_13 + 8LL) <= rows)) {
                  total_5 = (total_5 + (*(const f32x8_mem *)(bias_6 + row_13)));
                }
              }
              if (((row_13 + 8LL) <= rows)) {
                *(f32x8_mem *)(out_6 + row_13) = total_5;
              } else {
                float scratch_5[16] __attribute__((aligned(64)));
                float * spill_5 = scratch_5;
                *(f32x8_mem *)spill_5 = total_5;
                for (int64_t r_5 = row_13; r_5 < rows; r_5 += 1LL) {
                  if ((has_bias != 0LL)) {
                    *(out_6 + r_5) = ((*(spill_5 + (r_5 - row_13))) + (*(bias_6 + r_5)));
                  } else {
                    *(out_6 + r_5) = (*(spill_5 + (r_5 - row_13)));
                  }
                }
              }
            }
          }
        }
      }
    } else {
      int64_t tile_2 = block_0;
      int64_t tile_last = (tile_2 + 1LL);
      int64_t expert_3 = 0LL;
      int64_t first__5 = (block_1 * 64LL);
      int64_t value_13 = first__5;
      int64_t value_14 = zse_minimum_i64((first__5 + 64LL), tokens);
      int64_t first__6 = value_13;
      int64_t last__3 = value_14;
      if ((experts != 0LL)) {
        const int32_t * task_2 = (tasks + (block_1 * 3LL));
        expert_3 = ((int64_t)(*task_2));
        first__6 = ((int64_t)(*(task_2 + 1LL)));
        last__3 = ((int64_t)(*(task_2 + 2LL)));
      }
      int64_t value_15 = expert_3;
      int64_t value_16 = first__6;
      int64_t value_17 = last__3;
      int64_t expert_4 = value_15;
      int64_t token_first_1 = value_16;
      int64_t token_last_1 = value_17;
      int64_t groups_1 = blocks;
      int32_t scratch_6[1024] __attribute__((aligned(64)));
      float scratch_7[256] __attribute__((aligned(64)));
      float scratch_8[256] __attribute__((aligned(64)));
      int32_t * staged = scratch_6;
      float * staged_1 = scratch_7;
      float * staged_2 = scratch_8;
      float scratch_10[1024] __attribute__((aligned(64)));
      float * acc_6 = scratch_10;
      int64_t num_blocks = 0LL;
      if ((token_first_1 < token_last_1)) {
        num_blocks = blocks;
        int64_t at_stop = ((tile_last - tile_2) * 1024LL);
        for (int64_t at_6 = 0LL; at_6 < at_stop; at_6 += 8LL) {
          *(f32x8_mem *)(acc_6 + at_6) = zse_splat_f32x8((0.0f));
        }
      }
      for (int64_t first__7 = 0LL; first__7 < num_blocks; first__7 += 8LL) {
        int64_t count = zse_minimum_i64((num_blocks - first__7), 8LL);
        for (int64_t tile_3 = tile_2; tile_3 < tile_last; tile_3 += 1LL) {
          int64_t tile_4 = ((expert_4 * ((rows + 15LL) / 16LL)) + tile_3);
          const int32_t * now = (q + ((tile_4 * blocks) * 64LL));
          const uint16_t * now_2 = (scale + ((tile_4 * groups_1) * 16LL));
          const uint16_t * now_3 = (offset + ((tile_4 * groups_1) * 16LL));
          for (int64_t i = 0LL; i < count; i += 1LL) {
            int64_t block__4 = (first__7 + i);
            i32x8 packed_8 = (*(const i32x8_mem *)(now + (block__4 * 64LL)));
            i32x8 packed_9 = (*(const i32x8_mem *)((now + (block__4 * 64LL)) + 16LL));
            i32x8 packed_10 = (*(const i32x8_mem *)((now + (block__4 * 64LL)) + 32LL));
            i32x8 packed_11 = (*(const i32x8_mem *)((now + (block__4 * 64LL)) + 48LL));
            i32x8 w_16 = (packed_8 & zse_splat_i32x8(252645135));
            i32x8 w_17 = (packed_9 & zse_splat_i32x8(252645135));
            i32x8 w_18 = (packed_10 & zse_splat_i32x8(252645135));
            i32x8 w_19 = (packed_11 & zse_splat_i32x8(252645135));
            i32x8 w_20 = ((packed_8 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_21 = ((packed_9 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_22 = ((packed_10 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_23 = ((packed_11 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            *(i32x8_mem *)(staged + (((i * 8LL) + 0LL) * 16LL)) = w_16;
            *(i32x8_mem *)(staged + (((i * 8LL) + 1LL) * 16LL)) = w_17;
            *(i32x8_mem *)(staged + (((i * 8LL) + 2LL) * 16LL)) = w_18;
            *(i32x8_mem *)(staged + (((i * 8LL) + 3LL) * 16LL)) = w_19;
            *(i32x8_mem *)(staged + (((i * 8LL) + 4LL) * 16LL)) = w_20;
            *(i32x8_mem *)(staged + (((i * 8LL) + 5LL) * 16LL)) = w_21;
            *(i32x8_mem *)(staged + (((i * 8LL) + 6LL) * 16LL)) = w_22;
            *(i32x8_mem *)(staged + (((i * 8LL) + 7LL) * 16LL)) = w_23;
            int64_t group_2 = block__4;
            f32x8 s_4 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)(now_2 + (group_2 * 16LL)))));
            f32x8 value_18 = s_4;
            f32x8 value_19 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)(now_3 + (group_2 * 16LL)))));
            f32x8 s_5 = value_18;
            f32x8 o_2 = value_19;
            f32x8 unit_2 = s_5;
            f32x8 value_20 = unit_2;
            f32x8 value_21 = o_2;
            f32x8 unit_3 = value_20;
            f32x8 offset_1 = value_21;
            *(f32x8_mem *)(staged_1 + (((i * 2LL) + 0LL) * 16LL)) = unit_3;
            *(f32x8_mem *)(staged_2 + (((i * 2LL) + 0LL) * 16LL)) = offset_1;
            i32x8 packed_12 = (*(const i32x8_mem *)((now + (block__4 * 64LL)) + 8LL));
            i32x8 packed_13 = (*(const i32x8_mem *)((now + (block__4 * 64LL)) + 24LL));
            i32x8 packed_14 = (*(const i32x8_mem *)((now + (block__4 * 64LL)) + 40LL));
            i32x8 packed_15 = (*(const i32x8_mem *)((now + (block__4 * 64LL)) + 56LL));
            i32x8 w_24 = (packed_12 & zse_splat_i32x8(252645135));
            i32x8 w_25 = (packed_13 & zse_splat_i32x8(252645135));
            i32x8 w_26 = (packed_14 & zse_splat_i32x8(252645135));
            i32x8 w_27 = (packed_15 & zse_splat_i32x8(252645135));
            i32x8 w_28 = ((packed_12 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_29 = ((packed_13 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_30 = ((packed_14 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_31 = ((packed_15 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            *(i32x8_mem *)((staged + (((i * 8LL) + 0LL) * 16LL)) + 8LL) = w_24;
            *(i32x8_mem *)((staged + (((i * 8LL) + 1LL) * 16LL)) + 8LL) = w_25;
            *(i32x8_mem *)((staged + (((i * 8LL) + 2LL) * 16LL)) + 8LL) = w_26;
            *(i32x8_mem *)((staged + (((i * 8LL) + 3LL) * 16LL)) + 8LL) = w_27;
            *(i32x8_mem *)((staged + (((i * 8LL) + 4LL) * 16LL)) + 8LL) = w_28;
            *(i32x8_mem *)((staged + (((i * 8LL) + 5LL) * 16LL)) + 8LL) = w_29;
            *(i32x8_mem *)((staged + (((i * 8LL) + 6LL) * 16LL)) + 8LL) = w_30;
            *(i32x8_mem *)((staged + (((i * 8LL) + 7LL) * 16LL)) + 8LL) = w_31;
            group_2 = block__4;
            f32x8 s_6 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((now_2 + (group_2 * 16LL)) + 8LL))));
            f32x8 value_22 = s_6;
            f32x8 value_23 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((now_3 + (group_2 * 16LL)) + 8LL))));
            f32x8 s_7 = value_22;
            f32x8 o_3 = value_23;
            f32x8 unit_4 = s_7;
            f32x8 value_24 = unit_4;
            f32x8 value_25 = o_3;
            unit_3 = value_24;
            offset_1 = value_25;
            *(f32x8_mem *)((staged_1 + (((i * 2LL) + 0LL) * 16LL)) + 8LL) = unit_3;
            *(f32x8_mem *)((staged_2 + (((i * 2LL) + 0LL) * 16LL)) + 8LL) = offset_1;
          }
          int64_t after = (tile_3 + 0LL);
          int64_t after_first = (first__7 + 16LL);
          int64_t tile_5 = ((expert_4 * ((rows + 15LL) / 16LL)) + after);
          const int32_t * planes_4 = (q + ((tile_5 * blocks) * 64LL));
          const uint16_t * planes_6 = (scale + ((tile_5 * groups_1) * 16LL));
          const uint16_t * planes_7 = (offset + ((tile_5 * groups_1) * 16LL));
          int64_t done = 0LL;
          for (int64_t token_1 = token_first_1; token_1 < token_last_1; token_1 += 4LL) {
            int64_t until = 8LL;
            if (((token_1 + 4LL) < token_last_1)) {
              until = zse_minimum_i64((done + 1LL), 8LL);
            }
            for (int64_t i_1 = done; i_1 < until; i_1 += 1LL) {
              int64_t block__5 = (after_first + i_1);
              __builtin_prefetch((planes_4 + (block__5 * 64LL)), 0, 2);
              __builtin_prefetch(((planes_4 + (block__5 * 64LL)) + 16LL), 0, 2);
              __builtin_prefetch(((planes_4 + (block__5 * 64LL)) + 32LL), 0, 2);
              __builtin_prefetch(((planes_4 + (block__5 * 64LL)) + 48LL), 0, 2);
              int64_t group_3 = block__5;
              __builtin_prefetch((planes_6 + (group_3 * 16LL)), 0, 2);
              __builtin_prefetch((planes_7 + (group_3 * 16LL)), 0, 2);
            }
            done = until;
            float * mine = (acc_6 + (((((tile_3 - tile_2) * 64LL) + token_1) - token_first_1) * 16LL));
            int64_t token_2 = zse_minimum_i64((token_1 + 0LL), (token_last_1 - 1LL));
            int64_t row_14 = (token_2 + 0LL);
            if ((experts == 2LL)) {
              row_14 = ((int64_t)(*(source + token_2)));
            }
            int64_t rows_7 = row_14;
            int64_t token_3 = zse_minimum_i64((token_1 + 1LL), (token_last_1 - 1LL));
            int64_t row_15 = (token_3 + 0LL);
            if ((experts == 2LL)) {
              row_15 = ((int64_t)(*(source + token_3)));
            }
            int64_t rows_8 = row_15;
            int64_t token_4 = zse_minimum_i64((token_1 + 2LL), (token_last_1 - 1LL));
            int64_t row_16 = (token_4 + 0LL);
            if ((experts == 2LL)) {
              row_16 = ((int64_t)(*(source + token_4)));
            }
            int64_t rows_9 = row_16;
            int64_t token_5 = zse_minimum_i64((token_1 + 3LL), (token_last_1 - 1LL));
            int64_t row_17 = (token_5 + 0LL);
            if ((experts == 2LL)) {
              row_17 = ((int64_t)(*(source + token_5)));
            }
            int64_t rows_10 = row_17;
            int64_t tokens_1 = ((rows_7 * blocks) + first__7);
            int64_t tokens_2 = ((rows_8 * blocks) + first__7);
            int64_t tokens_3 = ((rows_9 * blocks) + first__7);
            int64_t tokens_4 = ((rows_10 * blocks) + first__7);
            const int32_t * words = ((const int32_t *)(aq + (tokens_1 * 32LL)));
            const int32_t * words_1 = ((const int32_t *)(aq + (tokens_2 * 32LL)));
            const int32_t * words_2 = ((const int32_t *)(aq + (tokens_3 * 32LL)));
            const int32_t * words_3 = ((const int32_t *)(aq + (tokens_4 * 32LL)));
            const float * item_18 = (a_scale + tokens_1);
            const float * item_19 = (a_scale + tokens_2);
            const float * item_20 = (a_scale + tokens_3);
            const float * item_21 = (a_scale + tokens_4);
            const float * item_22 = (a_sum + tokens_1);
            const float * item_23 = (a_sum + tokens_2);
            const float * item_24 = (a_sum + tokens_3);
            const float * item_25 = (a_sum + tokens_4);
            const int32_t * tokens_5 = words;
            const int32_t * tokens_6 = words_1;
            const int32_t * tokens_7 = words_2;
            const int32_t * tokens_8 = words_3;
            const float * tokens_9 = item_18;
            const float * tokens_10 = item_19;
            const float * tokens_11 = item_20;
            const float * tokens_12 = item_21;
            const float * tokens_13 = item_22;
            const float * tokens_14 = item_23;
            const float * tokens_15 = item_24;
            const float * tokens_16 = item_25;
            f32x8 sums_6 = (*(const f32x8_mem *)mine);
            f32x8 sums_7 = (*(const f32x8_mem *)(mine + 16LL));
            f32x8 sums_8 = (*(const f32x8_mem *)(mine + 32LL));
            f32x8 sums_9 = (*(const f32x8_mem *)(mine + 48LL));
            f32x8 sums_10 = sums_6;
            f32x8 sums_11 = sums_7;
            f32x8 sums_12 = sums_8;
            f32x8 sums_13 = sums_9;
            f32x8 sums_14 = (*(const f32x8_mem *)(mine + 8LL));
            f32x8 sums_15 = (*(const f32x8_mem *)((mine + 16LL) + 8LL));
            f32x8 sums_16 = (*(const f32x8_mem *)((mine + 32LL) + 8LL));
            f32x8 sums_17 = (*(const f32x8_mem *)((mine + 48LL) + 8LL));
            f32x8 sums_18 = sums_14;
            f32x8 sums_19 = sums_15;
            f32x8 sums_20 = sums_16;
            f32x8 sums_21 = sums_17;
            for (int64_t i_2 = 0LL; i_2 < count; i_2 += 1LL) {
              int32_t * words_4 = (staged + ((i_2 * 8LL) * 16LL));
              int32_t * words_5 = ((staged + ((i_2 * 8LL) * 16LL)) + 8LL);
              const int32_t * rows_11 = (tokens_5 + (i_2 * 8LL));
              const int32_t * rows_12 = (tokens_6 + (i_2 * 8LL));
              const int32_t * rows_13 = (tokens_7 + (i_2 * 8LL));
              const int32_t * rows_14 = (tokens_8 + (i_2 * 8LL));
              i32x8 totals_6 = zse_splat_i32x8(0);
              i32x8 totals_7 = zse_splat_i32x8(0);
              i32x8 totals_8 = zse_splat_i32x8(0);
              i32x8 totals_9 = zse_splat_i32x8(0);
              i32x8 totals_10 = totals_6;
              i32x8 totals_11 = totals_7;
              i32x8 totals_12 = totals_8;
              i32x8 totals_13 = totals_9;
              i32x8 totals_14 = zse_splat_i32x8(0);
              i32x8 totals_15 = zse_splat_i32x8(0);
              i32x8 totals_16 = zse_splat_i32x8(0);
              i32x8 totals_17 = zse_splat_i32x8(0);
              i32x8 totals_18 = totals_14;
              i32x8 totals_19 = totals_15;
              i32x8 totals_20 = totals_16;
              i32x8 totals_21 = totals_17;
              i32x8 sums_22 = zse_splat_i32x8(0);
              i32x8 sums_23 = zse_splat_i32x8(0);
              i32x8 sums_24 = zse_splat_i32x8(0);
              i32x8 sums_25 = zse_splat_i32x8(0);
              i32x8 sums_26 = sums_22;
              i32x8 sums_27 = sums_23;
              i32x8 sums_28 = sums_24;
              i32x8 sums_29 = sums_25;
              i32x8 sums_30 = zse_splat_i32x8(0);
              i32x8 sums_31 = zse_splat_i32x8(0);
              i32x8 sums_32 = zse_splat_i32x8(0);
              i32x8 sums_33 = zse_splat_i32x8(0);
              i32x8 sums_34 = sums_30;
              i32x8 sums_35 = sums_31;
              i32x8 sums_36 = sums_32;
              i32x8 sums_37 = sums_33;
              i32x8 w_32 = (*(const i32x8_mem *)words_4);
              i32x8 w_33 = (*(const i32x8_mem *)words_5);
              i32x8 value_26 = zse_splat_i32x8((*rows_11));
              i32x8 pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_32, (__m256i)value_26));
              sums_26 = pairs;
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_33, (__m256i)value_26));
              sums_34 = pairs;
              value_26 = zse_splat_i32x8((*rows_12));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_32, (__m256i)value_26));
              sums_27 = pairs;
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_33, (__m256i)value_26));
              sums_35 = pairs;
              value_26 = zse_splat_i32x8((*rows_13));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_32, (__m256i)value_26));
              sums_28 = pairs;
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_33, (__m256i)value_26));
              sums_36 = pairs;
              value_26 = zse_splat_i32x8((*rows_14));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_32, (__m256i)value_26));
              sums_29 = pairs;
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_33, (__m256i)value_26));
              sums_37 = pairs;
              i32x8 w_34 = (*(const i32x8_mem *)(words_4 + 16LL));
              i32x8 w_35 = (*(const i32x8_mem *)(words_5 + 16LL));
              value_26 = zse_splat_i32x8((*(rows_11 + 1LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_34, (__m256i)value_26));
              sums_26 = zse_add_i16_i32x8(sums_26, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_35, (__m256i)value_26));
              sums_34 = zse_add_i16_i32x8(sums_34, pairs);
              value_26 = zse_splat_i32x8((*(rows_12 + 1LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_34, (__m256i)value_26));
              sums_27 = zse_add_i16_i32x8(sums_27, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_35, (__m256i)value_26));
              sums_35 = zse_add_i16_i32x8(sums_35, pairs);
              value_26 = zse_splat_i32x8((*(rows_13 + 1LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_34, (__m256i)value_26));
              sums_28 = zse_add_i16_i32x8(sums_28, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_35, (__m256i)value_26));
              sums_36 = zse_add_i16_i32x8(sums_36, pairs);
              value_26 = zse_splat_i32x8((*(rows_14 + 1LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_34, (__m256i)value_26));
              sums_29 = zse_add_i16_i32x8(sums_29, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_35, (__m256i)value_26));
              sums_37 = zse_add_i16_i32x8(sums_37, pairs);
              i32x8 w_36 = (*(const i32x8_mem *)(words_4 + 32LL));
              i32x8 w_37 = (*(const i32x8_mem *)(words_5 + 32LL));
              value_26 = zse_splat_i32x8((*(rows_11 + 2LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_36, (__m256i)value_26));
              sums_26 = zse_add_i16_i32x8(sums_26, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_37, (__m256i)value_26));
              sums_34 = zse_add_i16_i32x8(sums_34, pairs);
              value_26 = zse_splat_i32x8((*(rows_12 + 2LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_36, (__m256i)value_26));
              sums_27 = zse_add_i16_i32x8(sums_27, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_37, (__m256i)value_26));
              sums_35 = zse_add_i16_i32x8(sums_35, pairs);
              value_26 = zse_splat_i32x8((*(rows_13 + 2LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_36, (__m256i)value_26));
              sums_28 = zse_add_i16_i32x8(sums_28, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_37, (__m256i)value_26));
              sums_36 = zse_add_i16_i32x8(sums_36, pairs);
              value_26 = zse_splat_i32x8((*(rows_14 + 2LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_36, (__m256i)value_26));
              sums_29 = zse_add_i16_i32x8(sums_29, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_37, (__m256i)value_26));
              sums_37 = zse_add_i16_i32x8(sums_37, pairs);
              i32x8 w_38 = (*(const i32x8_mem *)(words_4 + 48LL));
              i32x8 w_39 = (*(const i32x8_mem *)(words_5 + 48LL));
              value_26 = zse_splat_i32x8((*(rows_11 + 3LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_38, (__m256i)value_26));
              sums_26 = zse_add_i16_i32x8(sums_26, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_39, (__m256i)value_26));
              sums_34 = zse_add_i16_i32x8(sums_34, pairs);
              value_26 = zse_splat_i32x8((*(rows_12 + 3LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_38, (__m256i)value_26));
              sums_27 = zse_add_i16_i32x8(sums_27, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_39, (__m256i)value_26));
              sums_35 = zse_add_i16_i32x8(sums_35, pairs);
              value_26 = zse_splat_i32x8((*(rows_13 + 3LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_38, (__m256i)value_26));
              sums_28 = zse_add_i16_i32x8(sums_28, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_39, (__m256i)value_26));
              sums_36 = zse_add_i16_i32x8(sums_36, pairs);
              value_26 = zse_splat_i32x8((*(rows_14 + 3LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_38, (__m256i)value_26));
              sums_29 = zse_add_i16_i32x8(sums_29, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_39, (__m256i)value_26));
              sums_37 = zse_add_i16_i32x8(sums_37, pairs);
              i32x8 w_40 = (*(const i32x8_mem *)(words_4 + 64LL));
              i32x8 w_41 = (*(const i32x8_mem *)(words_5 + 64LL));
              value_26 = zse_splat_i32x8((*(rows_11 + 4LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_40, (__m256i)value_26));
              sums_26 = zse_add_i16_i32x8(sums_26, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_41, (__m256i)value_26));
              sums_34 = zse_add_i16_i32x8(sums_34, pairs);
              value_26 = zse_splat_i32x8((*(rows_12 + 4LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_40, (__m256i)value_26));
              sums_27 = zse_add_i16_i32x8(sums_27, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_41, (__m256i)value_26));
              sums_35 = zse_add_i16_i32x8(sums_35, pairs);
              value_26 = zse_splat_i32x8((*(rows_13 + 4LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_40, (__m256i)value_26));
              sums_28 = zse_add_i16_i32x8(sums_28, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_41, (__m256i)value_26));
              sums_36 = zse_add_i16_i32x8(sums_36, pairs);
              value_26 = zse_splat_i32x8((*(rows_14 + 4LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_40, (__m256i)value_26));
              sums_29 = zse_add_i16_i32x8(sums_29, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_41, (__m256i)value_26));
              sums_37 = zse_add_i16_i32x8(sums_37, pairs);
              i32x8 w_42 = (*(const i32x8_mem *)(words_4 + 80LL));
              i32x8 w_43 = (*(const i32x8_mem *)(words_5 + 80LL));
              value_26 = zse_splat_i32x8((*(rows_11 + 5LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_42, (__m256i)value_26));
              sums_26 = zse_add_i16_i32x8(sums_26, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_43, (__m256i)value_26));
              sums_34 = zse_add_i16_i32x8(sums_34, pairs);
              value_26 = zse_splat_i32x8((*(rows_12 + 5LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_42, (__m256i)value_26));
              sums_27 = zse_add_i16_i32x8(sums_27, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_43, (__m256i)value_26));
              sums_35 = zse_add_i16_i32x8(sums_35, pairs);
              value_26 = zse_splat_i32x8((*(rows_13 + 5LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_42, (__m256i)value_26));
              sums_28 = zse_add_i16_i32x8(sums_28, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_43, (__m256i)value_26));
              sums_36 = zse_add_i16_i32x8(sums_36, pairs);
              value_26 = zse_splat_i32x8((*(rows_14 + 5LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_42, (__m256i)value_26));
              sums_29 = zse_add_i16_i32x8(sums_29, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_43, (__m256i)value_26));
              sums_37 = zse_add_i16_i32x8(sums_37, pairs);
              i32x8 w_44 = (*(const i32x8_mem *)(words_4 + 96LL));
              i32x8 w_45 = (*(const i32x8_mem *)(words_5 + 96LL));
              value_26 = zse_splat_i32x8((*(rows_11 + 6LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_44, (__m256i)value_26));
              sums_26 = zse_add_i16_i32x8(sums_26, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_45, (__m256i)value_26));
              sums_34 = zse_add_i16_i32x8(sums_34, pairs);
              value_26 = zse_splat_i32x8((*(rows_12 + 6LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_44, (__m256i)value_26));
              sums_27 = zse_add_i16_i32x8(sums_27, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_45, (__m256i)value_26));
              sums_35 = zse_add_i16_i32x8(sums_35, pairs);
              value_26 = zse_splat_i32x8((*(rows_13 + 6LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_44, (__m256i)value_26));
              sums_28 = zse_add_i16_i32x8(sums_28, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_45, (__m256i)value_26));
              sums_36 = zse_add_i16_i32x8(sums_36, pairs);
              value_26 = zse_splat_i32x8((*(rows_14 + 6LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_44, (__m256i)value_26));
              sums_29 = zse_add_i16_i32x8(sums_29, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_45, (__m256i)value_26));
              sums_37 = zse_add_i16_i32x8(sums_37, pairs);
              i32x8 w_46 = (*(const i32x8_mem *)(words_4 + 112LL));
              i32x8 w_47 = (*(const i32x8_mem *)(words_5 + 112LL));
              value_26 = zse_splat_i32x8((*(rows_11 + 7LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_46, (__m256i)value_26));
              sums_26 = zse_add_i16_i32x8(sums_26, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_47, (__m256i)value_26));
              sums_34 = zse_add_i16_i32x8(sums_34, pairs);
              value_26 = zse_splat_i32x8((*(rows_12 + 7LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_46, (__m256i)value_26));
              sums_27 = zse_add_i16_i32x8(sums_27, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_47, (__m256i)value_26));
              sums_35 = zse_add_i16_i32x8(sums_35, pairs);
              value_26 = zse_splat_i32x8((*(rows_13 + 7LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_46, (__m256i)value_26));
              sums_28 = zse_add_i16_i32x8(sums_28, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_47, (__m256i)value_26));
              sums_36 = zse_add_i16_i32x8(sums_36, pairs);
              value_26 = zse_splat_i32x8((*(rows_14 + 7LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_46, (__m256i)value_26));
              sums_29 = zse_add_i16_i32x8(sums_29, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_47, (__m256i)value_26));
              sums_37 = zse_add_i16_i32x8(sums_37, pairs);
              totals_10 = (totals_10 + ((i32x8)_mm256_madd_epi16((__m256i)sums_26, _mm256_set1_epi16(1))));
              totals_18 = (totals_18 + ((i32x8)_mm256_madd_epi16((__m256i)sums_34, _mm256_set1_epi16(1))));
              totals_11 = (totals_11 + ((i32x8)_mm256_madd_epi16((__m256i)sums_27, _mm256_set1_epi16(1))));
              totals_19 = (totals_19 + ((i32x8)_mm256_madd_epi16((__m256i)sums_35, _mm256_set1_epi16(1))));
              totals_12 = (totals_12 + ((i32x8)_mm256_madd_epi16((__m256i)sums_28, _mm256_set1_epi16(1))));
              totals_20 = (totals_20 + ((i32x8)_mm256_madd_epi16((__m256i)sums_36, _mm256_set1_epi16(1))));
              totals_13 = (totals_13 + ((i32x8)_mm256_madd_epi16((__m256i)sums_29, _mm256_set1_epi16(1))));
              totals_21 = (totals_21 + ((i32x8)_mm256_madd_epi16((__m256i)sums_37, _mm256_set1_epi16(1))));
              f32x8 scale_1 = (*(const f32x8_mem *)(staged_1 + (((2LL * i_2) + 0LL) * 16LL)));
              f32x8 unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_9 + i_2))));
              sums_10 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_10, f32x8), unit_5, sums_10));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_10 + i_2))));
              sums_11 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_11, f32x8), unit_5, sums_11));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_11 + i_2))));
              sums_12 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_12, f32x8), unit_5, sums_12));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_12 + i_2))));
              sums_13 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_13, f32x8), unit_5, sums_13));
              scale_1 = (*(const f32x8_mem *)((staged_1 + (((2LL * i_2) + 0LL) * 16LL)) + 8LL));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_9 + i_2))));
              sums_18 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_18, f32x8), unit_5, sums_18));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_10 + i_2))));
              sums_19 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_19, f32x8), unit_5, sums_19));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_11 + i_2))));
              sums_20 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_20, f32x8), unit_5, sums_20));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_12 + i_2))));
              sums_21 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_21, f32x8), unit_5, sums_21));
              f32x8 offset_2 = (*(const f32x8_mem *)(staged_2 + (((2LL * i_2) + 0LL) * 16LL)));
              float total_6 = (*(tokens_13 + i_2));
              sums_10 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total_6), sums_10));
              total_6 = (*(tokens_14 + i_2));
              sums_11 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total_6), sums_11));
              total_6 = (*(tokens_15 + i_2));
              sums_12 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total_6), sums_12));
              total_6 = (*(tokens_16 + i_2));
              sums_13 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total_6), sums_13));
              offset_2 = (*(const f32x8_mem *)((staged_2 + (((2LL * i_2) + 0LL) * 16LL)) + 8LL));
              total_6 = (*(tokens_13 + i_2));
              sums_18 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total_6), sums_18));
              total_6 = (*(tokens_14 + i_2));
              sums_19 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total_6), sums_19));
              total_6 = (*(tokens_15 + i_2));
              sums_20 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total_6), sums_20));
              total_6 = (*(tokens_16 + i_2));
              sums_21 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total_6), sums_21));
            }
            *(f32x8_mem *)mine = sums_10;
            *(f32x8_mem *)(mine + 16LL) = sums_11;
            *(f32x8_mem *)(mine + 32LL) = sums_12;
            *(f32x8_mem *)(mine + 48LL) = sums_13;
            *(f32x8_mem *)(mine + 8LL) = sums_18;
            *(f32x8_mem *)((mine + 16LL) + 8LL) = sums_19;
            *(f32x8_mem *)((mine + 32LL) + 8LL) = sums_20;
            *(f32x8_mem *)((mine + 48LL) + 8LL) = sums_21;
            if (((first__7 + 8LL) >= num_blocks)) {
              int64_t at_stop_1 = zse_minimum_i64((token_1 + 4LL), token_last_1);
              for (int64_t at_7 = token_1; at_7 < at_stop_1; at_7 += 1LL) {
                f32x8 total_7 = (*(const f32x8_mem *)(mine + ((at_7 - token_1) * 16LL)));
                float * out_7 = (out + (at_7 * rows));
                const float * bias_7 = (bias + (expert_4 * rows));
                int64_t row_18 = ((tile_3 * 16LL) + 0LL);
                f32x8 total_8 = total_7;
                if ((has_bias != 0LL)) {
                  if (((row_18 + 8LL) <= rows)) {
                    total_8 = (total_8 + (*(const f32x8_mem *)(bias_7 + row_18)));
                  }
                }
                if (((row_18 + 8LL) <= rows)) {
                  *(f32x8_mem *)(out_7 + row_18) = total_8;
                } else {
                  float scratch_11[16] __attribute__((aligned(64)));
                  float * spill_6 = scratch_11;
                  *(f32x8_mem *)spill_6 = total_8;
                  for (int64_t r_6 = row_18; r_6 < rows; r_6 += 1LL) {
                    if ((has_bias != 0LL)) {
                      *(out_7 + r_6) = ((*(spill_6 + (r_6 - row_18))) + (*(bias_7 + r_6)));
                    } else {
                      *(out_7 + r_6) = (*(spill_6 + (r_6 - row_18)));
                    }
                  }
                }
                total_7 = (*(const f32x8_mem *)((mine + ((at_7 - token_1) * 16LL)) + 8LL));
                float * out_8 = (out + (at_7 * rows));
                const float * bias_8 = (bias + (expert_4 * rows));
                int64_t row_19 = ((tile_3 * 16LL) + 8LL);
                f32x8 total_9 = total_7;
                if ((has_bias != 0LL)) {
                  if (((row_19 + 8LL) <= rows)) {
                    total_9 = (total_9 + (*(const f32x8_mem *)(bias_8 + row_19)));
                  }
                }
                if (((row_19 + 8LL) <= rows)) {
                  *(f32x8_mem *)(out_8 + row_19) = total_9;
                } else {
                  float scratch_12[16] __attribute__((aligned(64)));
                  float * spill_7 = scratch_12;
                  *(f32x8_mem *)spill_7 = total_9;
                  for (int64_t r_7 = row_19; r_7 < rows; r_7 += 1LL) {
                    if ((has_bias != 0LL)) {
                      *(out_8 + r_7) = ((*(spill_7 + (r_7 - row_19))) + (*(bias_8 + r_7)));
                    } else {
                      *(out_8 + r_7) = (*(spill_7 + (r_7 - row_19)));
                    }
                  }
                }
              }
            }
          }
        }
      }
    }
  }
}
