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
    int64_t tile = block_0;
    int64_t expert = 0LL;
    int64_t first_ = (block_1 * 64LL);
    int64_t value = first_;
    int64_t value_1 = zse_minimum_i64((first_ + 64LL), tokens);
    int64_t first__1 = value;
    int64_t last_ = value_1;
    if ((experts != 0LL)) {
      const int32_t * task = (tasks + (block_1 * 3LL));
      expert = ((int64_t)(*task));
      first__1 = ((int64_t)(*(task + 1LL)));
      last_ = ((int64_t)(*(task + 2LL)));
    }
    int64_t value_2 = expert;
    int64_t value_3 = first__1;
    int64_t value_4 = last_;
    int64_t expert_1 = value_2;
    int64_t token_first = value_3;
    int64_t token_last = value_4;
    int64_t groups = blocks;
    int64_t tile_1 = ((expert_1 * ((rows + 15LL) / 16LL)) + tile);
    const int32_t * planes = (q + ((tile_1 * blocks) * 64LL));
    const uint16_t * planes_2 = (scale + ((tile_1 * groups) * 16LL));
    const uint16_t * planes_3 = (offset + ((tile_1 * groups) * 16LL));
    for (int64_t first_part = 0LL; first_part < 2LL; first_part += 1LL) {
      for (int64_t token = token_first; token < token_last; token += 8LL) {
        if (((token_last - token) <= 4LL)) {
          int64_t parts = (first_part + 0LL);
          int64_t at = zse_minimum_i64((token + 0LL), (token_last - 1LL));
          int64_t at_1 = zse_minimum_i64((token + 1LL), (token_last - 1LL));
          int64_t at_2 = zse_minimum_i64((token + 2LL), (token_last - 1LL));
          int64_t at_3 = zse_minimum_i64((token + 3LL), (token_last - 1LL));
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
          int64_t row_2 = (at_2 + 0LL);
          if ((experts == 2LL)) {
            row_2 = ((int64_t)(*(source + at_2)));
          }
          int64_t rows_3 = row_2;
          int64_t row_3 = (at_3 + 0LL);
          if ((experts == 2LL)) {
            row_3 = ((int64_t)(*(source + at_3)));
          }
          int64_t rows_4 = row_3;
          const int8_t * item = (aq + (rows_1 * (blocks * 32LL)));
          const int8_t * item_1 = (aq + (rows_2 * (blocks * 32LL)));
          const int8_t * item_2 = (aq + (rows_3 * (blocks * 32LL)));
          const int8_t * item_3 = (aq + (rows_4 * (blocks * 32LL)));
          const float * item_4 = (a_scale + (rows_1 * blocks));
          const float * item_5 = (a_scale + (rows_2 * blocks));
          const float * item_6 = (a_scale + (rows_3 * blocks));
          const float * item_7 = (a_scale + (rows_4 * blocks));
          const float * item_8 = (a_sum + (rows_1 * blocks));
          const float * item_9 = (a_sum + (rows_2 * blocks));
          const float * item_10 = (a_sum + (rows_3 * blocks));
          const float * item_11 = (a_sum + (rows_4 * blocks));
          const int8_t * a = item;
          const int8_t * a_1 = item_1;
          const int8_t * a_2 = item_2;
          const int8_t * a_3 = item_3;
          const float * a_4 = item_4;
          const float * a_5 = item_5;
          const float * a_6 = item_6;
          const float * a_7 = item_7;
          const float * a_8 = item_8;
          const float * a_9 = item_9;
          const float * a_10 = item_10;
          const float * a_11 = item_11;
          f32x8 acc = zse_splat_f32x8((0.0f));
          f32x8 acc_1 = zse_splat_f32x8((0.0f));
          f32x8 acc_2 = zse_splat_f32x8((0.0f));
          f32x8 acc_3 = zse_splat_f32x8((0.0f));
          for (int64_t block_ = 0LL; block_ < blocks; block_ += 1LL) {
            int64_t block__1 = (block_ + 16LL);
            __builtin_prefetch((planes + (block__1 * 64LL)), 0, 2);
            __builtin_prefetch(((planes + (block__1 * 64LL)) + 16LL), 0, 2);
            __builtin_prefetch(((planes + (block__1 * 64LL)) + 32LL), 0, 2);
            __builtin_prefetch(((planes + (block__1 * 64LL)) + 48LL), 0, 2);
            int64_t group = block__1;
            __builtin_prefetch((planes_2 + (group * 16LL)), 0, 2);
            __builtin_prefetch((planes_3 + (group * 16LL)), 0, 2);
            int64_t row_4 = (parts * 8LL);
            i32x8 packed = (*(const i32x8_mem *)((planes + (block_ * 64LL)) + (0LL + row_4)));
            i32x8 packed_1 = (*(const i32x8_mem *)((planes + (block_ * 64LL)) + (16LL + row_4)));
            i32x8 packed_2 = (*(const i32x8_mem *)((planes + (block_ * 64LL)) + (32LL + row_4)));
            i32x8 packed_3 = (*(const i32x8_mem *)((planes + (block_ * 64LL)) + (48LL + row_4)));
            i32x8 w = (packed & zse_splat_i32x8(252645135));
            i32x8 w_1 = (packed_1 & zse_splat_i32x8(252645135));
            i32x8 w_2 = (packed_2 & zse_splat_i32x8(252645135));
            i32x8 w_3 = (packed_3 & zse_splat_i32x8(252645135));
            i32x8 w_4 = ((packed >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_5 = ((packed_1 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_6 = ((packed_2 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_7 = ((packed_3 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            f32x8 s = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((planes_2 + (block_ * 16LL)) + (parts * 8LL)))));
            f32x8 value_5 = s;
            f32x8 value_6 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((planes_3 + (block_ * 16LL)) + (parts * 8LL)))));
            f32x8 s_1 = value_5;
            f32x8 o = value_6;
            f32x8 unit = s_1;
            f32x8 scales = unit;
            f32x8 scales_1 = o;
            const int32_t * q_1 = ((const int32_t *)(a + (block_ * 32LL)));
            const int32_t * q_2 = ((const int32_t *)(a_1 + (block_ * 32LL)));
            const int32_t * q_3 = ((const int32_t *)(a_2 + (block_ * 32LL)));
            const int32_t * q_4 = ((const int32_t *)(a_3 + (block_ * 32LL)));
            i32x8 totals = zse_splat_i32x8(0);
            i32x8 totals_1 = zse_splat_i32x8(0);
            i32x8 totals_2 = zse_splat_i32x8(0);
            i32x8 totals_3 = zse_splat_i32x8(0);
            i32x8 sums = ((i32x8)_mm256_maddubs_epi16((__m256i)w, (__m256i)zse_splat_i32x8((*q_1))));
            i32x8 sums_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w, (__m256i)zse_splat_i32x8((*q_2))));
            i32x8 sums_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w, (__m256i)zse_splat_i32x8((*q_3))));
            i32x8 sums_3 = ((i32x8)_mm256_maddubs_epi16((__m256i)w, (__m256i)zse_splat_i32x8((*q_4))));
            sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_1, (__m256i)zse_splat_i32x8((*(q_1 + 1LL))))));
            sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_1, (__m256i)zse_splat_i32x8((*(q_2 + 1LL))))));
            sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_1, (__m256i)zse_splat_i32x8((*(q_3 + 1LL))))));
            sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_1, (__m256i)zse_splat_i32x8((*(q_4 + 1LL))))));
            sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_2, (__m256i)zse_splat_i32x8((*(q_1 + 2LL))))));
            sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_2, (__m256i)zse_splat_i32x8((*(q_2 + 2LL))))));
            sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_2, (__m256i)zse_splat_i32x8((*(q_3 + 2LL))))));
            sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_2, (__m256i)zse_splat_i32x8((*(q_4 + 2LL))))));
            sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_3, (__m256i)zse_splat_i32x8((*(q_1 + 3LL))))));
            sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_3, (__m256i)zse_splat_i32x8((*(q_2 + 3LL))))));
            sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_3, (__m256i)zse_splat_i32x8((*(q_3 + 3LL))))));
            sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_3, (__m256i)zse_splat_i32x8((*(q_4 + 3LL))))));
            sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_4, (__m256i)zse_splat_i32x8((*(q_1 + 4LL))))));
            sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_4, (__m256i)zse_splat_i32x8((*(q_2 + 4LL))))));
            sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_4, (__m256i)zse_splat_i32x8((*(q_3 + 4LL))))));
            sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_4, (__m256i)zse_splat_i32x8((*(q_4 + 4LL))))));
            sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_5, (__m256i)zse_splat_i32x8((*(q_1 + 5LL))))));
            sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_5, (__m256i)zse_splat_i32x8((*(q_2 + 5LL))))));
            sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_5, (__m256i)zse_splat_i32x8((*(q_3 + 5LL))))));
            sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_5, (__m256i)zse_splat_i32x8((*(q_4 + 5LL))))));
            sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_6, (__m256i)zse_splat_i32x8((*(q_1 + 6LL))))));
            sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_6, (__m256i)zse_splat_i32x8((*(q_2 + 6LL))))));
            sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_6, (__m256i)zse_splat_i32x8((*(q_3 + 6LL))))));
            sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_6, (__m256i)zse_splat_i32x8((*(q_4 + 6LL))))));
            sums = zse_add_i16_i32x8(sums, ((i32x8)_mm256_maddubs_epi16((__m256i)w_7, (__m256i)zse_splat_i32x8((*(q_1 + 7LL))))));
            sums_1 = zse_add_i16_i32x8(sums_1, ((i32x8)_mm256_maddubs_epi16((__m256i)w_7, (__m256i)zse_splat_i32x8((*(q_2 + 7LL))))));
            sums_2 = zse_add_i16_i32x8(sums_2, ((i32x8)_mm256_maddubs_epi16((__m256i)w_7, (__m256i)zse_splat_i32x8((*(q_3 + 7LL))))));
            sums_3 = zse_add_i16_i32x8(sums_3, ((i32x8)_mm256_maddubs_epi16((__m256i)w_7, (__m256i)zse_splat_i32x8((*(q_4 + 7LL))))));
            totals = (totals + ((i32x8)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1))));
            totals_1 = (totals_1 + ((i32x8)_mm256_madd_epi16((__m256i)sums_1, _mm256_set1_epi16(1))));
            totals_2 = (totals_2 + ((i32x8)_mm256_madd_epi16((__m256i)sums_2, _mm256_set1_epi16(1))));
            totals_3 = (totals_3 + ((i32x8)_mm256_madd_epi16((__m256i)sums_3, _mm256_set1_epi16(1))));
            acc = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals, f32x8), (scales * zse_splat_f32x8((*(a_4 + block_)))), acc));
            acc = ((f32x8)_mm256_fmadd_ps(scales_1, zse_splat_f32x8((*(a_8 + block_))), acc));
            acc_1 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_1, f32x8), (scales * zse_splat_f32x8((*(a_5 + block_)))), acc_1));
            acc_1 = ((f32x8)_mm256_fmadd_ps(scales_1, zse_splat_f32x8((*(a_9 + block_))), acc_1));
            acc_2 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_2, f32x8), (scales * zse_splat_f32x8((*(a_6 + block_)))), acc_2));
            acc_2 = ((f32x8)_mm256_fmadd_ps(scales_1, zse_splat_f32x8((*(a_10 + block_))), acc_2));
            acc_3 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_3, f32x8), (scales * zse_splat_f32x8((*(a_7 + block_)))), acc_3));
            acc_3 = ((f32x8)_mm256_fmadd_ps(scales_1, zse_splat_f32x8((*(a_11 + block_))), acc_3));
          }
          if (((token + 0LL) < token_last)) {
            float * out_1 = (out + (at * rows));
            const float * bias_1 = (bias + (expert_1 * rows));
            int64_t row_5 = ((tile * 16LL) + (parts * 8LL));
            f32x8 total = acc;
            if ((has_bias != 0LL)) {
              if (((row_5 + 8LL) <= rows)) {
                total = (total + (*(const f32x8_mem *)(bias_1 + row_5)));
              }
            }
            if (((row_5 + 8LL) <= rows)) {
              *(f32x8_mem *)(out_1 + row_5) = total;
            } else {
              float scratch[16] __attribute__((aligned(64)));
              float * spill = scratch;
              *(f32x8_mem *)spill = total;
              for (int64_t r = row_5; r < rows; r += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_1 + r) = ((*(spill + (r - row_5))) + (*(bias_1 + r)));
                } else {
                  *(out_1 + r) = (*(spill + (r - row_5)));
                }
              }
            }
          }
          if (((token + 1LL) < token_last)) {
            float * out_2 = (out + (at_1 * rows));
            const float * bias_2 = (bias + (expert_1 * rows));
            int64_t row_6 = ((tile * 16LL) + (parts * 8LL));
            f32x8 total_1 = acc_1;
            if ((has_bias != 0LL)) {
              if (((row_6 + 8LL) <= rows)) {
                total_1 = (total_1 + (*(const f32x8_mem *)(bias_2 + row_6)));
              }
            }
            if (((row_6 + 8LL) <= rows)) {
              *(f32x8_mem *)(out_2 + row_6) = total_1;
            } else {
              float scratch_1[16] __attribute__((aligned(64)));
              float * spill_1 = scratch_1;
              *(f32x8_mem *)spill_1 = total_1;
              for (int64_t r_1 = row_6; r_1 < rows; r_1 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_2 + r_1) = ((*(spill_1 + (r_1 - row_6))) + (*(bias_2 + r_1)));
                } else {
                  *(out_2 + r_1) = (*(spill_1 + (r_1 - row_6)));
                }
              }
            }
          }
          if (((token + 2LL) < token_last)) {
            float * out_3 = (out + (at_2 * rows));
            const float * bias_3 = (bias + (expert_1 * rows));
            int64_t row_7 = ((tile * 16LL) + (parts * 8LL));
            f32x8 total_2 = acc_2;
            if ((has_bias != 0LL)) {
              if (((row_7 + 8LL) <= rows)) {
                total_2 = (total_2 + (*(const f32x8_mem *)(bias_3 + row_7)));
              }
            }
            if (((row_7 + 8LL) <= rows)) {
              *(f32x8_mem *)(out_3 + row_7) = total_2;
            } else {
              float scratch_2[16] __attribute__((aligned(64)));
              float * spill_2 = scratch_2;
              *(f32x8_mem *)spill_2 = total_2;
              for (int64_t r_2 = row_7; r_2 < rows; r_2 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_3 + r_2) = ((*(spill_2 + (r_2 - row_7))) + (*(bias_3 + r_2)));
                } else {
                  *(out_3 + r_2) = (*(spill_2 + (r_2 - row_7)));
                }
              }
            }
          }
          if (((token + 3LL) < token_last)) {
            float * out_4 = (out + (at_3 * rows));
            const float * bias_4 = (bias + (expert_1 * rows));
            int64_t row_8 = ((tile * 16LL) + (parts * 8LL));
            f32x8 total_3 = acc_3;
            if ((has_bias != 0LL)) {
              if (((row_8 + 8LL) <= rows)) {
                total_3 = (total_3 + (*(const f32x8_mem *)(bias_4 + row_8)));
              }
            }
            if (((row_8 + 8LL) <= rows)) {
              *(f32x8_mem *)(out_4 + row_8) = total_3;
            } else {
              float scratch_3[16] __attribute__((aligned(64)));
              float * spill_3 = scratch_3;
              *(f32x8_mem *)spill_3 = total_3;
              for (int64_t r_3 = row_8; r_3 < rows; r_3 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_4 + r_3) = ((*(spill_3 + (r_3 - row_8))) + (*(bias_4 + r_3)));
                } else {
                  *(out_4 + r_3) = (*(spill_3 + (r_3 - row_8)));
                }
              }
            }
          }
        } else {
          int64_t parts_1 = (first_part + 0LL);
          int64_t at_4 = zse_minimum_i64((token + 0LL), (token_last - 1LL));
          int64_t at_5 = zse_minimum_i64((token + 1LL), (token_last - 1LL));
          int64_t at_6 = zse_minimum_i64((token + 2LL), (token_last - 1LL));
          int64_t at_7 = zse_minimum_i64((token + 3LL), (token_last - 1LL));
          int64_t at_8 = zse_minimum_i64((token + 4LL), (token_last - 1LL));
          int64_t at_9 = zse_minimum_i64((token + 5LL), (token_last - 1LL));
          int64_t at_10 = zse_minimum_i64((token + 6LL), (token_last - 1LL));
          int64_t at_11 = zse_minimum_i64((token + 7LL), (token_last - 1LL));
          int64_t row_9 = (at_4 + 0LL);
          if ((experts == 2LL)) {
            row_9 = ((int64_t)(*(source + at_4)));
          }
          int64_t rows_5 = row_9;
          int64_t row_10 = (at_5 + 0LL);
          if ((experts == 2LL)) {
            row_10 = ((int64_t)(*(source + at_5)));
          }
          int64_t rows_6 = row_10;
          int64_t row_11 = (at_6 + 0LL);
          if ((experts == 2LL)) {
            row_11 = ((int64_t)(*(source + at_6)));
          }
          int64_t rows_7 = row_11;
          int64_t row_12 = (at_7 + 0LL);
          if ((experts == 2LL)) {
            row_12 = ((int64_t)(*(source + at_7)));
          }
          int64_t rows_8 = row_12;
          int64_t row_13 = (at_8 + 0LL);
          if ((experts == 2LL)) {
            row_13 = ((int64_t)(*(source + at_8)));
          }
          int64_t rows_9 = row_13;
          int64_t row_14 = (at_9 + 0LL);
          if ((experts == 2LL)) {
            row_14 = ((int64_t)(*(source + at_9)));
          }
          int64_t rows_10 = row_14;
          int64_t row_15 = (at_10 + 0LL);
          if ((experts == 2LL)) {
            row_15 = ((int64_t)(*(source + at_10)));
          }
          int64_t rows_11 = row_15;
          int64_t row_16 = (at_11 + 0LL);
          if ((experts == 2LL)) {
            row_16 = ((int64_t)(*(source + at_11)));
          }
          int64_t rows_12 = row_16;
          const int8_t * item_12 = (aq + (rows_5 * (blocks * 32LL)));
          const int8_t * item_13 = (aq + (rows_6 * (blocks * 32LL)));
          const int8_t * item_14 = (aq + (rows_7 * (blocks * 32LL)));
          const int8_t * item_15 = (aq + (rows_8 * (blocks * 32LL)));
          const int8_t * item_16 = (aq + (rows_9 * (blocks * 32LL)));
          const int8_t * item_17 = (aq + (rows_10 * (blocks * 32LL)));
          const int8_t * item_18 = (aq + (rows_11 * (blocks * 32LL)));
          const int8_t * item_19 = (aq + (rows_12 * (blocks * 32LL)));
          const float * item_20 = (a_scale + (rows_5 * blocks));
          const float * item_21 = (a_scale + (rows_6 * blocks));
          const float * item_22 = (a_scale + (rows_7 * blocks));
          const float * item_23 = (a_scale + (rows_8 * blocks));
          const float * item_24 = (a_scale + (rows_9 * blocks));
          const float * item_25 = (a_scale + (rows_10 * blocks));
          const float * item_26 = (a_scale + (rows_11 * blocks));
          const float * item_27 = (a_scale + (rows_12 * blocks));
          const float * item_28 = (a_sum + (rows_5 * blocks));
          const float * item_29 = (a_sum + (rows_6 * blocks));
          const float * item_30 = (a_sum + (rows_7 * blocks));
          const float * item_31 = (a_sum + (rows_8 * blocks));
          const float * item_32 = (a_sum + (rows_9 * blocks));
          const float * item_33 = (a_sum + (rows_10 * blocks));
          const float * item_34 = (a_sum + (rows_11 * blocks));
          const float * item_35 = (a_sum + (rows_12 * blocks));
          const int8_t * a_12 = item_12;
          const int8_t * a_13 = item_13;
          const int8_t * a_14 = item_14;
          const int8_t * a_15 = item_15;
          const int8_t * a_16 = item_16;
          const int8_t * a_17 = item_17;
          const int8_t * a_18 = item_18;
          const int8_t * a_19 = item_19;
          const float * a_20 = item_20;
          const float * a_21 = item_21;
          const float * a_22 = item_22;
          const float * a_23 = item_23;
          const float * a_24 = item_24;
          const float * a_25 = item_25;
          const float * a_26 = item_26;
          const float * a_27 = item_27;
          const float * a_28 = item_28;
          const float * a_29 = item_29;
          const float * a_30 = item_30;
          const float * a_31 = item_31;
          const float * a_32 = item_32;
          const float * a_33 = item_33;
          const float * a_34 = item_34;
          const float * a_35 = item_35;
          f32x8 acc_4 = zse_splat_f32x8((0.0f));
          f32x8 acc_5 = zse_splat_f32x8((0.0f));
          f32x8 acc_6 = zse_splat_f32x8((0.0f));
          f32x8 acc_7 = zse_splat_f32x8((0.0f));
          f32x8 acc_8 = zse_splat_f32x8((0.0f));
          f32x8 acc_9 = zse_splat_f32x8((0.0f));
          f32x8 acc_10 = zse_splat_f32x8((0.0f));
          f32x8 acc_11 = zse_splat_f32x8((0.0f));
          for (int64_t block__2 = 0LL; block__2 < blocks; block__2 += 1LL) {
            int64_t block__3 = (block__2 + 16LL);
            __builtin_prefetch((planes + (block__3 * 64LL)), 0, 2);
            __builtin_prefetch(((planes + (block__3 * 64LL)) + 16LL), 0, 2);
            __builtin_prefetch(((planes + (block__3 * 64LL)) + 32LL), 0, 2);
            __builtin_prefetch(((planes + (block__3 * 64LL)) + 48LL), 0, 2);
            int64_t group_1 = block__3;
            __builtin_prefetch((planes_2 + (group_1 * 16LL)), 0, 2);
            __builtin_prefetch((planes_3 + (group_1 * 16LL)), 0, 2);
            int64_t row_17 = (parts_1 * 8LL);
            i32x8 packed_4 = (*(const i32x8_mem *)((planes + (block__2 * 64LL)) + (0LL + row_17)));
            i32x8 packed_5 = (*(const i32x8_mem *)((planes + (block__2 * 64LL)) + (16LL + row_17)));
            i32x8 packed_6 = (*(const i32x8_mem *)((planes + (block__2 * 64LL)) + (32LL + row_17)));
            i32x8 packed_7 = (*(const i32x8_mem *)((planes + (block__2 * 64LL)) + (48LL + row_17)));
            i32x8 w_8 = (packed_4 & zse_splat_i32x8(252645135));
            i32x8 w_9 = (packed_5 & zse_splat_i32x8(252645135));
            i32x8 w_10 = (packed_6 & zse_splat_i32x8(252645135));
            i32x8 w_11 = (packed_7 & zse_splat_i32x8(252645135));
            i32x8 w_12 = ((packed_4 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_13 = ((packed_5 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_14 = ((packed_6 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_15 = ((packed_7 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            f32x8 s_2 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((planes_2 + (block__2 * 16LL)) + (parts_1 * 8LL)))));
            f32x8 value_7 = s_2;
            f32x8 value_8 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((planes_3 + (block__2 * 16LL)) + (parts_1 * 8LL)))));
            f32x8 s_3 = value_7;
            f32x8 o_1 = value_8;
            f32x8 unit_1 = s_3;
            f32x8 scales_2 = unit_1;
            f32x8 scales_3 = o_1;
            const int32_t * q_5 = ((const int32_t *)(a_12 + (block__2 * 32LL)));
            const int32_t * q_6 = ((const int32_t *)(a_13 + (block__2 * 32LL)));
            const int32_t * q_7 = ((const int32_t *)(a_14 + (block__2 * 32LL)));
            const int32_t * q_8 = ((const int32_t *)(a_15 + (block__2 * 32LL)));
            const int32_t * q_9 = ((const int32_t *)(a_16 + (block__2 * 32LL)));
            const int32_t * q_10 = ((const int32_t *)(a_17 + (block__2 * 32LL)));
            const int32_t * q_11 = ((const int32_t *)(a_18 + (block__2 * 32LL)));
            const int32_t * q_12 = ((const int32_t *)(a_19 + (block__2 * 32LL)));
            i32x8 totals_4 = zse_splat_i32x8(0);
            i32x8 totals_5 = zse_splat_i32x8(0);
            i32x8 totals_6 = zse_splat_i32x8(0);
            i32x8 totals_7 = zse_splat_i32x8(0);
            i32x8 totals_8 = zse_splat_i32x8(0);
            i32x8 totals_9 = zse_splat_i32x8(0);
            i32x8 totals_10 = zse_splat_i32x8(0);
            i32x8 totals_11 = zse_splat_i32x8(0);
            i32x8 sums_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)zse_splat_i32x8((*q_5))));
            i32x8 sums_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)zse_splat_i32x8((*q_6))));
            i32x8 sums_6 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)zse_splat_i32x8((*q_7))));
            i32x8 sums_7 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)zse_splat_i32x8((*q_8))));
            i32x8 sums_8 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)zse_splat_i32x8((*q_9))));
            i32x8 sums_9 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)zse_splat_i32x8((*q_10))));
            i32x8 sums_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)zse_splat_i32x8((*q_11))));
            i32x8 sums_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)zse_splat_i32x8((*q_12))));
            sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)zse_splat_i32x8((*(q_5 + 1LL))))));
            sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)zse_splat_i32x8((*(q_6 + 1LL))))));
            sums_6 = zse_add_i16_i32x8(sums_6, ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)zse_splat_i32x8((*(q_7 + 1LL))))));
            sums_7 = zse_add_i16_i32x8(sums_7, ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)zse_splat_i32x8((*(q_8 + 1LL))))));
            sums_8 = zse_add_i16_i32x8(sums_8, ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)zse_splat_i32x8((*(q_9 + 1LL))))));
            sums_9 = zse_add_i16_i32x8(sums_9, ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)zse_splat_i32x8((*(q_10 + 1LL))))));
            sums_10 = zse_add_i16_i32x8(sums_10, ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)zse_splat_i32x8((*(q_11 + 1LL))))));
            sums_11 = zse_add_i16_i32x8(sums_11, ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)zse_splat_i32x8((*(q_12 + 1LL))))));
            sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)zse_splat_i32x8((*(q_5 + 2LL))))));
            sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)zse_splat_i32x8((*(q_6 + 2LL))))));
            sums_6 = zse_add_i16_i32x8(sums_6, ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)zse_splat_i32x8((*(q_7 + 2LL))))));
            sums_7 = zse_add_i16_i32x8(sums_7, ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)zse_splat_i32x8((*(q_8 + 2LL))))));
            sums_8 = zse_add_i16_i32x8(sums_8, ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)zse_splat_i32x8((*(q_9 + 2LL))))));
            sums_9 = zse_add_i16_i32x8(sums_9, ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)zse_splat_i32x8((*(q_10 + 2LL))))));
            sums_10 = zse_add_i16_i32x8(sums_10, ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)zse_splat_i32x8((*(q_11 + 2LL))))));
            sums_11 = zse_add_i16_i32x8(sums_11, ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)zse_splat_i32x8((*(q_12 + 2LL))))));
            sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)zse_splat_i32x8((*(q_5 + 3LL))))));
            sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)zse_splat_i32x8((*(q_6 + 3LL))))));
            sums_6 = zse_add_i16_i32x8(sums_6, ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)zse_splat_i32x8((*(q_7 + 3LL))))));
            sums_7 = zse_add_i16_i32x8(sums_7, ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)zse_splat_i32x8((*(q_8 + 3LL))))));
            sums_8 = zse_add_i16_i32x8(sums_8, ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)zse_splat_i32x8((*(q_9 + 3LL))))));
            sums_9 = zse_add_i16_i32x8(sums_9, ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)zse_splat_i32x8((*(q_10 + 3LL))))));
            sums_10 = zse_add_i16_i32x8(sums_10, ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)zse_splat_i32x8((*(q_11 + 3LL))))));
            sums_11 = zse_add_i16_i32x8(sums_11, ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)zse_splat_i32x8((*(q_12 + 3LL))))));
            sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)zse_splat_i32x8((*(q_5 + 4LL))))));
            sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)zse_splat_i32x8((*(q_6 + 4LL))))));
            sums_6 = zse_add_i16_i32x8(sums_6, ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)zse_splat_i32x8((*(q_7 + 4LL))))));
            sums_7 = zse_add_i16_i32x8(sums_7, ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)zse_splat_i32x8((*(q_8 + 4LL))))));
            sums_8 = zse_add_i16_i32x8(sums_8, ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)zse_splat_i32x8((*(q_9 + 4LL))))));
            sums_9 = zse_add_i16_i32x8(sums_9, ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)zse_splat_i32x8((*(q_10 + 4LL))))));
            sums_10 = zse_add_i16_i32x8(sums_10, ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)zse_splat_i32x8((*(q_11 + 4LL))))));
            sums_11 = zse_add_i16_i32x8(sums_11, ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)zse_splat_i32x8((*(q_12 + 4LL))))));
            sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)zse_splat_i32x8((*(q_5 + 5LL))))));
            sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)zse_splat_i32x8((*(q_6 + 5LL))))));
            sums_6 = zse_add_i16_i32x8(sums_6, ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)zse_splat_i32x8((*(q_7 + 5LL))))));
            sums_7 = zse_add_i16_i32x8(sums_7, ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)zse_splat_i32x8((*(q_8 + 5LL))))));
            sums_8 = zse_add_i16_i32x8(sums_8, ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)zse_splat_i32x8((*(q_9 + 5LL))))));
            sums_9 = zse_add_i16_i32x8(sums_9, ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)zse_splat_i32x8((*(q_10 + 5LL))))));
            sums_10 = zse_add_i16_i32x8(sums_10, ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)zse_splat_i32x8((*(q_11 + 5LL))))));
            sums_11 = zse_add_i16_i32x8(sums_11, ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)zse_splat_i32x8((*(q_12 + 5LL))))));
            sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)zse_splat_i32x8((*(q_5 + 6LL))))));
            sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)zse_splat_i32x8((*(q_6 + 6LL))))));
            sums_6 = zse_add_i16_i32x8(sums_6, ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)zse_splat_i32x8((*(q_7 + 6LL))))));
            sums_7 = zse_add_i16_i32x8(sums_7, ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)zse_splat_i32x8((*(q_8 + 6LL))))));
            sums_8 = zse_add_i16_i32x8(sums_8, ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)zse_splat_i32x8((*(q_9 + 6LL))))));
            sums_9 = zse_add_i16_i32x8(sums_9, ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)zse_splat_i32x8((*(q_10 + 6LL))))));
            sums_10 = zse_add_i16_i32x8(sums_10, ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)zse_splat_i32x8((*(q_11 + 6LL))))));
            sums_11 = zse_add_i16_i32x8(sums_11, ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)zse_splat_i32x8((*(q_12 + 6LL))))));
            sums_4 = zse_add_i16_i32x8(sums_4, ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)zse_splat_i32x8((*(q_5 + 7LL))))));
            sums_5 = zse_add_i16_i32x8(sums_5, ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)zse_splat_i32x8((*(q_6 + 7LL))))));
            sums_6 = zse_add_i16_i32x8(sums_6, ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)zse_splat_i32x8((*(q_7 + 7LL))))));
            sums_7 = zse_add_i16_i32x8(sums_7, ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)zse_splat_i32x8((*(q_8 + 7LL))))));
            sums_8 = zse_add_i16_i32x8(sums_8, ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)zse_splat_i32x8((*(q_9 + 7LL))))));
            sums_9 = zse_add_i16_i32x8(sums_9, ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)zse_splat_i32x8((*(q_10 + 7LL))))));
            sums_10 = zse_add_i16_i32x8(sums_10, ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)zse_splat_i32x8((*(q_11 + 7LL))))));
            sums_11 = zse_add_i16_i32x8(sums_11, ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)zse_splat_i32x8((*(q_12 + 7LL))))));
            totals_4 = (totals_4 + ((i32x8)_mm256_madd_epi16((__m256i)sums_4, _mm256_set1_epi16(1))));
            totals_5 = (totals_5 + ((i32x8)_mm256_madd_epi16((__m256i)sums_5, _mm256_set1_epi16(1))));
            totals_6 = (totals_6 + ((i32x8)_mm256_madd_epi16((__m256i)sums_6, _mm256_set1_epi16(1))));
            totals_7 = (totals_7 + ((i32x8)_mm256_madd_epi16((__m256i)sums_7, _mm256_set1_epi16(1))));
            totals_8 = (totals_8 + ((i32x8)_mm256_madd_epi16((__m256i)sums_8, _mm256_set1_epi16(1))));
            totals_9 = (totals_9 + ((i32x8)_mm256_madd_epi16((__m256i)sums_9, _mm256_set1_epi16(1))));
            totals_10 = (totals_10 + ((i32x8)_mm256_madd_epi16((__m256i)sums_10, _mm256_set1_epi16(1))));
            totals_11 = (totals_11 + ((i32x8)_mm256_madd_epi16((__m256i)sums_11, _mm256_set1_epi16(1))));
            acc_4 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_4, f32x8), (scales_2 * zse_splat_f32x8((*(a_20 + block__2)))), acc_4));
            acc_4 = ((f32x8)_mm256_fmadd_ps(scales_3, zse_splat_f32x8((*(a_28 + block__2))), acc_4));
            acc_5 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_5, f32x8), (scales_2 * zse_splat_f32x8((*(a_21 + block__2)))), acc_5));
            acc_5 = ((f32x8)_mm256_fmadd_ps(scales_3, zse_splat_f32x8((*(a_29 + block__2))), acc_5));
            acc_6 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_6, f32x8), (scales_2 * zse_splat_f32x8((*(a_22 + block__2)))), acc_6));
            acc_6 = ((f32x8)_mm256_fmadd_ps(scales_3, zse_splat_f32x8((*(a_30 + block__2))), acc_6));
            acc_7 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_7, f32x8), (scales_2 * zse_splat_f32x8((*(a_23 + block__2)))), acc_7));
            acc_7 = ((f32x8)_mm256_fmadd_ps(scales_3, zse_splat_f32x8((*(a_31 + block__2))), acc_7));
            acc_8 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_8, f32x8), (scales_2 * zse_splat_f32x8((*(a_24 + block__2)))), acc_8));
            acc_8 = ((f32x8)_mm256_fmadd_ps(scales_3, zse_splat_f32x8((*(a_32 + block__2))), acc_8));
            acc_9 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_9, f32x8), (scales_2 * zse_splat_f32x8((*(a_25 + block__2)))), acc_9));
            acc_9 = ((f32x8)_mm256_fmadd_ps(scales_3, zse_splat_f32x8((*(a_33 + block__2))), acc_9));
            acc_10 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_10, f32x8), (scales_2 * zse_splat_f32x8((*(a_26 + block__2)))), acc_10));
            acc_10 = ((f32x8)_mm256_fmadd_ps(scales_3, zse_splat_f32x8((*(a_34 + block__2))), acc_10));
            acc_11 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_11, f32x8), (scales_2 * zse_splat_f32x8((*(a_27 + block__2)))), acc_11));
            acc_11 = ((f32x8)_mm256_fmadd_ps(scales_3, zse_splat_f32x8((*(a_35 + block__2))), acc_11));
          }
          if (((token + 0LL) < token_last)) {
            float * out_5 = (out + (at_4 * rows));
            const float * bias_5 = (bias + (expert_1 * rows));
            int64_t row_18 = ((tile * 16LL) + (parts_1 * 8LL));
            f32x8 total_4 = acc_4;
            if ((has_bias != 0LL)) {
              if (((row_18 + 8LL) <= rows)) {
                total_4 = (total_4 + (*(const f32x8_mem *)(bias_5 + row_18)));
              }
            }
            if (((row_18 + 8LL) <= rows)) {
              *(f32x8_mem *)(out_5 + row_18) = total_4;
            } else {
              float scratch_4[16] __attribute__((aligned(64)));
              float * spill_4 = scratch_4;
              *(f32x8_mem *)spill_4 = total_4;
              for (int64_t r_4 = row_18; r_4 < rows; r_4 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_5 + r_4) = ((*(spill_4 + (r_4 - row_18))) + (*(bias_5 + r_4)));
                } else {
                  *(out_5 + r_4) = (*(spill_4 + (r_4 - row_18)));
                }
              }
            }
          }
          if (((token + 1LL) < token_last)) {
            float * out_6 = (out + (at_5 * rows));
            const float * bias_6 = (bias + (expert_1 * rows));
            int64_t row_19 = ((tile * 16LL) + (parts_1 * 8LL));
            f32x8 total_5 = acc_5;
            if ((has_bias != 0LL)) {
              if (((row_19 + 8LL) <= rows)) {
                total_5 = (total_5 + (*(const f32x8_mem *)(bias_6 + row_19)));
              }
            }
            if (((row_19 + 8LL) <= rows)) {
              *(f32x8_mem *)(out_6 + row_19) = total_5;
            } else {
              float scratch_5[16] __attribute__((aligned(64)));
              float * spill_5 = scratch_5;
              *(f32x8_mem *)spill_5 = total_5;
              for (int64_t r_5 = row_19; r_5 < rows; r_5 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_6 + r_5) = ((*(spill_5 + (r_5 - row_19))) + (*(bias_6 + r_5)));
                } else {
                  *(out_6 + r_5) = (*(spill_5 + (r_5 - row_19)));
                }
              }
            }
          }
          if (((token + 2LL) < token_last)) {
            float * out_7 = (out + (at_6 * rows));
            const float * bias_7 = (bias + (expert_1 * rows));
            int64_t row_20 = ((tile * 16LL) + (parts_1 * 8LL));
            f32x8 total_6 = acc_6;
            if ((has_bias != 0LL)) {
              if (((row_20 + 8LL) <= rows)) {
                total_6 = (total_6 + (*(const f32x8_mem *)(bias_7 + row_20)));
              }
            }
            if (((row_20 + 8LL) <= rows)) {
              *(f32x8_mem *)(out_7 + row_20) = total_6;
            } else {
              float scratch_6[16] __attribute__((aligned(64)));
              float * spill_6 = scratch_6;
              *(f32x8_mem *)spill_6 = total_6;
              for (int64_t r_6 = row_20; r_6 < rows; r_6 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_7 + r_6) = ((*(spill_6 + (r_6 - row_20))) + (*(bias_7 + r_6)));
                } else {
                  *(out_7 + r_6) = (*(spill_6 + (r_6 - row_20)));
                }
              }
            }
          }
          if (((token + 3LL) < token_last)) {
            float * out_8 = (out + (at_7 * rows));
            const float * bias_8 = (bias + (expert_1 * rows));
            int64_t row_21 = ((tile * 16LL) + (parts_1 * 8LL));
            f32x8 total_7 = acc_7;
            if ((has_bias != 0LL)) {
              if (((row_21 + 8LL) <= rows)) {
                total_7 = (total_7 + (*(const f32x8_mem *)(bias_8 + row_21)));
              }
            }
            if (((row_21 + 8LL) <= rows)) {
              *(f32x8_mem *)(out_8 + row_21) = total_7;
            } else {
              float scratch_7[16] __attribute__((aligned(64)));
              float * spill_7 = scratch_7;
              *(f32x8_mem *)spill_7 = total_7;
              for (int64_t r_7 = row_21; r_7 < rows; r_7 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_8 + r_7) = ((*(spill_7 + (r_7 - row_21))) + (*(bias_8 + r_7)));
                } else {
                  *(out_8 + r_7) = (*(spill_7 + (r_7 - row_21)));
                }
              }
            }
          }
          if (((token + 4LL) < token_last)) {
            float * out_9 = (out + (at_8 * rows));
            const float * bias_9 = (bias + (expert_1 * rows));
            int64_t row_22 = ((tile * 16LL) + (parts_1 * 8LL));
            f32x8 total_8 = acc_8;
            if ((has_bias != 0LL)) {
              if (((row_22 + 8LL) <= rows)) {
                total_8 = (total_8 + (*(const f32x8_mem *)(bias_9 + row_22)));
              }
            }
            if (((row_22 + 8LL) <= rows)) {
              *(f32x8_mem *)(out_9 + row_22) = total_8;
            } else {
              float scratch_8[16] __attribute__((aligned(64)));
              float * spill_8 = scratch_8;
              *(f32x8_mem *)spill_8 = total_8;
              for (int64_t r_8 = row_22; r_8 < rows; r_8 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_9 + r_8) = ((*(spill_8 + (r_8 - row_22))) + (*(bias_9 + r_8)));
                } else {
                  *(out_9 + r_8) = (*(spill_8 + (r_8 - row_22)));
                }
              }
            }
          }
          if (((token + 5LL) < token_last)) {
            float * out_10 = (out + (at_9 * rows));
            const float * bias_10 = (bias + (expert_1 * rows));
            int64_t row_23 = ((tile * 16LL) + (parts_1 * 8LL));
            f32x8 total_9 = acc_9;
            if ((has_bias != 0LL)) {
              if (((row_23 + 8LL) <= rows)) {
                total_9 = (total_9 + (*(const f32x8_mem *)(bias_10 + row_23)));
              }
            }
            if (((row_23 + 8LL) <= rows)) {
              *(f32x8_mem *)(out_10 + row_23) = total_9;
            } else {
              float scratch_9[16] __attribute__((aligned(64)));
              float * spill_9 = scratch_9;
              *(f32x8_mem *)spill_9 = total_9;
              for (int64_t r_9 = row_23; r_9 < rows; r_9 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_10 + r_9) = ((*(spill_9 + (r_9 - row_23))) + (*(bias_10 + r_9)));
                } else {
                  *(out_10 + r_9) = (*(spill_9 + (r_9 - row_23)));
                }
              }
            }
          }
          if (((token + 6LL) < token_last)) {
            float * out_11 = (out + (at_10 * rows));
            const float * bias_11 = (bias + (expert_1 * rows));
            int64_t row_24 = ((tile * 16LL) + (parts_1 * 8LL));
            f32x8 total_10 = acc_10;
            if ((has_bias != 0LL)) {
              if (((row_24 + 8LL) <= rows)) {
                total_10 = (total_10 + (*(const f32x8_mem *)(bias_11 + row_24)));
              }
            }
            if (((row_24 + 8LL) <= rows)) {
              *(f32x8_mem *)(out_11 + row_24) = total_10;
            } else {
              float scratch_10[16] __attribute__((aligned(64)));
              float * spill_10 = scratch_10;
              *(f32x8_mem *)spill_10 = total_10;
              for (int64_t r_10 = row_24; r_10 < rows; r_10 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_11 + r_10) = ((*(spill_10 + (r_10 - row_24))) + (*(bias_11 + r_10)));
                } else {
                  *(out_11 + r_10) = (*(spill_10 + (r_10 - row_24)));
                }
              }
            }
          }
          if (((token + 7LL) < token_last)) {
            float * out_12 = (out + (at_11 * rows));
            const float * bias_12 = (bias + (expert_1 * rows));
            int64_t row_25 = ((tile * 16LL) + (parts_1 * 8LL));
            f32x8 total_11 = acc_11;
            if ((has_bias != 0LL)) {
              if (((row_25 + 8LL) <= rows)) {
                total_11 = (total_11 + (*(const f32x8_mem *)(bias_12 + row_25)));
              }
            }
            if (((row_25 + 8LL) <= rows)) {
              *(f32x8_mem *)(out_12 + row_25) = total_11;
            } else {
              float scratch_11[16] __attribute__((aligned(64)));
              float * spill_11 = scratch_11;
              *(f32x8_mem *)spill_11 = total_11;
              for (int64_t r_11 = row_25; r_11 < rows; r_11 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_12 + r_11) = ((*(spill_11 + (r_11 - row_25))) + (*(bias_12 + r_11)));
                } else {
                  *(out_12 + r_11) = (*(spill_11 + (r_11 - row_25)));
                }
              }
            }
          }
        }
      }
    }
  }
}
