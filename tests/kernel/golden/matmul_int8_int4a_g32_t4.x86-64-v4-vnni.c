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

/* zse/kernels/matmul.py: matmul_int8(BITS=4, SYMMETRIC=False, GROUP=32, PARTS=1, TOKENS=4, WIDE=False) */
void matmul_int8_int4a_g32_t4(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
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
    int64_t token_first = (block_1 * 64LL);
    int64_t token_last = zse_minimum_i64((token_first + 64LL), tokens);
    const int32_t * q_tile = (q + ((tile * blocks) * 64LL));
    int64_t groups = blocks;
    const uint16_t * scale_tile = (scale + ((tile * groups) * 16LL));
    const uint16_t * offset_tile = (offset + ((tile * groups) * 16LL));
    for (int64_t first_part = 0LL; first_part < 1LL; first_part += 1LL) {
      int64_t parts = (first_part + 0LL);
      for (int64_t token = token_first; token < token_last; token += 4LL) {
        int64_t at = zse_minimum_i64((token + 0LL), (token_last - 1LL));
        int64_t at_1 = zse_minimum_i64((token + 1LL), (token_last - 1LL));
        int64_t at_2 = zse_minimum_i64((token + 2LL), (token_last - 1LL));
        int64_t at_3 = zse_minimum_i64((token + 3LL), (token_last - 1LL));
        const int8_t * a_rows = (aq + (at * (blocks * 32LL)));
        const int8_t * a_rows_1 = (aq + (at_1 * (blocks * 32LL)));
        const int8_t * a_rows_2 = (aq + (at_2 * (blocks * 32LL)));
        const int8_t * a_rows_3 = (aq + (at_3 * (blocks * 32LL)));
        const float * sa_rows = (a_scale + (at * blocks));
        const float * sa_rows_1 = (a_scale + (at_1 * blocks));
        const float * sa_rows_2 = (a_scale + (at_2 * blocks));
        const float * sa_rows_3 = (a_scale + (at_3 * blocks));
        const float * su_rows = (a_sum + (at * blocks));
        const float * su_rows_1 = (a_sum + (at_1 * blocks));
        const float * su_rows_2 = (a_sum + (at_2 * blocks));
        const float * su_rows_3 = (a_sum + (at_3 * blocks));
        f32x16 acc = zse_splat_f32x16((0.0f));
        f32x16 acc_1 = zse_splat_f32x16((0.0f));
        f32x16 acc_2 = zse_splat_f32x16((0.0f));
        f32x16 acc_3 = zse_splat_f32x16((0.0f));
        for (int64_t block_ = 0LL; block_ < blocks; block_ += 1LL) {
          i32x16 packed = (*(const i32x16_mem *)((q_tile + (block_ * 64LL)) + (0LL + (parts * 16LL))));
          i32x16 packed_1 = (*(const i32x16_mem *)((q_tile + (block_ * 64LL)) + (16LL + (parts * 16LL))));
          i32x16 packed_2 = (*(const i32x16_mem *)((q_tile + (block_ * 64LL)) + (32LL + (parts * 16LL))));
          i32x16 packed_3 = (*(const i32x16_mem *)((q_tile + (block_ * 64LL)) + (48LL + (parts * 16LL))));
          i32x16 w = (packed & zse_splat_i32x16(252645135));
          i32x16 w_1 = (packed_1 & zse_splat_i32x16(252645135));
          i32x16 w_2 = (packed_2 & zse_splat_i32x16(252645135));
          i32x16 w_3 = (packed_3 & zse_splat_i32x16(252645135));
          i32x16 w_4 = ((packed >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
          i32x16 w_5 = ((packed_1 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
          i32x16 w_6 = ((packed_2 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
          i32x16 w_7 = ((packed_3 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
          f32x16 s = ((f32x16)_mm512_cvtph_ps((__m256i)(*(const f16x16_mem *)((scale_tile + (block_ * 16LL)) + (parts * 16LL)))));
          f32x16 unit = s;
          f32x16 o = ((f32x16)_mm512_cvtph_ps((__m256i)(*(const f16x16_mem *)((offset_tile + (block_ * 16LL)) + (parts * 16LL)))));
          f32x16 scales = unit;
          f32x16 scales_1 = o;
          const int32_t * a = ((const int32_t *)(a_rows + (block_ * 32LL)));
          const int32_t * a_1 = ((const int32_t *)(a_rows_1 + (block_ * 32LL)));
          const int32_t * a_2 = ((const int32_t *)(a_rows_2 + (block_ * 32LL)));
          const int32_t * a_3 = ((const int32_t *)(a_rows_3 + (block_ * 32LL)));
          i32x16 totals = zse_splat_i32x16(0);
          i32x16 totals_1 = zse_splat_i32x16(0);
          i32x16 totals_2 = zse_splat_i32x16(0);
          i32x16 totals_3 = zse_splat_i32x16(0);
          totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w, (__m512i)zse_splat_i32x16((*a))));
          totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w, (__m512i)zse_splat_i32x16((*a_1))));
          totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w, (__m512i)zse_splat_i32x16((*a_2))));
          totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w, (__m512i)zse_splat_i32x16((*a_3))));
          totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_1, (__m512i)zse_splat_i32x16((*(a + 1LL)))));
          totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_1, (__m512i)zse_splat_i32x16((*(a_1 + 1LL)))));
          totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_1, (__m512i)zse_splat_i32x16((*(a_2 + 1LL)))));
          totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_1, (__m512i)zse_splat_i32x16((*(a_3 + 1LL)))));
          totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_2, (__m512i)zse_splat_i32x16((*(a + 2LL)))));
          totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_2, (__m512i)zse_splat_i32x16((*(a_1 + 2LL)))));
          totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_2, (__m512i)zse_splat_i32x16((*(a_2 + 2LL)))));
          totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_2, (__m512i)zse_splat_i32x16((*(a_3 + 2LL)))));
          totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_3, (__m512i)zse_splat_i32x16((*(a + 3LL)))));
          totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_3, (__m512i)zse_splat_i32x16((*(a_1 + 3LL)))));
          totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_3, (__m512i)zse_splat_i32x16((*(a_2 + 3LL)))));
          totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_3, (__m512i)zse_splat_i32x16((*(a_3 + 3LL)))));
          totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_4, (__m512i)zse_splat_i32x16((*(a + 4LL)))));
          totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_4, (__m512i)zse_splat_i32x16((*(a_1 + 4LL)))));
          totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_4, (__m512i)zse_splat_i32x16((*(a_2 + 4LL)))));
          totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_4, (__m512i)zse_splat_i32x16((*(a_3 + 4LL)))));
          totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_5, (__m512i)zse_splat_i32x16((*(a + 5LL)))));
          totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_5, (__m512i)zse_splat_i32x16((*(a_1 + 5LL)))));
          totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_5, (__m512i)zse_splat_i32x16((*(a_2 + 5LL)))));
          totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_5, (__m512i)zse_splat_i32x16((*(a_3 + 5LL)))));
          totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_6, (__m512i)zse_splat_i32x16((*(a + 6LL)))));
          totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_6, (__m512i)zse_splat_i32x16((*(a_1 + 6LL)))));
          totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_6, (__m512i)zse_splat_i32x16((*(a_2 + 6LL)))));
          totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_6, (__m512i)zse_splat_i32x16((*(a_3 + 6LL)))));
          totals = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals, (__m512i)w_7, (__m512i)zse_splat_i32x16((*(a + 7LL)))));
          totals_1 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_1, (__m512i)w_7, (__m512i)zse_splat_i32x16((*(a_1 + 7LL)))));
          totals_2 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_2, (__m512i)w_7, (__m512i)zse_splat_i32x16((*(a_2 + 7LL)))));
          totals_3 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_3, (__m512i)w_7, (__m512i)zse_splat_i32x16((*(a_3 + 7LL)))));
          acc = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals, f32x16), (scales * zse_splat_f32x16((*(sa_rows + block_)))), acc));
          acc = ((f32x16)_mm512_fmadd_ps(scales_1, zse_splat_f32x16((*(su_rows + block_))), acc));
          acc_1 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_1, f32x16), (scales * zse_splat_f32x16((*(sa_rows_1 + block_)))), acc_1));
          acc_1 = ((f32x16)_mm512_fmadd_ps(scales_1, zse_splat_f32x16((*(su_rows_1 + block_))), acc_1));
          acc_2 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_2, f32x16), (scales * zse_splat_f32x16((*(sa_rows_2 + block_)))), acc_2));
          acc_2 = ((f32x16)_mm512_fmadd_ps(scales_1, zse_splat_f32x16((*(su_rows_2 + block_))), acc_2));
          acc_3 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_3, f32x16), (scales * zse_splat_f32x16((*(sa_rows_3 + block_)))), acc_3));
          acc_3 = ((f32x16)_mm512_fmadd_ps(scales_1, zse_splat_f32x16((*(su_rows_3 + block_))), acc_3));
        }
        if (((token + 0LL) < token_last)) {
          float * out_1 = (out + (at * rows));
          int64_t row = ((tile * 16LL) + (parts * 16LL));
          f32x16 total = acc;
          if ((has_bias != 0LL)) {
            if (((row + 16LL) <= rows)) {
              total = (total + (*(const f32x16_mem *)(bias + row)));
            }
          }
          if (((row + 16LL) <= rows)) {
            *(f32x16_mem *)(out_1 + row) = total;
          } else {
            float scratch[16] __attribute__((aligned(64)));
            float * spill = scratch;
            *(f32x16_mem *)spill = total;
            for (int64_t r = row; r < rows; r += 1LL) {
              if ((has_bias != 0LL)) {
                *(out_1 + r) = ((*(spill + (r - row))) + (*(bias + r)));
              } else {
                *(out_1 + r) = (*(spill + (r - row)));
              }
            }
          }
        }
        if (((token + 1LL) < token_last)) {
          float * out_2 = (out + (at_1 * rows));
          int64_t row_1 = ((tile * 16LL) + (parts * 16LL));
          f32x16 total_1 = acc_1;
          if ((has_bias != 0LL)) {
            if (((row_1 + 16LL) <= rows)) {
              total_1 = (total_1 + (*(const f32x16_mem *)(bias + row_1)));
            }
          }
          if (((row_1 + 16LL) <= rows)) {
            *(f32x16_mem *)(out_2 + row_1) = total_1;
          } else {
            float scratch_1[16] __attribute__((aligned(64)));
            float * spill_1 = scratch_1;
            *(f32x16_mem *)spill_1 = total_1;
            for (int64_t r_1 = row_1; r_1 < rows; r_1 += 1LL) {
              if ((has_bias != 0LL)) {
                *(out_2 + r_1) = ((*(spill_1 + (r_1 - row_1))) + (*(bias + r_1)));
              } else {
                *(out_2 + r_1) = (*(spill_1 + (r_1 - row_1)));
              }
            }
          }
        }
        if (((token + 2LL) < token_last)) {
          float * out_3 = (out + (at_2 * rows));
          int64_t row_2 = ((tile * 16LL) + (parts * 16LL));
          f32x16 total_2 = acc_2;
          if ((has_bias != 0LL)) {
            if (((row_2 + 16LL) <= rows)) {
              total_2 = (total_2 + (*(const f32x16_mem *)(bias + row_2)));
            }
          }
          if (((row_2 + 16LL) <= rows)) {
            *(f32x16_mem *)(out_3 + row_2) = total_2;
          } else {
            float scratch_2[16] __attribute__((aligned(64)));
            float * spill_2 = scratch_2;
            *(f32x16_mem *)spill_2 = total_2;
            for (int64_t r_2 = row_2; r_2 < rows; r_2 += 1LL) {
              if ((has_bias != 0LL)) {
                *(out_3 + r_2) = ((*(spill_2 + (r_2 - row_2))) + (*(bias + r_2)));
              } else {
                *(out_3 + r_2) = (*(spill_2 + (r_2 - row_2)));
              }
            }
          }
        }
        if (((token + 3LL) < token_last)) {
          float * out_4 = (out + (at_3 * rows));
          int64_t row_3 = ((tile * 16LL) + (parts * 16LL));
          f32x16 total_3 = acc_3;
          if ((has_bias != 0LL)) {
            if (((row_3 + 16LL) <= rows)) {
              total_3 = (total_3 + (*(const f32x16_mem *)(bias + row_3)));
            }
          }
          if (((row_3 + 16LL) <= rows)) {
            *(f32x16_mem *)(out_4 + row_3) = total_3;
          } else {
            float scratch_3[16] __attribute__((aligned(64)));
            float * spill_3 = scratch_3;
            *(f32x16_mem *)spill_3 = total_3;
            for (int64_t r_3 = row_3; r_3 < rows; r_3 += 1LL) {
              if ((has_bias != 0LL)) {
                *(out_4 + r_3) = ((*(spill_3 + (r_3 - row_3))) + (*(bias + r_3)));
              } else {
                *(out_4 + r_3) = (*(spill_3 + (r_3 - row_3)));
              }
            }
          }
        }
      }
    }
  }
}
