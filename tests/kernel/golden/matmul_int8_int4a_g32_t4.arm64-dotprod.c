#include <math.h>
#include <stdint.h>
#include <arm_neon.h>
typedef union { uint64_t slot; float f32; double f64; } zse_slot;

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x4_mem __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4_mem __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t f16x4 __attribute__((vector_size(8)));
typedef uint16_t f16x4_mem __attribute__((vector_size(8), aligned(1), may_alias));
typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef int16_t i16x8_mem __attribute__((vector_size(16), aligned(1), may_alias));

static inline int64_t zse_minimum_i64(int64_t a, int64_t b) { return (a < b ? a : b); }
static inline f32x4 zse_splat_f32x4(float a) { return (f32x4){a, a, a, a}; }
static inline i32x4 zse_splat_i32x4(int32_t a) { return (i32x4){a, a, a, a}; }
static inline float zse_f32_of_f16(uint16_t a) { __fp16 h; __builtin_memcpy(&h, &a, 2); return h; }
static inline f32x4 zse_f32_of_f16_f32x4(f16x4 a) { f32x4 r; for (int i = 0; i < 4; ++i) r[i] = zse_f32_of_f16(a[i]); return r; }
static inline i32x4 zse_pairs_u8s8_i32x4(i32x4 w, i32x4 a) { uint8_t bw[16]; __builtin_memcpy(bw, &w, sizeof w); int8_t ba[16]; __builtin_memcpy(ba, &a, sizeof a); int16_t r[8]; for (int i = 0; i < 8; ++i) { int s = bw[2 * i] * ba[2 * i] + bw[2 * i + 1] * ba[2 * i + 1]; r[i] = s > 32767 ? 32767 : s < -32768 ? -32768 : s; } __builtin_memcpy(&w, r, sizeof w); return w; }
static inline i32x4 zse_pairs_i16_i32x4(i32x4 v) { int8_t bv[16]; __builtin_memcpy(bv, &v, sizeof v); int16_t h[8]; __builtin_memcpy(h, &v, sizeof v); for (int i = 0; i < 4; ++i) v[i] = h[2 * i] + h[2 * i + 1]; return v; }
static inline f32x4 zse_fma_f32x4(f32x4 a, f32x4 b, f32x4 c) { f32x4 r; for (int i = 0; i < 4; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]); return r; }

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
    for (int64_t first_part = 0LL; first_part < 4LL; first_part += 1LL) {
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
        f32x4 acc = zse_splat_f32x4((0.0f));
        f32x4 acc_1 = zse_splat_f32x4((0.0f));
        f32x4 acc_2 = zse_splat_f32x4((0.0f));
        f32x4 acc_3 = zse_splat_f32x4((0.0f));
        for (int64_t block_ = 0LL; block_ < blocks; block_ += 1LL) {
          i32x4 packed = (*(const i32x4_mem *)((q_tile + (block_ * 64LL)) + (0LL + (parts * 4LL))));
          i32x4 packed_1 = (*(const i32x4_mem *)((q_tile + (block_ * 64LL)) + (16LL + (parts * 4LL))));
          i32x4 packed_2 = (*(const i32x4_mem *)((q_tile + (block_ * 64LL)) + (32LL + (parts * 4LL))));
          i32x4 packed_3 = (*(const i32x4_mem *)((q_tile + (block_ * 64LL)) + (48LL + (parts * 4LL))));
          i32x4 w = (packed & zse_splat_i32x4(252645135));
          i32x4 w_1 = (packed_1 & zse_splat_i32x4(252645135));
          i32x4 w_2 = (packed_2 & zse_splat_i32x4(252645135));
          i32x4 w_3 = (packed_3 & zse_splat_i32x4(252645135));
          i32x4 w_4 = ((packed >> zse_splat_i32x4(4)) & zse_splat_i32x4(252645135));
          i32x4 w_5 = ((packed_1 >> zse_splat_i32x4(4)) & zse_splat_i32x4(252645135));
          i32x4 w_6 = ((packed_2 >> zse_splat_i32x4(4)) & zse_splat_i32x4(252645135));
          i32x4 w_7 = ((packed_3 >> zse_splat_i32x4(4)) & zse_splat_i32x4(252645135));
          f32x4 s = zse_f32_of_f16_f32x4((*(const f16x4_mem *)((scale_tile + (block_ * 16LL)) + (parts * 4LL))));
          f32x4 unit = s;
          f32x4 o = zse_f32_of_f16_f32x4((*(const f16x4_mem *)((offset_tile + (block_ * 16LL)) + (parts * 4LL))));
          f32x4 scales = unit;
          f32x4 scales_1 = o;
          const int32_t * a = ((const int32_t *)(a_rows + (block_ * 32LL)));
          const int32_t * a_1 = ((const int32_t *)(a_rows_1 + (block_ * 32LL)));
          const int32_t * a_2 = ((const int32_t *)(a_rows_2 + (block_ * 32LL)));
          const int32_t * a_3 = ((const int32_t *)(a_rows_3 + (block_ * 32LL)));
          i32x4 totals = zse_splat_i32x4(0);
          i32x4 totals_1 = zse_splat_i32x4(0);
          i32x4 totals_2 = zse_splat_i32x4(0);
          i32x4 totals_3 = zse_splat_i32x4(0);
          i32x4 sums = zse_pairs_u8s8_i32x4(w, zse_splat_i32x4((*a)));
          i32x4 sums_1 = zse_pairs_u8s8_i32x4(w, zse_splat_i32x4((*a_1)));
          i32x4 sums_2 = zse_pairs_u8s8_i32x4(w, zse_splat_i32x4((*a_2)));
          i32x4 sums_3 = zse_pairs_u8s8_i32x4(w, zse_splat_i32x4((*a_3)));
          sums = ((i32x4)((i16x8)sums + (i16x8)zse_pairs_u8s8_i32x4(w_1, zse_splat_i32x4((*(a + 1LL))))));
          sums_1 = ((i32x4)((i16x8)sums_1 + (i16x8)zse_pairs_u8s8_i32x4(w_1, zse_splat_i32x4((*(a_1 + 1LL))))));
          sums_2 = ((i32x4)((i16x8)sums_2 + (i16x8)zse_pairs_u8s8_i32x4(w_1, zse_splat_i32x4((*(a_2 + 1LL))))));
          sums_3 = ((i32x4)((i16x8)sums_3 + (i16x8)zse_pairs_u8s8_i32x4(w_1, zse_splat_i32x4((*(a_3 + 1LL))))));
          sums = ((i32x4)((i16x8)sums + (i16x8)zse_pairs_u8s8_i32x4(w_2, zse_splat_i32x4((*(a + 2LL))))));
          sums_1 = ((i32x4)((i16x8)sums_1 + (i16x8)zse_pairs_u8s8_i32x4(w_2, zse_splat_i32x4((*(a_1 + 2LL))))));
          sums_2 = ((i32x4)((i16x8)sums_2 + (i16x8)zse_pairs_u8s8_i32x4(w_2, zse_splat_i32x4((*(a_2 + 2LL))))));
          sums_3 = ((i32x4)((i16x8)sums_3 + (i16x8)zse_pairs_u8s8_i32x4(w_2, zse_splat_i32x4((*(a_3 + 2LL))))));
          sums = ((i32x4)((i16x8)sums + (i16x8)zse_pairs_u8s8_i32x4(w_3, zse_splat_i32x4((*(a + 3LL))))));
          sums_1 = ((i32x4)((i16x8)sums_1 + (i16x8)zse_pairs_u8s8_i32x4(w_3, zse_splat_i32x4((*(a_1 + 3LL))))));
          sums_2 = ((i32x4)((i16x8)sums_2 + (i16x8)zse_pairs_u8s8_i32x4(w_3, zse_splat_i32x4((*(a_2 + 3LL))))));
          sums_3 = ((i32x4)((i16x8)sums_3 + (i16x8)zse_pairs_u8s8_i32x4(w_3, zse_splat_i32x4((*(a_3 + 3LL))))));
          sums = ((i32x4)((i16x8)sums + (i16x8)zse_pairs_u8s8_i32x4(w_4, zse_splat_i32x4((*(a + 4LL))))));
          sums_1 = ((i32x4)((i16x8)sums_1 + (i16x8)zse_pairs_u8s8_i32x4(w_4, zse_splat_i32x4((*(a_1 + 4LL))))));
          sums_2 = ((i32x4)((i16x8)sums_2 + (i16x8)zse_pairs_u8s8_i32x4(w_4, zse_splat_i32x4((*(a_2 + 4LL))))));
          sums_3 = ((i32x4)((i16x8)sums_3 + (i16x8)zse_pairs_u8s8_i32x4(w_4, zse_splat_i32x4((*(a_3 + 4LL))))));
          sums = ((i32x4)((i16x8)sums + (i16x8)zse_pairs_u8s8_i32x4(w_5, zse_splat_i32x4((*(a + 5LL))))));
          sums_1 = ((i32x4)((i16x8)sums_1 + (i16x8)zse_pairs_u8s8_i32x4(w_5, zse_splat_i32x4((*(a_1 + 5LL))))));
          sums_2 = ((i32x4)((i16x8)sums_2 + (i16x8)zse_pairs_u8s8_i32x4(w_5, zse_splat_i32x4((*(a_2 + 5LL))))));
          sums_3 = ((i32x4)((i16x8)sums_3 + (i16x8)zse_pairs_u8s8_i32x4(w_5, zse_splat_i32x4((*(a_3 + 5LL))))));
          sums = ((i32x4)((i16x8)sums + (i16x8)zse_pairs_u8s8_i32x4(w_6, zse_splat_i32x4((*(a + 6LL))))));
          sums_1 = ((i32x4)((i16x8)sums_1 + (i16x8)zse_pairs_u8s8_i32x4(w_6, zse_splat_i32x4((*(a_1 + 6LL))))));
          sums_2 = ((i32x4)((i16x8)sums_2 + (i16x8)zse_pairs_u8s8_i32x4(w_6, zse_splat_i32x4((*(a_2 + 6LL))))));
          sums_3 = ((i32x4)((i16x8)sums_3 + (i16x8)zse_pairs_u8s8_i32x4(w_6, zse_splat_i32x4((*(a_3 + 6LL))))));
          sums = ((i32x4)((i16x8)sums + (i16x8)zse_pairs_u8s8_i32x4(w_7, zse_splat_i32x4((*(a + 7LL))))));
          sums_1 = ((i32x4)((i16x8)sums_1 + (i16x8)zse_pairs_u8s8_i32x4(w_7, zse_splat_i32x4((*(a_1 + 7LL))))));
          sums_2 = ((i32x4)((i16x8)sums_2 + (i16x8)zse_pairs_u8s8_i32x4(w_7, zse_splat_i32x4((*(a_2 + 7LL))))));
          sums_3 = ((i32x4)((i16x8)sums_3 + (i16x8)zse_pairs_u8s8_i32x4(w_7, zse_splat_i32x4((*(a_3 + 7LL))))));
          totals = (totals + zse_pairs_i16_i32x4(sums));
          totals_1 = (totals_1 + zse_pairs_i16_i32x4(sums_1));
          totals_2 = (totals_2 + zse_pairs_i16_i32x4(sums_2));
          totals_3 = (totals_3 + zse_pairs_i16_i32x4(sums_3));
          acc = zse_fma_f32x4(__builtin_convertvector(totals, f32x4), (scales * zse_splat_f32x4((*(sa_rows + block_)))), acc);
          acc = zse_fma_f32x4(scales_1, zse_splat_f32x4((*(su_rows + block_))), acc);
          acc_1 = zse_fma_f32x4(__builtin_convertvector(totals_1, f32x4), (scales * zse_splat_f32x4((*(sa_rows_1 + block_)))), acc_1);
          acc_1 = zse_fma_f32x4(scales_1, zse_splat_f32x4((*(su_rows_1 + block_))), acc_1);
          acc_2 = zse_fma_f32x4(__builtin_convertvector(totals_2, f32x4), (scales * zse_splat_f32x4((*(sa_rows_2 + block_)))), acc_2);
          acc_2 = zse_fma_f32x4(scales_1, zse_splat_f32x4((*(su_rows_2 + block_))), acc_2);
          acc_3 = zse_fma_f32x4(__builtin_convertvector(totals_3, f32x4), (scales * zse_splat_f32x4((*(sa_rows_3 + block_)))), acc_3);
          acc_3 = zse_fma_f32x4(scales_1, zse_splat_f32x4((*(su_rows_3 + block_))), acc_3);
        }
        if (((token + 0LL) < token_last)) {
          float * out_1 = (out + (at * rows));
          int64_t row = ((tile * 16LL) + (parts * 4LL));
          f32x4 total = acc;
          if ((has_bias != 0LL)) {
            if (((row + 4LL) <= rows)) {
              total = (total + (*(const f32x4_mem *)(bias + row)));
            }
          }
          if (((row + 4LL) <= rows)) {
            *(f32x4_mem *)(out_1 + row) = total;
          } else {
            float scratch[16] __attribute__((aligned(64)));
            float * spill = scratch;
            *(f32x4_mem *)spill = total;
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
          int64_t row_1 = ((tile * 16LL) + (parts * 4LL));
          f32x4 total_1 = acc_1;
          if ((has_bias != 0LL)) {
            if (((row_1 + 4LL) <= rows)) {
              total_1 = (total_1 + (*(const f32x4_mem *)(bias + row_1)));
            }
          }
          if (((row_1 + 4LL) <= rows)) {
            *(f32x4_mem *)(out_2 + row_1) = total_1;
          } else {
            float scratch_1[16] __attribute__((aligned(64)));
            float * spill_1 = scratch_1;
            *(f32x4_mem *)spill_1 = total_1;
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
          int64_t row_2 = ((tile * 16LL) + (parts * 4LL));
          f32x4 total_2 = acc_2;
          if ((has_bias != 0LL)) {
            if (((row_2 + 4LL) <= rows)) {
              total_2 = (total_2 + (*(const f32x4_mem *)(bias + row_2)));
            }
          }
          if (((row_2 + 4LL) <= rows)) {
            *(f32x4_mem *)(out_3 + row_2) = total_2;
          } else {
            float scratch_2[16] __attribute__((aligned(64)));
            float * spill_2 = scratch_2;
            *(f32x4_mem *)spill_2 = total_2;
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
          int64_t row_3 = ((tile * 16LL) + (parts * 4LL));
          f32x4 total_3 = acc_3;
          if ((has_bias != 0LL)) {
            if (((row_3 + 4LL) <= rows)) {
              total_3 = (total_3 + (*(const f32x4_mem *)(bias + row_3)));
            }
          }
          if (((row_3 + 4LL) <= rows)) {
            *(f32x4_mem *)(out_4 + row_3) = total_3;
          } else {
            float scratch_3[16] __attribute__((aligned(64)));
            float * spill_3 = scratch_3;
            *(f32x4_mem *)spill_3 = total_3;
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
