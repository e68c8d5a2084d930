#include <math.h>
#include <stdint.h>
#include <immintrin.h>
typedef union { uint64_t slot; float f32; double f64; } zse_slot;

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x16_mem __attribute__((vector_size(64), aligned(1), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16_mem __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t f16x16 __attribute__((vector_size(32)));
typedef uint16_t f16x16_mem __attribute__((vector_size(32), aligned(1), may_alias));

static inline int64_t zse_minimum_i64(int64_t a, int64_t b) { return (a < b ? a : b); }
static inline f32x16 zse_splat_f32x16(float a) { return (f32x16)_mm512_set1_ps(a); }
static inline i32x16 zse_splat_i32x16(int32_t a) { return (i32x16)_mm512_set1_epi32(a); }

/* zse/kernels/matmul_affine.py: matmul_int8(BITS=4, SYMMETRIC=False, GROUP=32, PARTS=1, TOKENS=8, WIDE=False) */
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
  for (int64_t block = first; block < last; ++block) {
    const int64_t block_0 = block % grid[0];
    const int64_t block_1 = block / grid[0] % grid[1];
    int64_t tile = block_0;
    int64_t first_ = (block_1 * 64LL);
    int64_t value = first_;
    int64_t value_1 = zse_minimum_i64((first_ + 64LL), tokens);
    int64_t token_first = value;
    int64_t token_last = value_1;
    int64_t groups = blocks;
    const int32_t * planes = (q + ((tile * blocks) * 64LL));
    const uint16_t * planes_2 = (scale + ((tile * groups) * 16LL));
    const uint16_t * planes_3 = (offset + ((tile * groups) * 16LL));
    for (int64_t first_part = 0LL; first_part < 1LL; first_part += 1LL) {
      for (int64_t token = token_first; token < token_last; token += 8LL) {
        if (((token_last - token) <= 4LL)) {
          int64_t parts = (first_part + 0LL);
          int64_t at = zse_minimum_i64((token + 0LL), (token_last - 1LL));
          int64_t at_1 = zse_minimum_i64((token + 1LL), (token_last - 1LL));
          int64_t at_2 = zse_minimum_i64((token + 2LL), (token_last - 1LL));
          int64_t at_3 = zse_minimum_i64((token + 3LL), (token_last - 1LL));
          const int8_t * a = (aq + (at * (blocks * 32LL)));
          const int8_t * a_1 = (aq + (at_1 * (blocks * 32LL)));
          const int8_t * a_2 = (aq + (at_2 * (blocks * 32LL)));
          const int8_t * a_3 = (aq + (at_3 * (blocks * 32LL)));
          const float * a_4 = (a_scale + (at * blocks));
          const float * a_5 = (a_scale + (at_1 * blocks));
          const float * a_6 = (a_scale + (at_2 * blocks));
          const float * a_7 = (a_scale + (at_3 * blocks));
          const float * a_8 = (a_sum + (at * blocks));
          const float * a_9 = (a_sum + (at_1 * blocks));
          const float * a_10 = (a_sum + (at_2 * blocks));
          const float * a_11 = (a_sum + (at_3 * blocks));
          const int8_t * a_12 = a;
          const int8_t * a_13 = a_1;
          const int8_t * a_14 = a_2;
          const int8_t * a_15 = a_3;
          const float * a_16 = a_4;
          const float * a_17 = a_5;
          const float * a_18 = a_6;
          const float * a_19 = a_7;
          const float * a_20 = a_8;
          const float * a_21 = a_9;
          const float * a_22 = a_10;
          const float * a_23 = a_11;
          f32x16 acc = zse_splat_f32x16((0.0f));
          f32x16 acc_1 = zse_splat_f32x16((0.0f));
          f32x16 acc_2 = zse_splat_f32x16((0.0f));
          f32x16 acc_3 = zse_splat_f32x16((0.0f));
          for (int64_t block_ = 0LL; block_ < blocks; block_ += 1LL) {
            int64_t row = (parts * 16LL);
            i32x16 packed = (*(const i32x16_mem *)((planes + (block_ * 64LL)) + (0LL + row)));
            i32x16 packed_1 = (*(const i32x16_mem *)((planes + (block_ * 64LL)) + (16LL + row)));
            i32x16 packed_2 = (*(const i32x16_mem *)((planes + (block_ * 64LL)) + (32LL + row)));
            i32x16 packed_3 = (*(const i32x16_mem *)((planes + (block_ * 64LL)) + (48LL + row)));
            i32x16 w = (packed & zse_splat_i32x16(252645135));
            i32x16 w_1 = (packed_1 & zse_splat_i32x16(252645135));
            i32x16 w_2 = (packed_2 & zse_splat_i32x16(252645135));
            i32x16 w_3 = (packed_3 & zse_splat_i32x16(252645135));
            i32x16 w_4 = ((packed >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
            i32x16 w_5 = ((packed_1 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
            i32x16 w_6 = ((packed_2 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
            i32x16 w_7 = ((packed_3 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
            f32x16 s = ((f32x16)_mm512_cvtph_ps((__m256i)(*(const f16x16_mem *)((planes_2 + (block_ * 16LL)) + (parts * 16LL)))));
            f32x16 unit = s;
            f32x16 o = ((f32x16)_mm512_cvtph_ps((__m256i)(*(const f16x16_mem *)((planes_3 + (block_ * 16LL)) + (parts * 16LL)))));
            f32x16 scales = unit;
            f32x16 scales_1 = o;
            const int32_t * q_1 = ((const int32_t *)(a_12 + (block_ * 32LL)));
            const int32_t * q_2 = ((const int32_t *)(a_13 + (block_ * 32LL)));
            const int32_t * q_3 = ((const int32_t *)(a_14 + (block_ * 32LL)));
            const int32_t * q_4 = ((const int32_t *)(a_15 + (block_ * 32LL)));
            i32x16 totals = zse_splat_i32x16(0);
            i32x16 totals_1 = zse_splat_i32x16(0);
            i32x16 totals_2 = zse_splat_i32x16(0);
            i32x16 totals_3 = zse_splat_i32x16(0);
            totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w, (__m512i)zse_splat_i32x16((*q_1))));
            totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w, (__m512i)zse_splat_i32x16((*q_2))));
            totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w, (__m512i)zse_splat_i32x16((*q_3))));
            totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w, (__m512i)zse_splat_i32x16((*q_4))));
            totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_1, (__m512i)zse_splat_i32x16((*(q_1 + 1LL)))));
            totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_1, (__m512i)zse_splat_i32x16((*(q_2 + 1LL)))));
            totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_1, (__m512i)zse_splat_i32x16((*(q_3 + 1LL)))));
            totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_1, (__m512i)zse_splat_i32x16((*(q_4 + 1LL)))));
            totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_2, (__m512i)zse_splat_i32x16((*(q_1 + 2LL)))));
            totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_2, (__m512i)zse_splat_i32x16((*(q_2 + 2LL)))));
            totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_2, (__m512i)zse_splat_i32x16((*(q_3 + 2LL)))));
            totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_2, (__m512i)zse_splat_i32x16((*(q_4 + 2LL)))));
            totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_3, (__m512i)zse_splat_i32x16((*(q_1 + 3LL)))));
            totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_3, (__m512i)zse_splat_i32x16((*(q_2 + 3LL)))));
            totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_3, (__m512i)zse_splat_i32x16((*(q_3 + 3LL)))));
            totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_3, (__m512i)zse_splat_i32x16((*(q_4 + 3LL)))));
            totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_4, (__m512i)zse_splat_i32x16((*(q_1 + 4LL)))));
            totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_4, (__m512i)zse_splat_i32x16((*(q_2 + 4LL)))));
            totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_4, (__m512i)zse_splat_i32x16((*(q_3 + 4LL)))));
            totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_4, (__m512i)zse_splat_i32x16((*(q_4 + 4LL)))));
            totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_5, (__m512i)zse_splat_i32x16((*(q_1 + 5LL)))));
            totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_5, (__m512i)zse_splat_i32x16((*(q_2 + 5LL)))));
            totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_5, (__m512i)zse_splat_i32x16((*(q_3 + 5LL)))));
            totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_5, (__m512i)zse_splat_i32x16((*(q_4 + 5LL)))));
            totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_6, (__m512i)zse_splat_i32x16((*(q_1 + 6LL)))));
            totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_6, (__m512i)zse_splat_i32x16((*(q_2 + 6LL)))));
            totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_6, (__m512i)zse_splat_i32x16((*(q_3 + 6LL)))));
            totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_6, (__m512i)zse_splat_i32x16((*(q_4 + 6LL)))));
            totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_7, (__m512i)zse_splat_i32x16((*(q_1 + 7LL)))));
            totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_7, (__m512i)zse_splat_i32x16((*(q_2 + 7LL)))));
            totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_7, (__m512i)zse_splat_i32x16((*(q_3 + 7LL)))));
            totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_7, (__m512i)zse_splat_i32x16((*(q_4 + 7LL)))));
            acc = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals, f32x16), (scales * zse_splat_f32x16((*(a_16 + block_)))), acc));
            acc = ((f32x16)_mm512_fmadd_ps(scales_1, zse_splat_f32x16((*(a_20 + block_))), acc));
            acc_1 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_1, f32x16), (scales * zse_splat_f32x16((*(a_17 + block_)))), acc_1));
            acc_1 = ((f32x16)_mm512_fmadd_ps(scales_1, zse_splat_f32x16((*(a_21 + block_))), acc_1));
            acc_2 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_2, f32x16), (scales * zse_splat_f32x16((*(a_18 + block_)))), acc_2));
            acc_2 = ((f32x16)_mm512_fmadd_ps(scales_1, zse_splat_f32x16((*(a_22 + block_))), acc_2));
            acc_3 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_3, f32x16), (scales * zse_splat_f32x16((*(a_19 + block_)))), acc_3));
            acc_3 = ((f32x16)_mm512_fmadd_ps(scales_1, zse_splat_f32x16((*(a_23 + block_))), acc_3));
          }
          if (((token + 0LL) < token_last)) {
            float * out_1 = (out + (at * rows));
            int64_t row_1 = ((tile * 16LL) + (parts * 16LL));
            f32x16 total = acc;
            if ((has_bias != 0LL)) {
              if (((row_1 + 16LL) <= rows)) {
                total = (total + (*(const f32x16_mem *)(bias + row_1)));
              }
            }
            if (((row_1 + 16LL) <= rows)) {
              *(f32x16_mem *)(out_1 + row_1) = total;
            } else {
              float scratch[16] __attribute__((aligned(64)));
              float * spill = scratch;
              *(f32x16_mem *)spill = total;
              for (int64_t r = row_1; r < rows; r += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_1 + r) = ((*(spill + (r - row_1))) + (*(bias + r)));
                } else {
                  *(out_1 + r) = (*(spill + (r - row_1)));
                }
              }
            }
          }
          if (((token + 1LL) < token_last)) {
            float * out_2 = (out + (at_1 * rows));
            int64_t row_2 = ((tile * 16LL) + (parts * 16LL));
            f32x16 total_1 = acc_1;
            if ((has_bias != 0LL)) {
              if (((row_2 + 16LL) <= rows)) {
                total_1 = (total_1 + (*(const f32x16_mem *)(bias + row_2)));
              }
            }
            if (((row_2 + 16LL) <= rows)) {
              *(f32x16_mem *)(out_2 + row_2) = total_1;
            } else {
              float scratch_1[16] __attribute__((aligned(64)));
              float * spill_1 = scratch_1;
              *(f32x16_mem *)spill_1 = total_1;
              for (int64_t r_1 = row_2; r_1 < rows; r_1 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_2 + r_1) = ((*(spill_1 + (r_1 - row_2))) + (*(bias + r_1)));
                } else {
                  *(out_2 + r_1) = (*(spill_1 + (r_1 - row_2)));
                }
              }
            }
          }
          if (((token + 2LL) < token_last)) {
            float * out_3 = (out + (at_2 * rows));
            int64_t row_3 = ((tile * 16LL) + (parts * 16LL));
            f32x16 total_2 = acc_2;
            if ((has_bias != 0LL)) {
              if (((row_3 + 16LL) <= rows)) {
                total_2 = (total_2 + (*(const f32x16_mem *)(bias + row_3)));
              }
            }
            if (((row_3 + 16LL) <= rows)) {
              *(f32x16_mem *)(out_3 + row_3) = total_2;
            } else {
              float scratch_2[16] __attribute__((aligned(64)));
              float * spill_2 = scratch_2;
              *(f32x16_mem *)spill_2 = total_2;
              for (int64_t r_2 = row_3; r_2 < rows; r_2 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_3 + r_2) = ((*(spill_2 + (r_2 - row_3))) + (*(bias + r_2)));
                } else {
                  *(out_3 + r_2) = (*(spill_2 + (r_2 - row_3)));
                }
              }
            }
          }
          if (((token + 3LL) < token_last)) {
            float * out_4 = (out + (at_3 * rows));
            int64_t row_4 = ((tile * 16LL) + (parts * 16LL));
            f32x16 total_3 = acc_3;
            if ((has_bias != 0LL)) {
              if (((row_4 + 16LL) <= rows)) {
                total_3 = (total_3 + (*(const f32x16_mem *)(bias + row_4)));
              }
            }
            if (((row_4 + 16LL) <= rows)) {
              *(f32x16_mem *)(out_4 + row_4) = total_3;
            } else {
              float scratch_3[16] __attribute__((aligned(64)));
              float * spill_3 = scratch_3;
              *(f32x16_mem *)spill_3 = total_3;
              for (int64_t r_3 = row_4; r_3 < rows; r_3 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_4 + r_3) = ((*(spill_3 + (r_3 - row_4))) + (*(bias + r_3)));
                } else {
                  *(out_4 + r_3) = (*(spill_3 + (r_3 - row_4)));
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
          const int8_t * a_24 = (aq + (at_4 * (blocks * 32LL)));
          const int8_t * a_25 = (aq + (at_5 * (blocks * 32LL)));
          const int8_t * a_26 = (aq + (at_6 * (blocks * 32LL)));
          const int8_t * a_27 = (aq + (at_7 * (blocks * 32LL)));
          const int8_t * a_28 = (aq + (at_8 * (blocks * 32LL)));
          const int8_t * a_29 = (aq + (at_9 * (blocks * 32LL)));
          const int8_t * a_30 = (aq + (at_10 * (blocks * 32LL)));
          const int8_t * a_31 = (aq + (at_11 * (blocks * 32LL)));
          const float * a_32 = (a_scale + (at_4 * blocks));
          const float * a_33 = (a_scale + (at_5 * blocks));
          const float * a_34 = (a_scale + (at_6 * blocks));
          const float * a_35 = (a_scale + (at_7 * blocks));
          const float * a_36 = (a_scale + (at_8 * blocks));
          const float * a_37 = (a_scale + (at_9 * blocks));
          const float * a_38 = (a_scale + (at_10 * blocks));
          const float * a_39 = (a_scale + (at_11 * blocks));
          const float * a_40 = (a_sum + (at_4 * blocks));
          const float * a_41 = (a_sum + (at_5 * blocks));
          const float * a_42 = (a_sum + (at_6 * blocks));
          const float * a_43 = (a_sum + (at_7 * blocks));
          const float * a_44 = (a_sum + (at_8 * blocks));
          const float * a_45 = (a_sum + (at_9 * blocks));
          const float * a_46 = (a_sum + (at_10 * blocks));
          const float * a_47 = (a_sum + (at_11 * blocks));
          const int8_t * a_48 = a_24;
          const int8_t * a_49 = a_25;
          const int8_t * a_50 = a_26;
          const int8_t * a_51 = a_27;
          const int8_t * a_52 = a_28;
          const int8_t * a_53 = a_29;
          const int8_t * a_54 = a_30;
          const int8_t * a_55 = a_31;
          const float * a_56 = a_32;
          const float * a_57 = a_33;
          const float * a_58 = a_34;
          const float * a_59 = a_35;
          const float * a_60 = a_36;
          const float * a_61 = a_37;
          const float * a_62 = a_38;
          const float * a_63 = a_39;
          const float * a_64 = a_40;
          const float * a_65 = a_41;
          const float * a_66 = a_42;
          const float * a_67 = a_43;
          const float * a_68 = a_44;
          const float * a_69 = a_45;
          const float * a_70 = a_46;
          const float * a_71 = a_47;
          f32x16 acc_4 = zse_splat_f32x16((0.0f));
          f32x16 acc_5 = zse_splat_f32x16((0.0f));
          f32x16 acc_6 = zse_splat_f32x16((0.0f));
          f32x16 acc_7 = zse_splat_f32x16((0.0f));
          f32x16 acc_8 = zse_splat_f32x16((0.0f));
          f32x16 acc_9 = zse_splat_f32x16((0.0f));
          f32x16 acc_10 = zse_splat_f32x16((0.0f));
          f32x16 acc_11 = zse_splat_f32x16((0.0f));
          for (int64_t block__1 = 0LL; block__1 < blocks; block__1 += 1LL) {
            int64_t row_5 = (parts_1 * 16LL);
            i32x16 packed_4 = (*(const i32x16_mem *)((planes + (block__1 * 64LL)) + (0LL + row_5)));
            i32x16 packed_5 = (*(const i32x16_mem *)((planes + (block__1 * 64LL)) + (16LL + row_5)));
            i32x16 packed_6 = (*(const i32x16_mem *)((planes + (block__1 * 64LL)) + (32LL + row_5)));
            i32x16 packed_7 = (*(const i32x16_mem *)((planes + (block__1 * 64LL)) + (48LL + row_5)));
            i32x16 w_8 = (packed_4 & zse_splat_i32x16(252645135));
            i32x16 w_9 = (packed_5 & zse_splat_i32x16(252645135));
            i32x16 w_10 = (packed_6 & zse_splat_i32x16(252645135));
            i32x16 w_11 = (packed_7 & zse_splat_i32x16(252645135));
            i32x16 w_12 = ((packed_4 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
            i32x16 w_13 = ((packed_5 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
            i32x16 w_14 = ((packed_6 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
            i32x16 w_15 = ((packed_7 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
            f32x16 s_1 = ((f32x16)_mm512_cvtph_ps((__m256i)(*(const f16x16_mem *)((planes_2 + (block__1 * 16LL)) + (parts_1 * 16LL)))));
            f32x16 unit_1 = s_1;
            f32x16 o_1 = ((f32x16)_mm512_cvtph_ps((__m256i)(*(const f16x16_mem *)((planes_3 + (block__1 * 16LL)) + (parts_1 * 16LL)))));
            f32x16 scales_2 = unit_1;
            f32x16 scales_3 = o_1;
            const int32_t * q_5 = ((const int32_t *)(a_48 + (block__1 * 32LL)));
            const int32_t * q_6 = ((const int32_t *)(a_49 + (block__1 * 32LL)));
            const int32_t * q_7 = ((const int32_t *)(a_50 + (block__1 * 32LL)));
            const int32_t * q_8 = ((const int32_t *)(a_51 + (block__1 * 32LL)));
            const int32_t * q_9 = ((const int32_t *)(a_52 + (block__1 * 32LL)));
            const int32_t * q_10 = ((const int32_t *)(a_53 + (block__1 * 32LL)));
            const int32_t * q_11 = ((const int32_t *)(a_54 + (block__1 * 32LL)));
            const int32_t * q_12 = ((const int32_t *)(a_55 + (block__1 * 32LL)));
            i32x16 totals_4 = zse_splat_i32x16(0);
            i32x16 totals_5 = zse_splat_i32x16(0);
            i32x16 totals_6 = zse_splat_i32x16(0);
            i32x16 totals_7 = zse_splat_i32x16(0);
            i32x16 totals_8 = zse_splat_i32x16(0);
            i32x16 totals_9 = zse_splat_i32x16(0);
            i32x16 totals_10 = zse_splat_i32x16(0);
            i32x16 totals_11 = zse_splat_i32x16(0);
            totals_4 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_4, (__m512i)w_8, (__m512i)zse_splat_i32x16((*q_5))));
            totals_5 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_5, (__m512i)w_8, (__m512i)zse_splat_i32x16((*q_6))));
            totals_6 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_6, (__m512i)w_8, (__m512i)zse_splat_i32x16((*q_7))));
            totals_7 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_7, (__m512i)w_8, (__m512i)zse_splat_i32x16((*q_8))));
            totals_8 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_8, (__m512i)w_8, (__m512i)zse_splat_i32x16((*q_9))));
            totals_9 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_9, (__m512i)w_8, (__m512i)zse_splat_i32x16((*q_10))));
            totals_10 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_10, (__m512i)w_8, (__m512i)zse_splat_i32x16((*q_11))));
            totals_11 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_11, (__m512i)w_8, (__m512i)zse_splat_i32x16((*q_12))));
            totals_4 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_4, (__m512i)w_9, (__m512i)zse_splat_i32x16((*(q_5 + 1LL)))));
            totals_5 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_5, (__m512i)w_9, (__m512i)zse_splat_i32x16((*(q_6 + 1LL)))));
            totals_6 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_6, (__m512i)w_9, (__m512i)zse_splat_i32x16((*(q_7 + 1LL)))));
            totals_7 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_7, (__m512i)w_9, (__m512i)zse_splat_i32x16((*(q_8 + 1LL)))));
            totals_8 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_8, (__m512i)w_9, (__m512i)zse_splat_i32x16((*(q_9 + 1LL)))));
            totals_9 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_9, (__m512i)w_9, (__m512i)zse_splat_i32x16((*(q_10 + 1LL)))));
            totals_10 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_10, (__m512i)w_9, (__m512i)zse_splat_i32x16((*(q_11 + 1LL)))));
            totals_11 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_11, (__m512i)w_9, (__m512i)zse_splat_i32x16((*(q_12 + 1LL)))));
            totals_4 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_4, (__m512i)w_10, (__m512i)zse_splat_i32x16((*(q_5 + 2LL)))));
            totals_5 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_5, (__m512i)w_10, (__m512i)zse_splat_i32x16((*(q_6 + 2LL)))));
            totals_6 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_6, (__m512i)w_10, (__m512i)zse_splat_i32x16((*(q_7 + 2LL)))));
            totals_7 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_7, (__m512i)w_10, (__m512i)zse_splat_i32x16((*(q_8 + 2LL)))));
            totals_8 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_8, (__m512i)w_10, (__m512i)zse_splat_i32x16((*(q_9 + 2LL)))));
            totals_9 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_9, (__m512i)w_10, (__m512i)zse_splat_i32x16((*(q_10 + 2LL)))));
            totals_10 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_10, (__m512i)w_10, (__m512i)zse_splat_i32x16((*(q_11 + 2LL)))));
            totals_11 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_11, (__m512i)w_10, (__m512i)zse_splat_i32x16((*(q_12 + 2LL)))));
            totals_4 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_4, (__m512i)w_11, (__m512i)zse_splat_i32x16((*(q_5 + 3LL)))));
            totals_5 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_5, (__m512i)w_11, (__m512i)zse_splat_i32x16((*(q_6 + 3LL)))));
            totals_6 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_6, (__m512i)w_11, (__m512i)zse_splat_i32x16((*(q_7 + 3LL)))));
            totals_7 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_7, (__m512i)w_11, (__m512i)zse_splat_i32x16((*(q_8 + 3LL)))));
            totals_8 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_8, (__m512i)w_11, (__m512i)zse_splat_i32x16((*(q_9 + 3LL)))));
            totals_9 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_9, (__m512i)w_11, (__m512i)zse_splat_i32x16((*(q_10 + 3LL)))));
            totals_10 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_10, (__m512i)w_11, (__m512i)zse_splat_i32x16((*(q_11 + 3LL)))));
            totals_11 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_11, (__m512i)w_11, (__m512i)zse_splat_i32x16((*(q_12 + 3LL)))));
            totals_4 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_4, (__m512i)w_12, (__m512i)zse_splat_i32x16((*(q_5 + 4LL)))));
            totals_5 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_5, (__m512i)w_12, (__m512i)zse_splat_i32x16((*(q_6 + 4LL)))));
            totals_6 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_6, (__m512i)w_12, (__m512i)zse_splat_i32x16((*(q_7 + 4LL)))));
            totals_7 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_7, (__m512i)w_12, (__m512i)zse_splat_i32x16((*(q_8 + 4LL)))));
            totals_8 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_8, (__m512i)w_12, (__m512i)zse_splat_i32x16((*(q_9 + 4LL)))));
            totals_9 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_9, (__m512i)w_12, (__m512i)zse_splat_i32x16((*(q_10 + 4LL)))));
            totals_10 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_10, (__m512i)w_12, (__m512i)zse_splat_i32x16((*(q_11 + 4LL)))));
            totals_11 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_11, (__m512i)w_12, (__m512i)zse_splat_i32x16((*(q_12 + 4LL)))));
            totals_4 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_4, (__m512i)w_13, (__m512i)zse_splat_i32x16((*(q_5 + 5LL)))));
            totals_5 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_5, (__m512i)w_13, (__m512i)zse_splat_i32x16((*(q_6 + 5LL)))));
            totals_6 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_6, (__m512i)w_13, (__m512i)zse_splat_i32x16((*(q_7 + 5LL)))));
            totals_7 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_7, (__m512i)w_13, (__m512i)zse_splat_i32x16((*(q_8 + 5LL)))));
            totals_8 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_8, (__m512i)w_13, (__m512i)zse_splat_i32x16((*(q_9 + 5LL)))));
            totals_9 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_9, (__m512i)w_13, (__m512i)zse_splat_i32x16((*(q_10 + 5LL)))));
            totals_10 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_10, (__m512i)w_13, (__m512i)zse_splat_i32x16((*(q_11 + 5LL)))));
            totals_11 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_11, (__m512i)w_13, (__m512i)zse_splat_i32x16((*(q_12 + 5LL)))));
            totals_4 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_4, (__m512i)w_14, (__m512i)zse_splat_i32x16((*(q_5 + 6LL)))));
            totals_5 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_5, (__m512i)w_14, (__m512i)zse_splat_i32x16((*(q_6 + 6LL)))));
            totals_6 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_6, (__m512i)w_14, (__m512i)zse_splat_i32x16((*(q_7 + 6LL)))));
            totals_7 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_7, (__m512i)w_14, (__m512i)zse_splat_i32x16((*(q_8 + 6LL)))));
            totals_8 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_8, (__m512i)w_14, (__m512i)zse_splat_i32x16((*(q_9 + 6LL)))));
            totals_9 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_9, (__m512i)w_14, (__m512i)zse_splat_i32x16((*(q_10 + 6LL)))));
            totals_10 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_10, (__m512i)w_14, (__m512i)zse_splat_i32x16((*(q_11 + 6LL)))));
            totals_11 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_11, (__m512i)w_14, (__m512i)zse_splat_i32x16((*(q_12 + 6LL)))));
            totals_4 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_4, (__m512i)w_15, (__m512i)zse_splat_i32x16((*(q_5 + 7LL)))));
            totals_5 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_5, (__m512i)w_15, (__m512i)zse_splat_i32x16((*(q_6 + 7LL)))));
            totals_6 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_6, (__m512i)w_15, (__m512i)zse_splat_i32x16((*(q_7 + 7LL)))));
            totals_7 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_7, (__m512i)w_15, (__m512i)zse_splat_i32x16((*(q_8 + 7LL)))));
            totals_8 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_8, (__m512i)w_15, (__m512i)zse_splat_i32x16((*(q_9 + 7LL)))));
            totals_9 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_9, (__m512i)w_15, (__m512i)zse_splat_i32x16((*(q_10 + 7LL)))));
            totals_10 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_10, (__m512i)w_15, (__m512i)zse_splat_i32x16((*(q_11 + 7LL)))));
            totals_11 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_11, (__m512i)w_15, (__m512i)zse_splat_i32x16((*(q_12 + 7LL)))));
            acc_4 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_4, f32x16), (scales_2 * zse_splat_f32x16((*(a_56 + block__1)))), acc_4));
            acc_4 = ((f32x16)_mm512_fmadd_ps(scales_3, zse_splat_f32x16((*(a_64 + block__1))), acc_4));
            acc_5 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_5, f32x16), (scales_2 * zse_splat_f32x16((*(a_57 + block__1)))), acc_5));
            acc_5 = ((f32x16)_mm512_fmadd_ps(scales_3, zse_splat_f32x16((*(a_65 + block__1))), acc_5));
            acc_6 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_6, f32x16), (scales_2 * zse_splat_f32x16((*(a_58 + block__1)))), acc_6));
            acc_6 = ((f32x16)_mm512_fmadd_ps(scales_3, zse_splat_f32x16((*(a_66 + block__1))), acc_6));
            acc_7 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_7, f32x16), (scales_2 * zse_splat_f32x16((*(a_59 + block__1)))), acc_7));
            acc_7 = ((f32x16)_mm512_fmadd_ps(scales_3, zse_splat_f32x16((*(a_67 + block__1))), acc_7));
            acc_8 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_8, f32x16), (scales_2 * zse_splat_f32x16((*(a_60 + block__1)))), acc_8));
            acc_8 = ((f32x16)_mm512_fmadd_ps(scales_3, zse_splat_f32x16((*(a_68 + block__1))), acc_8));
            acc_9 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_9, f32x16), (scales_2 * zse_splat_f32x16((*(a_61 + block__1)))), acc_9));
            acc_9 = ((f32x16)_mm512_fmadd_ps(scales_3, zse_splat_f32x16((*(a_69 + block__1))), acc_9));
            acc_10 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_10, f32x16), (scales_2 * zse_splat_f32x16((*(a_62 + block__1)))), acc_10));
            acc_10 = ((f32x16)_mm512_fmadd_ps(scales_3, zse_splat_f32x16((*(a_70 + block__1))), acc_10));
            acc_11 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_11, f32x16), (scales_2 * zse_splat_f32x16((*(a_63 + block__1)))), acc_11));
            acc_11 = ((f32x16)_mm512_fmadd_ps(scales_3, zse_splat_f32x16((*(a_71 + block__1))), acc_11));
          }
          if (((token + 0LL) < token_last)) {
            float * out_5 = (out + (at_4 * rows));
            int64_t row_6 = ((tile * 16LL) + (parts_1 * 16LL));
            f32x16 total_4 = acc_4;
            if ((has_bias != 0LL)) {
              if (((row_6 + 16LL) <= rows)) {
                total_4 = (total_4 + (*(const f32x16_mem *)(bias + row_6)));
              }
            }
            if (((row_6 + 16LL) <= rows)) {
              *(f32x16_mem *)(out_5 + row_6) = total_4;
            } else {
              float scratch_4[16] __attribute__((aligned(64)));
              float * spill_4 = scratch_4;
              *(f32x16_mem *)spill_4 = total_4;
              for (int64_t r_4 = row_6; r_4 < rows; r_4 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_5 + r_4) = ((*(spill_4 + (r_4 - row_6))) + (*(bias + r_4)));
                } else {
                  *(out_5 + r_4) = (*(spill_4 + (r_4 - row_6)));
                }
              }
            }
          }
          if (((token + 1LL) < token_last)) {
            float * out_6 = (out + (at_5 * rows));
            int64_t row_7 = ((tile * 16LL) + (parts_1 * 16LL));
            f32x16 total_5 = acc_5;
            if ((has_bias != 0LL)) {
              if (((row_7 + 16LL) <= rows)) {
                total_5 = (total_5 + (*(const f32x16_mem *)(bias + row_7)));
              }
            }
            if (((row_7 + 16LL) <= rows)) {
              *(f32x16_mem *)(out_6 + row_7) = total_5;
            } else {
              float scratch_5[16] __attribute__((aligned(64)));
              float * spill_5 = scratch_5;
              *(f32x16_mem *)spill_5 = total_5;
              for (int64_t r_5 = row_7; r_5 < rows; r_5 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_6 + r_5) = ((*(spill_5 + (r_5 - row_7))) + (*(bias + r_5)));
                } else {
                  *(out_6 + r_5) = (*(spill_5 + (r_5 - row_7)));
                }
              }
            }
          }
          if (((token + 2LL) < token_last)) {
            float * out_7 = (out + (at_6 * rows));
            int64_t row_8 = ((tile * 16LL) + (parts_1 * 16LL));
            f32x16 total_6 = acc_6;
            if ((has_bias != 0LL)) {
              if (((row_8 + 16LL) <= rows)) {
                total_6 = (total_6 + (*(const f32x16_mem *)(bias + row_8)));
              }
            }
            if (((row_8 + 16LL) <= rows)) {
              *(f32x16_mem *)(out_7 + row_8) = total_6;
            } else {
              float scratch_6[16] __attribute__((aligned(64)));
              float * spill_6 = scratch_6;
              *(f32x16_mem *)spill_6 = total_6;
              for (int64_t r_6 = row_8; r_6 < rows; r_6 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_7 + r_6) = ((*(spill_6 + (r_6 - row_8))) + (*(bias + r_6)));
                } else {
                  *(out_7 + r_6) = (*(spill_6 + (r_6 - row_8)));
                }
              }
            }
          }
          if (((token + 3LL) < token_last)) {
            float * out_8 = (out + (at_7 * rows));
            int64_t row_9 = ((tile * 16LL) + (parts_1 * 16LL));
            f32x16 total_7 = acc_7;
            if ((has_bias != 0LL)) {
              if (((row_9 + 16LL) <= rows)) {
                total_7 = (total_7 + (*(const f32x16_mem *)(bias + row_9)));
              }
            }
            if (((row_9 + 16LL) <= rows)) {
              *(f32x16_mem *)(out_8 + row_9) = total_7;
            } else {
              float scratch_7[16] __attribute__((aligned(64)));
              float * spill_7 = scratch_7;
              *(f32x16_mem *)spill_7 = total_7;
              for (int64_t r_7 = row_9; r_7 < rows; r_7 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_8 + r_7) = ((*(spill_7 + (r_7 - row_9))) + (*(bias + r_7)));
                } else {
                  *(out_8 + r_7) = (*(spill_7 + (r_7 - row_9)));
                }
              }
            }
          }
          if (((token + 4LL) < token_last)) {
            float * out_9 = (out + (at_8 * rows));
            int64_t row_10 = ((tile * 16LL) + (parts_1 * 16LL));
            f32x16 total_8 = acc_8;
            if ((has_bias != 0LL)) {
              if (((row_10 + 16LL) <= rows)) {
                total_8 = (total_8 + (*(const f32x16_mem *)(bias + row_10)));
              }
            }
            if (((row_10 + 16LL) <= rows)) {
              *(f32x16_mem *)(out_9 + row_10) = total_8;
            } else {
              float scratch_8[16] __attribute__((aligned(64)));
              float * spill_8 = scratch_8;
              *(f32x16_mem *)spill_8 = total_8;
              for (int64_t r_8 = row_10; r_8 < rows; r_8 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_9 + r_8) = ((*(spill_8 + (r_8 - row_10))) + (*(bias + r_8)));
                } else {
                  *(out_9 + r_8) = (*(spill_8 + (r_8 - row_10)));
                }
              }
            }
          }
          if (((token + 5LL) < token_last)) {
            float * out_10 = (out + (at_9 * rows));
            int64_t row_11 = ((tile * 16LL) + (parts_1 * 16LL));
            f32x16 total_9 = acc_9;
            if ((has_bias != 0LL)) {
              if (((row_11 + 16LL) <= rows)) {
                total_9 = (total_9 + (*(const f32x16_mem *)(bias + row_11)));
              }
            }
            if (((row_11 + 16LL) <= rows)) {
              *(f32x16_mem *)(out_10 + row_11) = total_9;
            } else {
              float scratch_9[16] __attribute__((aligned(64)));
              float * spill_9 = scratch_9;
              *(f32x16_mem *)spill_9 = total_9;
              for (int64_t r_9 = row_11; r_9 < rows; r_9 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_10 + r_9) = ((*(spill_9 + (r_9 - row_11))) + (*(bias + r_9)));
                } else {
                  *(out_10 + r_9) = (*(spill_9 + (r_9 - row_11)));
                }
              }
            }
          }
          if (((token + 6LL) < token_last)) {
            float * out_11 = (out + (at_10 * rows));
            int64_t row_12 = ((tile * 16LL) + (parts_1 * 16LL));
            f32x16 total_10 = acc_10;
            if ((has_bias != 0LL)) {
              if (((row_12 + 16LL) <= rows)) {
                total_10 = (total_10 + (*(const f32x16_mem *)(bias + row_12)));
              }
            }
            if (((row_12 + 16LL) <= rows)) {
              *(f32x16_mem *)(out_11 + row_12) = total_10;
            } else {
              float scratch_10[16] __attribute__((aligned(64)));
              float * spill_10 = scratch_10;
              *(f32x16_mem *)spill_10 = total_10;
              for (int64_t r_10 = row_12; r_10 < rows; r_10 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_11 + r_10) = ((*(spill_10 + (r_10 - row_12))) + (*(bias + r_10)));
                } else {
                  *(out_11 + r_10) = (*(spill_10 + (r_10 - row_12)));
                }
              }
            }
          }
          if (((token + 7LL) < token_last)) {
            float * out_12 = (out + (at_11 * rows));
            int64_t row_13 = ((tile * 16LL) + (parts_1 * 16LL));
            f32x16 total_11 = acc_11;
            if ((has_bias != 0LL)) {
              if (((row_13 + 16LL) <= rows)) {
                total_11 = (total_11 + (*(const f32x16_mem *)(bias + row_13)));
              }
            }
            if (((row_13 + 16LL) <= rows)) {
              *(f32x16_mem *)(out_12 + row_13) = total_11;
            } else {
              float scratch_11[16] __attribute__((aligned(64)));
              float * spill_11 = scratch_11;
              *(f32x16_mem *)spill_11 = total_11;
              for (int64_t r_11 = row_13; r_11 < rows; r_11 += 1LL) {
                if ((has_bias != 0LL)) {
                  *(out_12 + r_11) = ((*(spill_11 + (r_11 - row_13))) + (*(bias + r_11)));
                } else {
                  *(out_12 + r_11) = (*(spill_11 + (r_11 - row_13)));
                }
              }
            }
          }
        }
      }
    }
  }
}
