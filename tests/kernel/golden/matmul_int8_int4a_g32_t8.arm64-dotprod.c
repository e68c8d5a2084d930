#include <math.h>
#include <stdint.h>
#include <arm_neon.h>
typedef union { uint64_t slot; float f32; double f64; } zse_slot;

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x4_mem __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4_mem __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16_mem __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t f16x4 __attribute__((vector_size(8)));
typedef uint16_t f16x4_mem __attribute__((vector_size(8), aligned(1), may_alias));

static inline __attribute__((always_inline)) int64_t zse_minimum_i64(int64_t a, int64_t b) { return (a < b ? a : b); }
static inline __attribute__((always_inline)) f32x4 zse_splat_f32x4(float a) { return (f32x4){a, a, a, a}; }
static inline __attribute__((always_inline)) i32x4 zse_splat_i32x4(int32_t a) { return (i32x4){a, a, a, a}; }
static inline __attribute__((always_inline)) u8x16 zse_splat_u8x16(uint8_t a) { return (u8x16){a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a}; }

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
    for (int64_t first_part = 0LL; first_part < 4LL; first_part += 1LL) {
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
          f32x4 acc = zse_splat_f32x4((0.0f));
          f32x4 acc_1 = zse_splat_f32x4((0.0f));
          f32x4 acc_2 = zse_splat_f32x4((0.0f));
          f32x4 acc_3 = zse_splat_f32x4((0.0f));
          for (int64_t block_ = 0LL; block_ < blocks; block_ += 1LL) {
            int64_t block__1 = (block_ + 16LL);
            __builtin_prefetch((planes + (block__1 * 64LL)), 0, 2);
            __builtin_prefetch(((planes + (block__1 * 64LL)) + 16LL), 0, 2);
            __builtin_prefetch(((planes + (block__1 * 64LL)) + 32LL), 0, 2);
            __builtin_prefetch(((planes + (block__1 * 64LL)) + 48LL), 0, 2);
            int64_t group = block__1;
            __builtin_prefetch((planes_2 + (group * 16LL)), 0, 2);
            __builtin_prefetch((planes_3 + (group * 16LL)), 0, 2);
            int64_t row_4 = (parts * 4LL);
            i32x4 packed = (*(const i32x4_mem *)((planes + (block_ * 64LL)) + (0LL + row_4)));
            i32x4 packed_1 = (*(const i32x4_mem *)((planes + (block_ * 64LL)) + (16LL + row_4)));
            i32x4 packed_2 = (*(const i32x4_mem *)((planes + (block_ * 64LL)) + (32LL + row_4)));
            i32x4 packed_3 = (*(const i32x4_mem *)((planes + (block_ * 64LL)) + (48LL + row_4)));
            i32x4 w = (packed & zse_splat_i32x4(252645135));
            i32x4 w_1 = (packed_1 & zse_splat_i32x4(252645135));
            i32x4 w_2 = (packed_2 & zse_splat_i32x4(252645135));
            i32x4 w_3 = (packed_3 & zse_splat_i32x4(252645135));
            i32x4 w_4 = ((i32x4)(((u8x16)packed) >> zse_splat_u8x16(4)));
            i32x4 w_5 = ((i32x4)(((u8x16)packed_1) >> zse_splat_u8x16(4)));
            i32x4 w_6 = ((i32x4)(((u8x16)packed_2) >> zse_splat_u8x16(4)));
            i32x4 w_7 = ((i32x4)(((u8x16)packed_3) >> zse_splat_u8x16(4)));
            f32x4 s = ((f32x4)vcvt_f32_f16((float16x4_t)(*(const f16x4_mem *)((planes_2 + (block_ * 16LL)) + (parts * 4LL)))));
            f32x4 value_5 = s;
            f32x4 value_6 = ((f32x4)vcvt_f32_f16((float16x4_t)(*(const f16x4_mem *)((planes_3 + (block_ * 16LL)) + (parts * 4LL)))));
            f32x4 s_1 = value_5;
            f32x4 o = value_6;
            f32x4 unit = s_1;
            f32x4 scales = unit;
            f32x4 scales_1 = o;
            const int32_t * q_1 = ((const int32_t *)(a + (block_ * 32LL)));
            const int32_t * q_2 = ((const int32_t *)(a_1 + (block_ * 32LL)));
            const int32_t * q_3 = ((const int32_t *)(a_2 + (block_ * 32LL)));
            const int32_t * q_4 = ((const int32_t *)(a_3 + (block_ * 32LL)));
            i32x4 totals = zse_splat_i32x4(0);
            i32x4 totals_1 = zse_splat_i32x4(0);
            i32x4 totals_2 = zse_splat_i32x4(0);
            i32x4 totals_3 = zse_splat_i32x4(0);
            i32x4 values = (*(const i32x4_mem *)q_1);
            i32x4 values_1 = (*(const i32x4_mem *)q_2);
            i32x4 values_2 = (*(const i32x4_mem *)q_3);
            i32x4 values_3 = (*(const i32x4_mem *)q_4);
            totals = ((i32x4)vdotq_laneq_s32((int32x4_t)totals, (int8x16_t)w, (int8x16_t)values, 0));
            totals_1 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_1, (int8x16_t)w, (int8x16_t)values_1, 0));
            totals_2 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_2, (int8x16_t)w, (int8x16_t)values_2, 0));
            totals_3 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_3, (int8x16_t)w, (int8x16_t)values_3, 0));
            totals = ((i32x4)vdotq_laneq_s32((int32x4_t)totals, (int8x16_t)w_1, (int8x16_t)values, 1));
            totals_1 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_1, (int8x16_t)w_1, (int8x16_t)values_1, 1));
            totals_2 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_2, (int8x16_t)w_1, (int8x16_t)values_2, 1));
            totals_3 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_3, (int8x16_t)w_1, (int8x16_t)values_3, 1));
            totals = ((i32x4)vdotq_laneq_s32((int32x4_t)totals, (int8x16_t)w_2, (int8x16_t)values, 2));
            totals_1 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_1, (int8x16_t)w_2, (int8x16_t)values_1, 2));
            totals_2 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_2, (int8x16_t)w_2, (int8x16_t)values_2, 2));
            totals_3 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_3, (int8x16_t)w_2, (int8x16_t)values_3, 2));
            totals = ((i32x4)vdotq_laneq_s32((int32x4_t)totals, (int8x16_t)w_3, (int8x16_t)values, 3));
            totals_1 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_1, (int8x16_t)w_3, (int8x16_t)values_1, 3));
            totals_2 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_2, (int8x16_t)w_3, (int8x16_t)values_2, 3));
            totals_3 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_3, (int8x16_t)w_3, (int8x16_t)values_3, 3));
            i32x4 values_4 = (*(const i32x4_mem *)(q_1 + 4LL));
            i32x4 values_5 = (*(const i32x4_mem *)(q_2 + 4LL));
            i32x4 values_6 = (*(const i32x4_mem *)(q_3 + 4LL));
            i32x4 values_7 = (*(const i32x4_mem *)(q_4 + 4LL));
            totals = ((i32x4)vdotq_laneq_s32((int32x4_t)totals, (int8x16_t)w_4, (int8x16_t)values_4, 0));
            totals_1 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_1, (int8x16_t)w_4, (int8x16_t)values_5, 0));
            totals_2 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_2, (int8x16_t)w_4, (int8x16_t)values_6, 0));
            totals_3 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_3, (int8x16_t)w_4, (int8x16_t)values_7, 0));
            totals = ((i32x4)vdotq_laneq_s32((int32x4_t)totals, (int8x16_t)w_5, (int8x16_t)values_4, 1));
            totals_1 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_1, (int8x16_t)w_5, (int8x16_t)values_5, 1));
            totals_2 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_2, (int8x16_t)w_5, (int8x16_t)values_6, 1));
            totals_3 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_3, (int8x16_t)w_5, (int8x16_t)values_7, 1));
            totals = ((i32x4)vdotq_laneq_s32((int32x4_t)totals, (int8x16_t)w_6, (int8x16_t)values_4, 2));
            totals_1 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_1, (int8x16_t)w_6, (int8x16_t)values_5, 2));
            totals_2 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_2, (int8x16_t)w_6, (int8x16_t)values_6, 2));
            totals_3 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_3, (int8x16_t)w_6, (int8x16_t)values_7, 2));
            totals = ((i32x4)vdotq_laneq_s32((int32x4_t)totals, (int8x16_t)w_7, (int8x16_t)values_4, 3));
            totals_1 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_1, (int8x16_t)w_7, (int8x16_t)values_5, 3));
            totals_2 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_2, (int8x16_t)w_7, (int8x16_t)values_6, 3));
            totals_3 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_3, (int8x16_t)w_7, (int8x16_t)values_7, 3));
            acc = ((f32x4)vfmaq_f32(acc, __builtin_convertvector(totals, f32x4), (scales * zse_splat_f32x4((*(a_4 + block_))))));
            acc = ((f32x4)vfmaq_f32(acc, scales_1, zse_splat_f32x4((*(a_8 + block_)))));
            acc_1 = ((f32x4)vfmaq_f32(acc_1, __builtin_convertvector(totals_1, f32x4), (scales * zse_splat_f32x4((*(a_5 + block_))))));
            acc_1 = ((f32x4)vfmaq_f32(acc_1, scales_1, zse_splat_f32x4((*(a_9 + block_)))));
            acc_2 = ((f32x4)vfmaq_f32(acc_2, __builtin_convertvector(totals_2, f32x4), (scales * zse_splat_f32x4((*(a_6 + block_))))));
            acc_2 = ((f32x4)vfmaq_f32(acc_2, scales_1, zse_splat_f32x4((*(a_10 + block_)))));
            acc_3 = ((f32x4)vfmaq_f32(acc_3, __builtin_convertvector(totals_3, f32x4), (scales * zse_splat_f32x4((*(a_7 + block_))))));
            acc_3 = ((f32x4)vfmaq_f32(acc_3, scales_1, zse_splat_f32x4((*(a_11 + block_)))));
          }
          if (((token + 0LL) < token_last)) {
            float * out_1 = (out + (at * rows));
            const float * bias_1 = (bias + (expert_1 * rows));
            int64_t row_5 = ((tile * 16LL) + (parts * 4LL));
            f32x4 total = acc;
            if ((has_bias != 0LL)) {
              if (((row_5 + 4LL) <= rows)) {
                total = (total + (*(const f32x4_mem *)(bias_1 + row_5)));
              }
            }
            if (((row_5 + 4LL) <= rows)) {
              *(f32x4_mem *)(out_1 + row_5) = total;
            } else {
              float scratch[16] __attribute__((aligned(64)));
              float * spill = scratch;
              *(f32x4_mem *)spill = total;
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
            int64_t row_6 = ((tile * 16LL) + (parts * 4LL));
            f32x4 total_1 = acc_1;
            if ((has_bias != 0LL)) {
              if (((row_6 + 4LL) <= rows)) {
                total_1 = (total_1 + (*(const f32x4_mem *)(bias_2 + row_6)));
              }
            }
            if (((row_6 + 4LL) <= rows)) {
              *(f32x4_mem *)(out_2 + row_6) = total_1;
            } else {
              float scratch_1[16] __attribute__((aligned(64)));
              float * spill_1 = scratch_1;
              *(f32x4_mem *)spill_1 = total_1;
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
            int64_t row_7 = ((tile * 16LL) + (parts * 4LL));
            f32x4 total_2 = acc_2;
            if ((has_bias != 0LL)) {
              if (((row_7 + 4LL) <= rows)) {
                total_2 = (total_2 + (*(const f32x4_mem *)(bias_3 + row_7)));
              }
            }
            if (((row_7 + 4LL) <= rows)) {
              *(f32x4_mem *)(out_3 + row_7) = total_2;
            } else {
              float scratch_2[16] __attribute__((aligned(64)));
              float * spill_2 = scratch_2;
              *(f32x4_mem *)spill_2 = total_2;
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
            int64_t row_8 = ((tile * 16LL) + (parts * 4LL));
            f32x4 total_3 = acc_3;
            if ((has_bias != 0LL)) {
              if (((row_8 + 4LL) <= rows)) {
                total_3 = (total_3 + (*(const f32x4_mem *)(bias_4 + row_8)));
              }
            }
            if (((row_8 + 4LL) <= rows)) {
              *(f32x4_mem *)(out_4 + row_8) = total_3;
            } else {
              float scratch_3[16] __attribute__((aligned(64)));
              float * spill_3 = scratch_3;
              *(f32x4_mem *)spill_3 = total_3;
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
          f32x4 acc_4 = zse_splat_f32x4((0.0f));
          f32x4 acc_5 = zse_splat_f32x4((0.0f));
          f32x4 acc_6 = zse_splat_f32x4((0.0f));
          f32x4 acc_7 = zse_splat_f32x4((0.0f));
          f32x4 acc_8 = zse_splat_f32x4((0.0f));
          f32x4 acc_9 = zse_splat_f32x4((0.0f));
          f32x4 acc_10 = zse_splat_f32x4((0.0f));
          f32x4 acc_11 = zse_splat_f32x4((0.0f));
          for (int64_t block__2 = 0LL; block__2 < blocks; block__2 += 1LL) {
            int64_t block__3 = (block__2 + 16LL);
            __builtin_prefetch((planes + (block__3 * 64LL)), 0, 2);
            __builtin_prefetch(((planes + (block__3 * 64LL)) + 16LL), 0, 2);
            __builtin_prefetch(((planes + (block__3 * 64LL)) + 32LL), 0, 2);
            __builtin_prefetch(((planes + (block__3 * 64LL)) + 48LL), 0, 2);
            int64_t group_1 = block__3;
            __builtin_prefetch((planes_2 + (group_1 * 16LL)), 0, 2);
            __builtin_prefetch((planes_3 + (group_1 * 16LL)), 0, 2);
            int64_t row_17 = (parts_1 * 4LL);
            i32x4 packed_4 = (*(const i32x4_mem *)((planes + (block__2 * 64LL)) + (0LL + row_17)));
            i32x4 packed_5 = (*(const i32x4_mem *)((planes + (block__2 * 64LL)) + (16LL + row_17)));
            i32x4 packed_6 = (*(const i32x4_mem *)((planes + (block__2 * 64LL)) + (32LL + row_17)));
            i32x4 packed_7 = (*(const i32x4_mem *)((planes + (block__2 * 64LL)) + (48LL + row_17)));
            i32x4 w_8 = (packed_4 & zse_splat_i32x4(252645135));
            i32x4 w_9 = (packed_5 & zse_splat_i32x4(252645135));
            i32x4 w_10 = (packed_6 & zse_splat_i32x4(252645135));
            i32x4 w_11 = (packed_7 & zse_splat_i32x4(252645135));
            i32x4 w_12 = ((i32x4)(((u8x16)packed_4) >> zse_splat_u8x16(4)));
            i32x4 w_13 = ((i32x4)(((u8x16)packed_5) >> zse_splat_u8x16(4)));
            i32x4 w_14 = ((i32x4)(((u8x16)packed_6) >> zse_splat_u8x16(4)));
            i32x4 w_15 = ((i32x4)(((u8x16)packed_7) >> zse_splat_u8x16(4)));
            f32x4 s_2 = ((f32x4)vcvt_f32_f16((float16x4_t)(*(const f16x4_mem *)((planes_2 + (block__2 * 16LL)) + (parts_1 * 4LL)))));
            f32x4 value_7 = s_2;
            f32x4 value_8 = ((f32x4)vcvt_f32_f16((float16x4_t)(*(const f16x4_mem *)((planes_3 + (block__2 * 16LL)) + (parts_1 * 4LL)))));
            f32x4 s_3 = value_7;
            f32x4 o_1 = value_8;
            f32x4 unit_1 = s_3;
            f32x4 scales_2 = unit_1;
            f32x4 scales_3 = o_1;
            const int32_t * q_5 = ((const int32_t *)(a_12 + (block__2 * 32LL)));
            const int32_t * q_6 = ((const int32_t *)(a_13 + (block__2 * 32LL)));
            const int32_t * q_7 = ((const int32_t *)(a_14 + (block__2 * 32LL)));
            const int32_t * q_8 = ((const int32_t *)(a_15 + (block__2 * 32LL)));
            const int32_t * q_9 = ((const int32_t *)(a_16 + (block__2 * 32LL)));
            const int32_t * q_10 = ((const int32_t *)(a_17 + (block__2 * 32LL)));
            const int32_t * q_11 = ((const int32_t *)(a_18 + (block__2 * 32LL)));
            const int32_t * q_12 = ((const int32_t *)(a_19 + (block__2 * 32LL)));
            i32x4 totals_4 = zse_splat_i32x4(0);
            i32x4 totals_5 = zse_splat_i32x4(0);
            i32x4 totals_6 = zse_splat_i32x4(0);
            i32x4 totals_7 = zse_splat_i32x4(0);
            i32x4 totals_8 = zse_splat_i32x4(0);
            i32x4 totals_9 = zse_splat_i32x4(0);
            i32x4 totals_10 = zse_splat_i32x4(0);
            i32x4 totals_11 = zse_splat_i32x4(0);
            i32x4 values_8 = (*(const i32x4_mem *)q_5);
            i32x4 values_9 = (*(const i32x4_mem *)q_6);
            i32x4 values_10 = (*(const i32x4_mem *)q_7);
            i32x4 values_11 = (*(const i32x4_mem *)q_8);
            i32x4 values_12 = (*(const i32x4_mem *)q_9);
            i32x4 values_13 = (*(const i32x4_mem *)q_10);
            i32x4 values_14 = (*(const i32x4_mem *)q_11);
            i32x4 values_15 = (*(const i32x4_mem *)q_12);
            totals_4 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_4, (int8x16_t)w_8, (int8x16_t)values_8, 0));
            totals_5 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_5, (int8x16_t)w_8, (int8x16_t)values_9, 0));
            totals_6 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_6, (int8x16_t)w_8, (int8x16_t)values_10, 0));
            totals_7 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_7, (int8x16_t)w_8, (int8x16_t)values_11, 0));
            totals_8 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_8, (int8x16_t)w_8, (int8x16_t)values_12, 0));
            totals_9 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_9, (int8x16_t)w_8, (int8x16_t)values_13, 0));
            totals_10 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_10, (int8x16_t)w_8, (int8x16_t)values_14, 0));
            totals_11 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_11, (int8x16_t)w_8, (int8x16_t)values_15, 0));
            totals_4 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_4, (int8x16_t)w_9, (int8x16_t)values_8, 1));
            totals_5 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_5, (int8x16_t)w_9, (int8x16_t)values_9, 1));
            totals_6 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_6, (int8x16_t)w_9, (int8x16_t)values_10, 1));
            totals_7 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_7, (int8x16_t)w_9, (int8x16_t)values_11, 1));
            totals_8 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_8, (int8x16_t)w_9, (int8x16_t)values_12, 1));
            totals_9 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_9, (int8x16_t)w_9, (int8x16_t)values_13, 1));
            totals_10 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_10, (int8x16_t)w_9, (int8x16_t)values_14, 1));
            totals_11 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_11, (int8x16_t)w_9, (int8x16_t)values_15, 1));
            totals_4 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_4, (int8x16_t)w_10, (int8x16_t)values_8, 2));
            totals_5 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_5, (int8x16_t)w_10, (int8x16_t)values_9, 2));
            totals_6 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_6, (int8x16_t)w_10, (int8x16_t)values_10, 2));
            totals_7 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_7, (int8x16_t)w_10, (int8x16_t)values_11, 2));
            totals_8 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_8, (int8x16_t)w_10, (int8x16_t)values_12, 2));
            totals_9 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_9, (int8x16_t)w_10, (int8x16_t)values_13, 2));
            totals_10 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_10, (int8x16_t)w_10, (int8x16_t)values_14, 2));
            totals_11 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_11, (int8x16_t)w_10, (int8x16_t)values_15, 2));
            totals_4 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_4, (int8x16_t)w_11, (int8x16_t)values_8, 3));
            totals_5 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_5, (int8x16_t)w_11, (int8x16_t)values_9, 3));
            totals_6 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_6, (int8x16_t)w_11, (int8x16_t)values_10, 3));
            totals_7 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_7, (int8x16_t)w_11, (int8x16_t)values_11, 3));
            totals_8 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_8, (int8x16_t)w_11, (int8x16_t)values_12, 3));
            totals_9 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_9, (int8x16_t)w_11, (int8x16_t)values_13, 3));
            totals_10 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_10, (int8x16_t)w_11, (int8x16_t)values_14, 3));
            totals_11 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_11, (int8x16_t)w_11, (int8x16_t)values_15, 3));
            i32x4 values_16 = (*(const i32x4_mem *)(q_5 + 4LL));
            i32x4 values_17 = (*(const i32x4_mem *)(q_6 + 4LL));
            i32x4 values_18 = (*(const i32x4_mem *)(q_7 + 4LL));
            i32x4 values_19 = (*(const i32x4_mem *)(q_8 + 4LL));
            i32x4 values_20 = (*(const i32x4_mem *)(q_9 + 4LL));
            i32x4 values_21 = (*(const i32x4_mem *)(q_10 + 4LL));
            i32x4 values_22 = (*(const i32x4_mem *)(q_11 + 4LL));
            i32x4 values_23 = (*(const i32x4_mem *)(q_12 + 4LL));
            totals_4 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_4, (int8x16_t)w_12, (int8x16_t)values_16, 0));
            totals_5 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_5, (int8x16_t)w_12, (int8x16_t)values_17, 0));
            totals_6 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_6, (int8x16_t)w_12, (int8x16_t)values_18, 0));
            totals_7 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_7, (int8x16_t)w_12, (int8x16_t)values_19, 0));
            totals_8 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_8, (int8x16_t)w_12, (int8x16_t)values_20, 0));
            totals_9 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_9, (int8x16_t)w_12, (int8x16_t)values_21, 0));
            totals_10 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_10, (int8x16_t)w_12, (int8x16_t)values_22, 0));
            totals_11 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_11, (int8x16_t)w_12, (int8x16_t)values_23, 0));
            totals_4 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_4, (int8x16_t)w_13, (int8x16_t)values_16, 1));
            totals_5 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_5, (int8x16_t)w_13, (int8x16_t)values_17, 1));
            totals_6 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_6, (int8x16_t)w_13, (int8x16_t)values_18, 1));
            totals_7 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_7, (int8x16_t)w_13, (int8x16_t)values_19, 1));
            totals_8 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_8, (int8x16_t)w_13, (int8x16_t)values_20, 1));
            totals_9 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_9, (int8x16_t)w_13, (int8x16_t)values_21, 1));
            totals_10 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_10, (int8x16_t)w_13, (int8x16_t)values_22, 1));
            totals_11 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_11, (int8x16_t)w_13, (int8x16_t)values_23, 1));
            totals_4 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_4, (int8x16_t)w_14, (int8x16_t)values_16, 2));
            totals_5 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_5, (int8x16_t)w_14, (int8x16_t)values_17, 2));
            totals_6 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_6, (int8x16_t)w_14, (int8x16_t)values_18, 2));
            totals_7 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_7, (int8x16_t)w_14, (int8x16_t)values_19, 2));
            totals_8 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_8, (int8x16_t)w_14, (int8x16_t)values_20, 2));
            totals_9 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_9, (int8x16_t)w_14, (int8x16_t)values_21, 2));
            totals_10 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_10, (int8x16_t)w_14, (int8x16_t)values_22, 2));
            totals_11 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_11, (int8x16_t)w_14, (int8x16_t)values_23, 2));
            totals_4 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_4, (int8x16_t)w_15, (int8x16_t)values_16, 3));
            totals_5 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_5, (int8x16_t)w_15, (int8x16_t)values_17, 3));
            totals_6 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_6, (int8x16_t)w_15, (int8x16_t)values_18, 3));
            totals_7 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_7, (int8x16_t)w_15, (int8x16_t)values_19, 3));
            totals_8 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_8, (int8x16_t)w_15, (int8x16_t)values_20, 3));
            totals_9 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_9, (int8x16_t)w_15, (int8x16_t)values_21, 3));
            totals_10 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_10, (int8x16_t)w_15, (int8x16_t)values_22, 3));
            totals_11 = ((i32x4)vdotq_laneq_s32((int32x4_t)totals_11, (int8x16_t)w_15, (int8x16_t)values_23, 3));
            acc_4 = ((f32x4)vfmaq_f32(acc_4, __builtin_convertvector(totals_4, f32x4), (scales_2 * zse_splat_f32x4((*(a_20 + block__2))))));
            acc_4 = ((f32x4)vfmaq_f32(acc_4, scales_3, zse_splat_f32x4((*(a_28 + block__2)))));
            acc_5 = ((f32x4)vfmaq_f32(acc_5, __builtin_convertvector(totals_5, f32x4), (scales_2 * zse_splat_f32x4((*(a_21 + block__2))))));
            acc_5 = ((f32x4)vfmaq_f32(acc_5, scales_3, zse_splat_f32x4((*(a_29 + block__2)))));
            acc_6 = ((f32x4)vfmaq_f32(acc_6, __builtin_convertvector(totals_6, f32x4), (scales_2 * zse_splat_f32x4((*(a_22 + block__2))))));
            acc_6 = ((f32x4)vfmaq_f32(acc_6, scales_3, zse_splat_f32x4((*(a_30 + block__2)))));
            acc_7 = ((f32x4)vfmaq_f32(acc_7, __builtin_convertvector(totals_7, f32x4), (scales_2 * zse_splat_f32x4((*(a_23 + block__2))))));
            acc_7 = ((f32x4)vfmaq_f32(acc_7, scales_3, zse_splat_f32x4((*(a_31 + block__2)))));
            acc_8 = ((f32x4)vfmaq_f32(acc_8, __builtin_convertvector(totals_8, f32x4), (scales_2 * zse_splat_f32x4((*(a_24 + block__2))))));
            acc_8 = ((f32x4)vfmaq_f32(acc_8, scales_3, zse_splat_f32x4((*(a_32 + block__2)))));
            acc_9 = ((f32x4)vfmaq_f32(acc_9, __builtin_convertvector(totals_9, f32x4), (scales_2 * zse_splat_f32x4((*(a_25 + block__2))))));
            acc_9 = ((f32x4)vfmaq_f32(acc_9, scales_3, zse_splat_f32x4((*(a_33 + block__2)))));
            acc_10 = ((f32x4)vfmaq_f32(acc_10, __builtin_convertvector(totals_10, f32x4), (scales_2 * zse_splat_f32x4((*(a_26 + block__2))))));
            acc_10 = ((f32x4)vfmaq_f32(acc_10, scales_3, zse_splat_f32x4((*(a_34 + block__2)))));
            acc_11 = ((f32x4)vfmaq_f32(acc_11, __builtin_convertvector(totals_11, f32x4), (scales_2 * zse_splat_f32x4((*(a_27 + block__2))))));
            acc_11 = ((f32x4)vfmaq_f32(acc_11, scales_3, zse_splat_f32x4((*(a_35 + block__2)))));
          }
          if (((token + 0LL) < token_last)) {
            float * out_5 = (out + (at_4 * rows));
            const float * bias_5 = (bias + (expert_1 * rows));
            int64_t row_18 = ((tile * 16LL) + (parts_1 * 4LL));
            f32x4 total_4 = acc_4;
            if ((has_bias != 0LL)) {
              if (((row_18 + 4LL) <= rows)) {
                total_4 = (total_4 + (*(const f32x4_mem *)(bias_5 + row_18)));
              }
            }
            if (((row_18 + 4LL) <= rows)) {
              *(f32x4_mem *)(out_5 + row_18) = total_4;
            } else {
              float scratch_4[16] __attribute__((aligned(64)));
              float * spill_4 = scratch_4;
              *(f32x4_mem *)spill_4 = total_4;
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
            int64_t row_19 = ((tile * 16LL) + (parts_1 * 4LL));
            f32x4 total_5 = acc_5;
            if ((has_bias != 0LL)) {
              if (((row_19 + 4LL) <= rows)) {
                total_5 = (total_5 + (*(const f32x4_mem *)(bias_6 + row_19)));
              }
            }
            if (((row_19 + 4LL) <= rows)) {
              *(f32x4_mem *)(out_6 + row_19) = total_5;
            } else {
              float scratch_5[16] __attribute__((aligned(64)));
              float * spill_5 = scratch_5;
              *(f32x4_mem *)spill_5 = total_5;
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
            int64_t row_20 = ((tile * 16LL) + (parts_1 * 4LL));
            f32x4 total_6 = acc_6;
            if ((has_bias != 0LL)) {
              if (((row_20 + 4LL) <= rows)) {
                total_6 = (total_6 + (*(const f32x4_mem *)(bias_7 + row_20)));
              }
            }
            if (((row_20 + 4LL) <= rows)) {
              *(f32x4_mem *)(out_7 + row_20) = total_6;
            } else {
              float scratch_6[16] __attribute__((aligned(64)));
              float * spill_6 = scratch_6;
              *(f32x4_mem *)spill_6 = total_6;
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
            int64_t row_21 = ((tile * 16LL) + (parts_1 * 4LL));
            f32x4 total_7 = acc_7;
            if ((has_bias != 0LL)) {
              if (((row_21 + 4LL) <= rows)) {
                total_7 = (total_7 + (*(const f32x4_mem *)(bias_8 + row_21)));
              }
            }
            if (((row_21 + 4LL) <= rows)) {
              *(f32x4_mem *)(out_8 + row_21) = total_7;
            } else {
              float scratch_7[16] __attribute__((aligned(64)));
              float * spill_7 = scratch_7;
              *(f32x4_mem *)spill_7 = total_7;
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
            int64_t row_22 = ((tile * 16LL) + (parts_1 * 4LL));
            f32x4 total_8 = acc_8;
            if ((has_bias != 0LL)) {
              if (((row_22 + 4LL) <= rows)) {
                total_8 = (total_8 + (*(const f32x4_mem *)(bias_9 + row_22)));
              }
            }
            if (((row_22 + 4LL) <= rows)) {
              *(f32x4_mem *)(out_9 + row_22) = total_8;
            } else {
              float scratch_8[16] __attribute__((aligned(64)));
              float * spill_8 = scratch_8;
              *(f32x4_mem *)spill_8 = total_8;
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
            int64_t row_23 = ((tile * 16LL) + (parts_1 * 4LL));
            f32x4 total_9 = acc_9;
            if ((has_bias != 0LL)) {
              if (((row_23 + 4LL) <= rows)) {
                total_9 = (total_9 + (*(const f32x4_mem *)(bias_10 + row_23)));
              }
            }
            if (((row_23 + 4LL) <= rows)) {
              *(f32x4_mem *)(out_10 + row_23) = total_9;
            } else {
              float scratch_9[16] __attribute__((aligned(64)));
              float * spill_9 = scratch_9;
              *(f32x4_mem *)spill_9 = total_9;
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
            int64_t row_24 = ((tile * 16LL) + (parts_1 * 4LL));
            f32x4 total_10 = acc_10;
            if ((has_bias != 0LL)) {
              if (((row_24 + 4LL) <= rows)) {
                total_10 = (total_10 + (*(const f32x4_mem *)(bias_11 + row_24)));
              }
            }
            if (((row_24 + 4LL) <= rows)) {
              *(f32x4_mem *)(out_11 + row_24) = total_10;
            } else {
              float scratch_10[16] __attribute__((aligned(64)));
              float * spill_10 = scratch_10;
              *(f32x4_mem *)spill_10 = total_10;
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
            int64_t row_25 = ((tile * 16LL) + (parts_1 * 4LL));
            f32x4 total_11 = acc_11;
            if ((has_bias != 0LL)) {
              if (((row_25 + 4LL) <= rows)) {
                total_11 = (total_11 + (*(const f32x4_mem *)(bias_12 + row_25)));
              }
            }
            if (((row_25 + 4LL) <= rows)) {
              *(f32x4_mem *)(out_12 + row_25) = total_11;
            } else {
              float scratch_11[16] __attribute__((aligned(64)));
              float * spill_11 = scratch_11;
              *(f32x4_mem *)spill_11 = total_11;
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
