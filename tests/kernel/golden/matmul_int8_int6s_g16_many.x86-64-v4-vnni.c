#include <math.h>
#include <stdint.h>
#include <immintrin.h>
typedef union { uint64_t slot; float f32; double f64; } zse_slot;

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x16_mem __attribute__((vector_size(64), aligned(1), may_alias));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4_mem __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t i32x2 __attribute__((vector_size(8)));
typedef int32_t i32x2_mem __attribute__((vector_size(8), aligned(1), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16_mem __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t f16x16 __attribute__((vector_size(32)));
typedef uint16_t f16x16_mem __attribute__((vector_size(32), aligned(1), may_alias));

static inline int64_t zse_minimum_i64(int64_t a, int64_t b) { return (a < b ? a : b); }
static inline f32x16 zse_splat_f32x16(float a) { return (f32x16)_mm512_set1_ps(a); }
static inline i32x4 zse_splat_i32x4(int32_t a) { return (i32x4)_mm_set1_epi32(a); }
static inline int32_t zse_reduce_add_i32x4(i32x4 v) { i32x2 a2 = __builtin_shufflevector(v, v, 0, 1), b2 = __builtin_shufflevector(v, v, 2, 3); i32x2 r2 = a2 + b2; return r2[0] + r2[1]; }
static inline i32x16 zse_splat_i32x16(int32_t a) { return (i32x16)_mm512_set1_epi32(a); }

/* zse/kernels/matmul_affine_many.py: matmul_int8_many(BITS=6, SYMMETRIC=True, CODE=f16, GROUP=16, WIDE=False, PARTS=1, TOKENS=4) */
void matmul_int8_int6s_g16_many(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
  const int32_t *const q = (const int32_t *)(uintptr_t)args[0];
  const int32_t *const high = (const int32_t *)(uintptr_t)args[1];
  const uint16_t *const scale = (const uint16_t *)(uintptr_t)args[2];
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
    int64_t tile_first = (block_1 * 4LL);
    int64_t tile_last = zse_minimum_i64((tile_first + 4LL), (((rows + 16LL) - 1LL) / 16LL));
    int64_t expert = 0LL;
    int64_t first_ = (block_0 * 64LL);
    int64_t value = first_;
    int64_t value_1 = zse_minimum_i64((first_ + 64LL), tokens);
    int64_t first__1 = value;
    int64_t last_ = value_1;
    if ((experts != 0LL)) {
      const int32_t * task = (tasks + (block_0 * 3LL));
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
    int64_t groups = (blocks * 2LL);
    int32_t scratch[2048] __attribute__((aligned(64)));
    float scratch_1[512] __attribute__((aligned(64)));
    float scratch_2[512] __attribute__((aligned(64)));
    int32_t * staged = scratch;
    float * staged_1 = scratch_1;
    float * staged_2 = scratch_2;
    float scratch_3[512] __attribute__((aligned(64)));
    float * halves = scratch_3;
    float scratch_4[4096] __attribute__((aligned(64)));
    float * acc = scratch_4;
    f32x16 zero = zse_splat_f32x16((0.0f));
    for (int64_t at = 0LL; at < 4096LL; at += 16LL) {
      *(f32x16_mem *)(acc + at) = zero;
    }
    int64_t num_blocks = 0LL;
    if ((token_first < token_last)) {
      num_blocks = blocks;
    }
    for (int64_t first__2 = 0LL; first__2 < num_blocks; first__2 += 8LL) {
      int64_t count = zse_minimum_i64((blocks - first__2), 8LL);
      for (int64_t token = token_first; token < token_last; token += 1LL) {
        int64_t a = token;
        int64_t row = (a + 0LL);
        if ((experts == 2LL)) {
          row = ((int64_t)(*(source + a)));
        }
        int64_t rows_1 = row;
        const int8_t * item = (aq + (rows_1 * (blocks * 32LL)));
        const float * item_1 = (a_scale + (rows_1 * blocks));
        const int8_t * a_1 = item;
        const float * a_2 = item_1;
        for (int64_t i = 0LL; i < count; i += 1LL) {
          int64_t block_ = (first__2 + i);
          const int32_t * q_1 = ((const int32_t *)(a_1 + (block_ * 32LL)));
          i32x4 value_5 = zse_splat_i32x4(16843009);
          i32x4 value_6 = (*(const i32x4_mem *)q_1);
          i32x4 ones = value_5;
          i32x4 bytes_ = value_6;
          *(halves + (((token - token_first) * 8LL) + i)) = (((float)zse_reduce_add_i32x4(((i32x4)_mm_dpbusd_epi32((__m128i)zse_splat_i32x4(0), (__m128i)ones, (__m128i)bytes_)))) * (*(a_2 + block_)));
        }
      }
      for (int64_t pair = tile_first; pair < tile_last; pair += 2LL) {
        _Bool last__1 = ((pair + 2LL) >= tile_last);
        int32_t * part = staged;
        float * part_1 = staged_1;
        float * part_2 = staged_2;
        int64_t tile = zse_minimum_i64((pair + 0LL), (tile_last - 1LL));
        int64_t tile_1 = ((expert_1 * ((rows + 15LL) / 16LL)) + tile);
        for (int64_t i_1 = 0LL; i_1 < count; i_1 += 1LL) {
          int64_t block__1 = (first__2 + i_1);
          i32x16 packed = (*(const i32x16_mem *)((q + ((tile_1 * blocks) * 64LL)) + (block__1 * 64LL)));
          i32x16 packed_1 = (*(const i32x16_mem *)(((q + ((tile_1 * blocks) * 64LL)) + (block__1 * 64LL)) + 16LL));
          i32x16 packed_2 = (*(const i32x16_mem *)(((q + ((tile_1 * blocks) * 64LL)) + (block__1 * 64LL)) + 32LL));
          i32x16 packed_3 = (*(const i32x16_mem *)(((q + ((tile_1 * blocks) * 64LL)) + (block__1 * 64LL)) + 48LL));
          i32x16 w = (packed & zse_splat_i32x16(252645135));
          i32x16 w_1 = (packed_1 & zse_splat_i32x16(252645135));
          i32x16 w_2 = (packed_2 & zse_splat_i32x16(252645135));
          i32x16 w_3 = (packed_3 & zse_splat_i32x16(252645135));
          i32x16 w_4 = ((packed >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
          i32x16 w_5 = ((packed_1 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
          i32x16 w_6 = ((packed_2 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
          i32x16 w_7 = ((packed_3 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
          i32x16 pairs = (*(const i32x16_mem *)((high + ((tile_1 * blocks) * 32LL)) + (block__1 * 32LL)));
          i32x16 pairs_1 = (*(const i32x16_mem *)(((high + ((tile_1 * blocks) * 32LL)) + (block__1 * 32LL)) + 16LL));
          i32x16 w_8 = (w | ((pairs << zse_splat_i32x16(4)) & zse_splat_i32x16(808464432)));
          i32x16 w_9 = (w_1 | ((pairs << zse_splat_i32x16(2)) & zse_splat_i32x16(808464432)));
          i32x16 w_10 = (w_2 | ((pairs << zse_splat_i32x16(0)) & zse_splat_i32x16(808464432)));
          i32x16 w_11 = (w_3 | ((pairs >> zse_splat_i32x16(2)) & zse_splat_i32x16(808464432)));
          i32x16 w_12 = (w_4 | ((pairs_1 << zse_splat_i32x16(4)) & zse_splat_i32x16(808464432)));
          i32x16 w_13 = (w_5 | ((pairs_1 << zse_splat_i32x16(2)) & zse_splat_i32x16(808464432)));
          i32x16 w_14 = (w_6 | ((pairs_1 << zse_splat_i32x16(0)) & zse_splat_i32x16(808464432)));
          i32x16 w_15 = (w_7 | ((pairs_1 >> zse_splat_i32x16(2)) & zse_splat_i32x16(808464432)));
          *(i32x16_mem *)(part + (((i_1 * 16LL) + 0LL) * 8LL)) = w_8;
          *(i32x16_mem *)((part + (((i_1 * 16LL) + 0LL) * 8LL)) + 16LL) = w_9;
          *(i32x16_mem *)((part + (((i_1 * 16LL) + 0LL) * 8LL)) + 32LL) = w_10;
          *(i32x16_mem *)((part + (((i_1 * 16LL) + 0LL) * 8LL)) + 48LL) = w_11;
          *(i32x16_mem *)((part + (((i_1 * 16LL) + 0LL) * 8LL)) + 64LL) = w_12;
          *(i32x16_mem *)((part + (((i_1 * 16LL) + 0LL) * 8LL)) + 80LL) = w_13;
          *(i32x16_mem *)((part + (((i_1 * 16LL) + 0LL) * 8LL)) + 96LL) = w_14;
          *(i32x16_mem *)((part + (((i_1 * 16LL) + 0LL) * 8LL)) + 112LL) = w_15;
          int64_t group = ((block__1 * 2LL) + 0LL);
          f32x16 s = ((f32x16)_mm512_cvtph_ps((__m256i)(*(const f16x16_mem *)((scale + ((tile_1 * groups) * 16LL)) + (group * 16LL)))));
          f32x16 value_7 = s;
          f32x16 s_1 = value_7;
          f32x16 unit = s_1;
          f32x16 value_8 = unit;
          f32x16 value_9 = (s_1 * zse_splat_f32x16((-32.0f)));
          f32x16 unit_1 = value_8;
          f32x16 offset_1 = value_9;
          *(f32x16_mem *)(part_1 + (((i_1 * 2LL) + 0LL) * 16LL)) = unit_1;
          *(f32x16_mem *)(part_2 + (((i_1 * 2LL) + 0LL) * 16LL)) = offset_1;
          group = ((block__1 * 2LL) + 1LL);
          f32x16 s_2 = ((f32x16)_mm512_cvtph_ps((__m256i)(*(const f16x16_mem *)((scale + ((tile_1 * groups) * 16LL)) + (group * 16LL)))));
          f32x16 value_10 = s_2;
          f32x16 s_3 = value_10;
          f32x16 unit_2 = s_3;
          f32x16 value_11 = unit_2;
          f32x16 value_12 = (s_3 * zse_splat_f32x16((-32.0f)));
          unit_1 = value_11;
          offset_1 = value_12;
          *(f32x16_mem *)(part_1 + (((i_1 * 2LL) + 1LL) * 16LL)) = unit_1;
          *(f32x16_mem *)(part_2 + (((i_1 * 2LL) + 1LL) * 16LL)) = offset_1;
        }
        int32_t * part_3 = (staged + 1024LL);
        float * part_4 = (staged_1 + 256LL);
        float * part_5 = (staged_2 + 256LL);
        int64_t tile_2 = zse_minimum_i64((pair + 1LL), (tile_last - 1LL));
        int64_t tile_3 = ((expert_1 * ((rows + 15LL) / 16LL)) + tile_2);
        for (int64_t i_2 = 0LL; i_2 < count; i_2 += 1LL) {
          int64_t block__2 = (first__2 + i_2);
          i32x16 packed_4 = (*(const i32x16_mem *)((q + ((tile_3 * blocks) * 64LL)) + (block__2 * 64LL)));
          i32x16 packed_5 = (*(const i32x16_mem *)(((q + ((tile_3 * blocks) * 64LL)) + (block__2 * 64LL)) + 16LL));
          i32x16 packed_6 = (*(const i32x16_mem *)(((q + ((tile_3 * blocks) * 64LL)) + (block__2 * 64LL)) + 32LL));
          i32x16 packed_7 = (*(const i32x16_mem *)(((q + ((tile_3 * blocks) * 64LL)) + (block__2 * 64LL)) + 48LL));
          i32x16 w_16 = (packed_4 & zse_splat_i32x16(252645135));
          i32x16 w_17 = (packed_5 & zse_splat_i32x16(252645135));
          i32x16 w_18 = (packed_6 & zse_splat_i32x16(252645135));
          i32x16 w_19 = (packed_7 & zse_splat_i32x16(252645135));
          i32x16 w_20 = ((packed_4 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
          i32x16 w_21 = ((packed_5 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
          i32x16 w_22 = ((packed_6 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
          i32x16 w_23 = ((packed_7 >> zse_splat_i32x16(4)) & zse_splat_i32x16(252645135));
          i32x16 pairs_2 = (*(const i32x16_mem *)((high + ((tile_3 * blocks) * 32LL)) + (block__2 * 32LL)));
          i32x16 pairs_3 = (*(const i32x16_mem *)(((high + ((tile_3 * blocks) * 32LL)) + (block__2 * 32LL)) + 16LL));
          i32x16 w_24 = (w_16 | ((pairs_2 << zse_splat_i32x16(4)) & zse_splat_i32x16(808464432)));
          i32x16 w_25 = (w_17 | ((pairs_2 << zse_splat_i32x16(2)) & zse_splat_i32x16(808464432)));
          i32x16 w_26 = (w_18 | ((pairs_2 << zse_splat_i32x16(0)) & zse_splat_i32x16(808464432)));
          i32x16 w_27 = (w_19 | ((pairs_2 >> zse_splat_i32x16(2)) & zse_splat_i32x16(808464432)));
          i32x16 w_28 = (w_20 | ((pairs_3 << zse_splat_i32x16(4)) & zse_splat_i32x16(808464432)));
          i32x16 w_29 = (w_21 | ((pairs_3 << zse_splat_i32x16(2)) & zse_splat_i32x16(808464432)));
          i32x16 w_30 = (w_22 | ((pairs_3 << zse_splat_i32x16(0)) & zse_splat_i32x16(808464432)));
          i32x16 w_31 = (w_23 | ((pairs_3 >> zse_splat_i32x16(2)) & zse_splat_i32x16(808464432)));
          *(i32x16_mem *)(part_3 + (((i_2 * 16LL) + 0LL) * 8LL)) = w_24;
          *(i32x16_mem *)((part_3 + (((i_2 * 16LL) + 0LL) * 8LL)) + 16LL) = w_25;
          *(i32x16_mem *)((part_3 + (((i_2 * 16LL) + 0LL) * 8LL)) + 32LL) = w_26;
          *(i32x16_mem *)((part_3 + (((i_2 * 16LL) + 0LL) * 8LL)) + 48LL) = w_27;
          *(i32x16_mem *)((part_3 + (((i_2 * 16LL) + 0LL) * 8LL)) + 64LL) = w_28;
          *(i32x16_mem *)((part_3 + (((i_2 * 16LL) + 0LL) * 8LL)) + 80LL) = w_29;
          *(i32x16_mem *)((part_3 + (((i_2 * 16LL) + 0LL) * 8LL)) + 96LL) = w_30;
          *(i32x16_mem *)((part_3 + (((i_2 * 16LL) + 0LL) * 8LL)) + 112LL) = w_31;
          int64_t group_1 = ((block__2 * 2LL) + 0LL);
          f32x16 s_4 = ((f32x16)_mm512_cvtph_ps((__m256i)(*(const f16x16_mem *)((scale + ((tile_3 * groups) * 16LL)) + (group_1 * 16LL)))));
          f32x16 value_13 = s_4;
          f32x16 s_5 = value_13;
          f32x16 unit_3 = s_5;
          f32x16 value_14 = unit_3;
          f32x16 value_15 = (s_5 * zse_splat_f32x16((-32.0f)));
          f32x16 unit_4 = value_14;
          f32x16 offset_2 = value_15;
          *(f32x16_mem *)(part_4 + (((i_2 * 2LL) + 0LL) * 16LL)) = unit_4;
          *(f32x16_mem *)(part_5 + (((i_2 * 2LL) + 0LL) * 16LL)) = offset_2;
          group_1 = ((block__2 * 2LL) + 1LL);
          f32x16 s_6 = ((f32x16)_mm512_cvtph_ps((__m256i)(*(const f16x16_mem *)((scale + ((tile_3 * groups) * 16LL)) + (group_1 * 16LL)))));
          f32x16 value_16 = s_6;
          f32x16 s_7 = value_16;
          f32x16 unit_5 = s_7;
          f32x16 value_17 = unit_5;
          f32x16 value_18 = (s_7 * zse_splat_f32x16((-32.0f)));
          unit_4 = value_17;
          offset_2 = value_18;
          *(f32x16_mem *)(part_4 + (((i_2 * 2LL) + 1LL) * 16LL)) = unit_4;
          *(f32x16_mem *)(part_5 + (((i_2 * 2LL) + 1LL) * 16LL)) = offset_2;
        }
        int64_t after = (last__1 ? tile_first : (pair + 2LL));
        int64_t tile_4 = zse_minimum_i64((after + 0LL), (tile_last - 1LL));
        int64_t tile_5 = ((expert_1 * ((rows + 15LL) / 16LL)) + tile_4);
        const int32_t * planes = (q + ((tile_5 * blocks) * 64LL));
        const int32_t * planes_1 = (high + ((tile_5 * blocks) * 32LL));
        const uint16_t * planes_2 = (scale + ((tile_5 * groups) * 16LL));
        int64_t tile_6 = zse_minimum_i64((after + 1LL), (tile_last - 1LL));
        int64_t tile_7 = ((expert_1 * ((rows + 15LL) / 16LL)) + tile_6);
        const int32_t * planes_4 = (q + ((tile_7 * blocks) * 64LL));
        const int32_t * planes_5 = (high + ((tile_7 * blocks) * 32LL));
        const uint16_t * planes_6 = (scale + ((tile_7 * groups) * 16LL));
        int64_t next_first = (last__1 ? (first__2 + 8LL) : first__2);
        float * mine = (acc + ((pair - tile_first) * 1024LL));
        for (int64_t token_1 = token_first; token_1 < token_last; token_1 += 4LL) {
          _Bool value_19 = (token_1 == token_first);
          _Bool value_20 = ((token_last - token_first) <= 4LL);
          _Bool begin = value_19;
          _Bool alone = value_20;
          _Bool coming = begin;
          _Bool coming_1 = (alone || (token_1 == (token_first + 4LL)));
          const int32_t * coming_2 = planes;
          const int32_t * coming_3 = planes_1;
          const uint16_t * coming_4 = planes_2;
          const int32_t * coming_6 = planes_4;
          const int32_t * coming_7 = planes_5;
          const uint16_t * coming_8 = planes_6;
          int64_t coming_10 = next_first;
          _Bool coming_11 = coming;
          _Bool coming_12 = coming_1;
          int64_t at_1 = zse_minimum_i64((token_1 + 0LL), (token_last - 1LL));
          int64_t at_2 = zse_minimum_i64((token_1 + 1LL), (token_last - 1LL));
          int64_t at_3 = zse_minimum_i64((token_1 + 2LL), (token_last - 1LL));
          int64_t at_4 = zse_minimum_i64((token_1 + 3LL), (token_last - 1LL));
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
          int64_t row_4 = (at_4 + 0LL);
          if ((experts == 2LL)) {
            row_4 = ((int64_t)(*(source + at_4)));
          }
          int64_t rows_5 = row_4;
          const int8_t * item_3 = (aq + (rows_2 * (blocks * 32LL)));
          const int8_t * item_4 = (aq + (rows_3 * (blocks * 32LL)));
          const int8_t * item_5 = (aq + (rows_4 * (blocks * 32LL)));
          const int8_t * item_6 = (aq + (rows_5 * (blocks * 32LL)));
          const float * item_7 = (a_scale + (rows_2 * blocks));
          const float * item_8 = (a_scale + (rows_3 * blocks));
          const float * item_9 = (a_scale + (rows_4 * blocks));
          const float * item_10 = (a_scale + (rows_5 * blocks));
          const float * item_11 = (a_sum + (rows_2 * blocks));
          const float * item_12 = (a_sum + (rows_3 * blocks));
          const float * item_13 = (a_sum + (rows_4 * blocks));
          const float * item_14 = (a_sum + (rows_5 * blocks));
          const int8_t * a_4 = item_3;
          const int8_t * a_5 = item_4;
          const int8_t * a_6 = item_5;
          const int8_t * a_7 = item_6;
          const float * a_8 = item_7;
          const float * a_9 = item_8;
          const float * a_10 = item_9;
          const float * a_11 = item_10;
          const float * a_12 = item_11;
          const float * a_13 = item_12;
          const float * a_14 = item_13;
          const float * a_15 = item_14;
          if ((blocks >= 128LL)) {
            int64_t token_2 = (token_1 + 4LL);
            int64_t token_3 = zse_minimum_i64((token_2 + 0LL), (token_last - 1LL));
            int64_t row_5 = (token_3 + 0LL);
            if ((experts == 2LL)) {
              row_5 = ((int64_t)(*(source + token_3)));
            }
            int64_t at_5 = ((row_5 * (blocks * 32LL)) + (first__2 * 32LL));
            const int8_t * item_15 = aq;
            __builtin_prefetch((item_15 + at_5));
            __builtin_prefetch(((item_15 + at_5) + 64LL));
            __builtin_prefetch(((item_15 + at_5) + 128LL));
            __builtin_prefetch(((item_15 + at_5) + 192LL));
            int64_t token_4 = zse_minimum_i64((token_2 + 1LL), (token_last - 1LL));
            int64_t row_6 = (token_4 + 0LL);
            if ((experts == 2LL)) {
              row_6 = ((int64_t)(*(source + token_4)));
            }
            at_5 = ((row_6 * (blocks * 32LL)) + (first__2 * 32LL));
            const int8_t * item_16 = aq;
            __builtin_prefetch((item_16 + at_5));
            __builtin_prefetch(((item_16 + at_5) + 64LL));
            __builtin_prefetch(((item_16 + at_5) + 128LL));
            __builtin_prefetch(((item_16 + at_5) + 192LL));
            int64_t token_5 = zse_minimum_i64((token_2 + 2LL), (token_last - 1LL));
            int64_t row_7 = (token_5 + 0LL);
            if ((experts == 2LL)) {
              row_7 = ((int64_t)(*(source + token_5)));
            }
            at_5 = ((row_7 * (blocks * 32LL)) + (first__2 * 32LL));
            const int8_t * item_17 = aq;
            __builtin_prefetch((item_17 + at_5));
            __builtin_prefetch(((item_17 + at_5) + 64LL));
            __builtin_prefetch(((item_17 + at_5) + 128LL));
            __builtin_prefetch(((item_17 + at_5) + 192LL));
            int64_t token_6 = zse_minimum_i64((token_2 + 3LL), (token_last - 1LL));
            int64_t row_8 = (token_6 + 0LL);
            if ((experts == 2LL)) {
              row_8 = ((int64_t)(*(source + token_6)));
            }
            at_5 = ((row_8 * (blocks * 32LL)) + (first__2 * 32LL));
            const int8_t * item_18 = aq;
            __builtin_prefetch((item_18 + at_5));
            __builtin_prefetch(((item_18 + at_5) + 64LL));
            __builtin_prefetch(((item_18 + at_5) + 128LL));
            __builtin_prefetch(((item_18 + at_5) + 192LL));
          }
          int64_t token_7 = (token_1 - token_first);
          float * places = (mine + (((0LL + token_7) + 0LL) * 16LL));
          float * places_1 = (mine + (((0LL + token_7) + 1LL) * 16LL));
          float * places_2 = (mine + (((0LL + token_7) + 2LL) * 16LL));
          float * places_3 = (mine + (((0LL + token_7) + 3LL) * 16LL));
          float * places_4 = places;
          float * places_5 = places_1;
          float * places_6 = places_2;
          float * places_7 = places_3;
          float * places_8 = (mine + (((64LL + token_7) + 0LL) * 16LL));
          float * places_9 = (mine + (((64LL + token_7) + 1LL) * 16LL));
          float * places_10 = (mine + (((64LL + token_7) + 2LL) * 16LL));
          float * places_11 = (mine + (((64LL + token_7) + 3LL) * 16LL));
          float * places_12 = places_8;
          float * places_13 = places_9;
          float * places_14 = places_10;
          float * places_15 = places_11;
          f32x16 sums = (*(const f32x16_mem *)places_4);
          f32x16 sums_1 = (*(const f32x16_mem *)places_5);
          f32x16 sums_2 = (*(const f32x16_mem *)places_6);
          f32x16 sums_3 = (*(const f32x16_mem *)places_7);
          f32x16 sums_4 = sums;
          f32x16 sums_5 = sums_1;
          f32x16 sums_6 = sums_2;
          f32x16 sums_7 = sums_3;
          f32x16 sums_8 = (*(const f32x16_mem *)places_12);
          f32x16 sums_9 = (*(const f32x16_mem *)places_13);
          f32x16 sums_10 = (*(const f32x16_mem *)places_14);
          f32x16 sums_11 = (*(const f32x16_mem *)places_15);
          f32x16 sums_12 = sums_8;
          f32x16 sums_13 = sums_9;
          f32x16 sums_14 = sums_10;
          f32x16 sums_15 = sums_11;
          for (int64_t i_3 = 0LL; i_3 < count; i_3 += 1LL) {
            int64_t block__3 = (first__2 + i_3);
            if (coming_11) {
              int64_t block__4 = zse_minimum_i64((coming_10 + i_3), (blocks - 1LL));
              __builtin_prefetch((coming_2 + (block__4 * 64LL)), 0, 2);
              __builtin_prefetch(((coming_2 + (block__4 * 64LL)) + 16LL), 0, 2);
              __builtin_prefetch(((coming_2 + (block__4 * 64LL)) + 32LL), 0, 2);
              __builtin_prefetch(((coming_2 + (block__4 * 64LL)) + 48LL), 0, 2);
              __builtin_prefetch((coming_3 + (block__4 * 32LL)), 0, 2);
              __builtin_prefetch(((coming_3 + (block__4 * 32LL)) + 16LL), 0, 2);
              int64_t group_2 = (block__4 * 2LL);
              __builtin_prefetch((coming_4 + (group_2 * 16LL)), 0, 2);
            }
            if (coming_12) {
              int64_t block__5 = zse_minimum_i64((coming_10 + i_3), (blocks - 1LL));
              __builtin_prefetch((coming_6 + (block__5 * 64LL)), 0, 2);
              __builtin_prefetch(((coming_6 + (block__5 * 64LL)) + 16LL), 0, 2);
              __builtin_prefetch(((coming_6 + (block__5 * 64LL)) + 32LL), 0, 2);
              __builtin_prefetch(((coming_6 + (block__5 * 64LL)) + 48LL), 0, 2);
              __builtin_prefetch((coming_7 + (block__5 * 32LL)), 0, 2);
              __builtin_prefetch(((coming_7 + (block__5 * 32LL)) + 16LL), 0, 2);
              int64_t group_3 = (block__5 * 2LL);
              __builtin_prefetch((coming_8 + (group_3 * 16LL)), 0, 2);
            }
            int32_t * words = (staged + ((((0LL + i_3) * 16LL) + 0LL) * 8LL));
            int32_t * words_1 = (staged + ((((8LL + i_3) * 16LL) + 0LL) * 8LL));
            float * units = (staged_1 + ((0LL + i_3) * 32LL));
            float * units_1 = (staged_1 + ((8LL + i_3) * 32LL));
            float * offsets = (staged_2 + ((0LL + i_3) * 32LL));
            float * offsets_1 = (staged_2 + ((8LL + i_3) * 32LL));
            const int32_t * q_2 = ((const int32_t *)(a_4 + (block__3 * 32LL)));
            const int32_t * q_3 = ((const int32_t *)(a_5 + (block__3 * 32LL)));
            const int32_t * q_4 = ((const int32_t *)(a_6 + (block__3 * 32LL)));
            const int32_t * q_5 = ((const int32_t *)(a_7 + (block__3 * 32LL)));
            i32x16 totals = zse_splat_i32x16(0);
            i32x16 totals_1 = zse_splat_i32x16(0);
            i32x16 totals_2 = zse_splat_i32x16(0);
            i32x16 totals_3 = zse_splat_i32x16(0);
            i32x16 totals_4 = totals;
            i32x16 totals_5 = totals_1;
            i32x16 totals_6 = totals_2;
            i32x16 totals_7 = totals_3;
            i32x16 totals_8 = zse_splat_i32x16(0);
            i32x16 totals_9 = zse_splat_i32x16(0);
            i32x16 totals_10 = zse_splat_i32x16(0);
            i32x16 totals_11 = zse_splat_i32x16(0);
            i32x16 totals_12 = totals_8;
            i32x16 totals_13 = totals_9;
            i32x16 totals_14 = totals_10;
            i32x16 totals_15 = totals_11;
            const int32_t * item_19 = q_2;
            const int32_t * item_20 = q_3;
            const int32_t * item_21 = q_4;
            const int32_t * item_22 = q_5;
            i32x16 w_32 = (*(const i32x16_mem *)words);
            i32x16 w_33 = (*(const i32x16_mem *)words_1);
            i32x16 value_21 = zse_splat_i32x16((*item_19));
            totals_4 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_4, (__m512i)w_32, (__m512i)value_21));
            totals_12 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_12, (__m512i)w_33, (__m512i)value_21));
            value_21 = zse_splat_i32x16((*item_20));
            totals_5 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_5, (__m512i)w_32, (__m512i)value_21));
            totals_13 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_13, (__m512i)w_33, (__m512i)value_21));
            value_21 = zse_splat_i32x16((*item_21));
            totals_6 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_6, (__m512i)w_32, (__m512i)value_21));
            totals_14 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_14, (__m512i)w_33, (__m512i)value_21));
            value_21 = zse_splat_i32x16((*item_22));
            totals_7 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_7, (__m512i)w_32, (__m512i)value_21));
            totals_15 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_15, (__m512i)w_33, (__m512i)value_21));
            i32x16 w_34 = (*(const i32x16_mem *)(words + 16LL));
            i32x16 w_35 = (*(const i32x16_mem *)(words_1 + 16LL));
            value_21 = zse_splat_i32x16((*(item_19 + 1LL)));
            totals_4 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_4, (__m512i)w_34, (__m512i)value_21));
            totals_12 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_12, (__m512i)w_35, (__m512i)value_21));
            value_21 = zse_splat_i32x16((*(item_20 + 1LL)));
            totals_5 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_5, (__m512i)w_34, (__m512i)value_21));
            totals_13 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_13, (__m512i)w_35, (__m512i)value_21));
            value_21 = zse_splat_i32x16((*(item_21 + 1LL)));
            totals_6 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_6, (__m512i)w_34, (__m512i)value_21));
            totals_14 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_14, (__m512i)w_35, (__m512i)value_21));
            value_21 = zse_splat_i32x16((*(item_22 + 1LL)));
            totals_7 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_7, (__m512i)w_34, (__m512i)value_21));
            totals_15 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_15, (__m512i)w_35, (__m512i)value_21));
            i32x16 w_36 = (*(const i32x16_mem *)(words + 32LL));
            i32x16 w_37 = (*(const i32x16_mem *)(words_1 + 32LL));
            value_21 = zse_splat_i32x16((*(item_19 + 2LL)));
            totals_4 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_4, (__m512i)w_36, (__m512i)value_21));
            totals_12 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_12, (__m512i)w_37, (__m512i)value_21));
            value_21 = zse_splat_i32x16((*(item_20 + 2LL)));
            totals_5 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_5, (__m512i)w_36, (__m512i)value_21));
            totals_13 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_13, (__m512i)w_37, (__m512i)value_21));
            value_21 = zse_splat_i32x16((*(item_21 + 2LL)));
            totals_6 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_6, (__m512i)w_36, (__m512i)value_21));
            totals_14 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_14, (__m512i)w_37, (__m512i)value_21));
            value_21 = zse_splat_i32x16((*(item_22 + 2LL)));
            totals_7 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_7, (__m512i)w_36, (__m512i)value_21));
            totals_15 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_15, (__m512i)w_37, (__m512i)value_21));
            i32x16 w_38 = (*(const i32x16_mem *)(words + 48LL));
            i32x16 w_39 = (*(const i32x16_mem *)(words_1 + 48LL));
            value_21 = zse_splat_i32x16((*(item_19 + 3LL)));
            totals_4 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_4, (__m512i)w_38, (__m512i)value_21));
            totals_12 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_12, (__m512i)w_39, (__m512i)value_21));
            value_21 = zse_splat_i32x16((*(item_20 + 3LL)));
            totals_5 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_5, (__m512i)w_38, (__m512i)value_21));
            totals_13 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_13, (__m512i)w_39, (__m512i)value_21));
            value_21 = zse_splat_i32x16((*(item_21 + 3LL)));
            totals_6 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_6, (__m512i)w_38, (__m512i)value_21));
            totals_14 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_14, (__m512i)w_39, (__m512i)value_21));
            value_21 = zse_splat_i32x16((*(item_22 + 3LL)));
            totals_7 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_7, (__m512i)w_38, (__m512i)value_21));
            totals_15 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_15, (__m512i)w_39, (__m512i)value_21));
            f32x16 scale_1 = (*(const f32x16_mem *)units);
            sums_4 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_4, f32x16), (scale_1 * zse_splat_f32x16((*(a_8 + block__3)))), sums_4));
            sums_5 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_5, f32x16), (scale_1 * zse_splat_f32x16((*(a_9 + block__3)))), sums_5));
            sums_6 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_6, f32x16), (scale_1 * zse_splat_f32x16((*(a_10 + block__3)))), sums_6));
            sums_7 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_7, f32x16), (scale_1 * zse_splat_f32x16((*(a_11 + block__3)))), sums_7));
            scale_1 = (*(const f32x16_mem *)units_1);
            sums_12 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_12, f32x16), (scale_1 * zse_splat_f32x16((*(a_8 + block__3)))), sums_12));
            sums_13 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_13, f32x16), (scale_1 * zse_splat_f32x16((*(a_9 + block__3)))), sums_13));
            sums_14 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_14, f32x16), (scale_1 * zse_splat_f32x16((*(a_10 + block__3)))), sums_14));
            sums_15 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_15, f32x16), (scale_1 * zse_splat_f32x16((*(a_11 + block__3)))), sums_15));
            i32x16 totals_16 = zse_splat_i32x16(0);
            i32x16 totals_17 = zse_splat_i32x16(0);
            i32x16 totals_18 = zse_splat_i32x16(0);
            i32x16 totals_19 = zse_splat_i32x16(0);
            i32x16 totals_20 = totals_16;
            i32x16 totals_21 = totals_17;
            i32x16 totals_22 = totals_18;
            i32x16 totals_23 = totals_19;
            i32x16 totals_24 = zse_splat_i32x16(0);
            i32x16 totals_25 = zse_splat_i32x16(0);
            i32x16 totals_26 = zse_splat_i32x16(0);
            i32x16 totals_27 = zse_splat_i32x16(0);
            i32x16 totals_28 = totals_24;
            i32x16 totals_29 = totals_25;
            i32x16 totals_30 = totals_26;
            i32x16 totals_31 = totals_27;
            const int32_t * item_23 = q_2;
            const int32_t * item_24 = q_3;
            const int32_t * item_25 = q_4;
            const int32_t * item_26 = q_5;
            i32x16 w_40 = (*(const i32x16_mem *)(words + 64LL));
            i32x16 w_41 = (*(const i32x16_mem *)(words_1 + 64LL));
            i32x16 value_22 = zse_splat_i32x16((*(item_23 + 4LL)));
            totals_20 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_20, (__m512i)w_40, (__m512i)value_22));
            totals_28 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_28, (__m512i)w_41, (__m512i)value_22));
            value_22 = zse_splat_i32x16((*(item_24 + 4LL)));
            totals_21 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_21, (__m512i)w_40, (__m512i)value_22));
            totals_29 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_29, (__m512i)w_41, (__m512i)value_22));
            value_22 = zse_splat_i32x16((*(item_25 + 4LL)));
            totals_22 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_22, (__m512i)w_40, (__m512i)value_22));
            totals_30 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_30, (__m512i)w_41, (__m512i)value_22));
            value_22 = zse_splat_i32x16((*(item_26 + 4LL)));
            totals_23 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_23, (__m512i)w_40, (__m512i)value_22));
            totals_31 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_31, (__m512i)w_41, (__m512i)value_22));
            i32x16 w_42 = (*(const i32x16_mem *)(words + 80LL));
            i32x16 w_43 = (*(const i32x16_mem *)(words_1 + 80LL));
            value_22 = zse_splat_i32x16((*(item_23 + 5LL)));
            totals_20 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_20, (__m512i)w_42, (__m512i)value_22));
            totals_28 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_28, (__m512i)w_43, (__m512i)value_22));
            value_22 = zse_splat_i32x16((*(item_24 + 5LL)));
            totals_21 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_21, (__m512i)w_42, (__m512i)value_22));
            totals_29 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_29, (__m512i)w_43, (__m512i)value_22));
            value_22 = zse_splat_i32x16((*(item_25 + 5LL)));
            totals_22 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_22, (__m512i)w_42, (__m512i)value_22));
            totals_30 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_30, (__m512i)w_43, (__m512i)value_22));
            value_22 = zse_splat_i32x16((*(item_26 + 5LL)));
            totals_23 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_23, (__m512i)w_42, (__m512i)value_22));
            totals_31 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_31, (__m512i)w_43, (__m512i)value_22));
            i32x16 w_44 = (*(const i32x16_mem *)(words + 96LL));
            i32x16 w_45 = (*(const i32x16_mem *)(words_1 + 96LL));
            value_22 = zse_splat_i32x16((*(item_23 + 6LL)));
            totals_20 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_20, (__m512i)w_44, (__m512i)value_22));
            totals_28 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_28, (__m512i)w_45, (__m512i)value_22));
            value_22 = zse_splat_i32x16((*(item_24 + 6LL)));
            totals_21 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_21, (__m512i)w_44, (__m512i)value_22));
            totals_29 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_29, (__m512i)w_45, (__m512i)value_22));
            value_22 = zse_splat_i32x16((*(item_25 + 6LL)));
            totals_22 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_22, (__m512i)w_44, (__m512i)value_22));
            totals_30 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_30, (__m512i)w_45, (__m512i)value_22));
            value_22 = zse_splat_i32x16((*(item_26 + 6LL)));
            totals_23 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_23, (__m512i)w_44, (__m512i)value_22));
            totals_31 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_31, (__m512i)w_45, (__m512i)value_22));
            i32x16 w_46 = (*(const i32x16_mem *)(words + 112LL));
            i32x16 w_47 = (*(const i32x16_mem *)(words_1 + 112LL));
            value_22 = zse_splat_i32x16((*(item_23 + 7LL)));
            totals_20 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_20, (__m512i)w_46, (__m512i)value_22));
            totals_28 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_28, (__m512i)w_47, (__m512i)value_22));
            value_22 = zse_splat_i32x16((*(item_24 + 7LL)));
            totals_21 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_21, (__m512i)w_46, (__m512i)value_22));
            totals_29 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_29, (__m512i)w_47, (__m512i)value_22));
            value_22 = zse_splat_i32x16((*(item_25 + 7LL)));
            totals_22 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_22, (__m512i)w_46, (__m512i)value_22));
            totals_30 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_30, (__m512i)w_47, (__m512i)value_22));
            value_22 = zse_splat_i32x16((*(item_26 + 7LL)));
            totals_23 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_23, (__m512i)w_46, (__m512i)value_22));
            totals_31 = ((i32x16)_mm512_dpbusd_epi32((__m512i)totals_31, (__m512i)w_47, (__m512i)value_22));
            scale_1 = (*(const f32x16_mem *)(units + 16LL));
            sums_4 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_20, f32x16), (scale_1 * zse_splat_f32x16((*(a_8 + block__3)))), sums_4));
            sums_5 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_21, f32x16), (scale_1 * zse_splat_f32x16((*(a_9 + block__3)))), sums_5));
            sums_6 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_22, f32x16), (scale_1 * zse_splat_f32x16((*(a_10 + block__3)))), sums_6));
            sums_7 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_23, f32x16), (scale_1 * zse_splat_f32x16((*(a_11 + block__3)))), sums_7));
            scale_1 = (*(const f32x16_mem *)(units_1 + 16LL));
            sums_12 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_28, f32x16), (scale_1 * zse_splat_f32x16((*(a_8 + block__3)))), sums_12));
            sums_13 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_29, f32x16), (scale_1 * zse_splat_f32x16((*(a_9 + block__3)))), sums_13));
            sums_14 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_30, f32x16), (scale_1 * zse_splat_f32x16((*(a_10 + block__3)))), sums_14));
            sums_15 = ((f32x16)_mm512_fmadd_ps(__builtin_convertvector(totals_31, f32x16), (scale_1 * zse_splat_f32x16((*(a_11 + block__3)))), sums_15));
            f32x16 offset_3 = (*(const f32x16_mem *)offsets);
            float total = (*(a_12 + block__3));
            float mine_1 = (*(halves + (((token_7 + 0LL) * 8LL) + i_3)));
            total = mine_1;
            sums_4 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_4));
            total = (*(a_13 + block__3));
            mine_1 = (*(halves + (((token_7 + 1LL) * 8LL) + i_3)));
            total = mine_1;
            sums_5 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_5));
            total = (*(a_14 + block__3));
            mine_1 = (*(halves + (((token_7 + 2LL) * 8LL) + i_3)));
            total = mine_1;
            sums_6 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_6));
            total = (*(a_15 + block__3));
            mine_1 = (*(halves + (((token_7 + 3LL) * 8LL) + i_3)));
            total = mine_1;
            sums_7 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_7));
            offset_3 = (*(const f32x16_mem *)(offsets + 16LL));
            total = (*(a_12 + block__3));
            mine_1 = (*(halves + (((token_7 + 0LL) * 8LL) + i_3)));
            total = (total - mine_1);
            sums_4 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_4));
            total = (*(a_13 + block__3));
            mine_1 = (*(halves + (((token_7 + 1LL) * 8LL) + i_3)));
            total = (total - mine_1);
            sums_5 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_5));
            total = (*(a_14 + block__3));
            mine_1 = (*(halves + (((token_7 + 2LL) * 8LL) + i_3)));
            total = (total - mine_1);
            sums_6 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_6));
            total = (*(a_15 + block__3));
            mine_1 = (*(halves + (((token_7 + 3LL) * 8LL) + i_3)));
            total = (total - mine_1);
            sums_7 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_7));
            offset_3 = (*(const f32x16_mem *)offsets_1);
            total = (*(a_12 + block__3));
            mine_1 = (*(halves + (((token_7 + 0LL) * 8LL) + i_3)));
            total = mine_1;
            sums_12 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_12));
            total = (*(a_13 + block__3));
            mine_1 = (*(halves + (((token_7 + 1LL) * 8LL) + i_3)));
            total = mine_1;
            sums_13 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_13));
            total = (*(a_14 + block__3));
            mine_1 = (*(halves + (((token_7 + 2LL) * 8LL) + i_3)));
            total = mine_1;
            sums_14 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_14));
            total = (*(a_15 + block__3));
            mine_1 = (*(halves + (((token_7 + 3LL) * 8LL) + i_3)));
            total = mine_1;
            sums_15 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_15));
            offset_3 = (*(const f32x16_mem *)(offsets_1 + 16LL));
            total = (*(a_12 + block__3));
            mine_1 = (*(halves + (((token_7 + 0LL) * 8LL) + i_3)));
            total = (total - mine_1);
            sums_12 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_12));
            total = (*(a_13 + block__3));
            mine_1 = (*(halves + (((token_7 + 1LL) * 8LL) + i_3)));
            total = (total - mine_1);
            sums_13 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_13));
            total = (*(a_14 + block__3));
            mine_1 = (*(halves + (((token_7 + 2LL) * 8LL) + i_3)));
            total = (total - mine_1);
            sums_14 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_14));
            total = (*(a_15 + block__3));
            mine_1 = (*(halves + (((token_7 + 3LL) * 8LL) + i_3)));
            total = (total - mine_1);
            sums_15 = ((f32x16)_mm512_fmadd_ps(offset_3, zse_splat_f32x16(total), sums_15));
          }
          *(f32x16_mem *)places_4 = sums_4;
          *(f32x16_mem *)places_5 = sums_5;
          *(f32x16_mem *)places_6 = sums_6;
          *(f32x16_mem *)places_7 = sums_7;
          *(f32x16_mem *)places_12 = sums_12;
          *(f32x16_mem *)places_13 = sums_13;
          *(f32x16_mem *)places_14 = sums_14;
          *(f32x16_mem *)places_15 = sums_15;
          if (((first__2 + 8LL) >= blocks)) {
            int64_t at_stop = zse_minimum_i64((token_1 + 4LL), token_last);
            for (int64_t at_6 = token_1; at_6 < at_stop; at_6 += 1LL) {
              int64_t tile_stop = zse_minimum_i64((pair + 2LL), tile_last);
              for (int64_t tile_8 = pair; tile_8 < tile_stop; tile_8 += 1LL) {
                float * place = (mine + (((((tile_8 - pair) * 64LL) + at_6) - token_first) * 16LL));
                f32x16 acc_1 = (*(const f32x16_mem *)place);
                float * out_1 = (out + (at_6 * rows));
                const float * bias_1 = (bias + (expert_1 * rows));
                int64_t row_9 = ((tile_8 * 16LL) + 0LL);
                f32x16 total_1 = acc_1;
                if ((has_bias != 0LL)) {
                  if (((row_9 + 16LL) <= rows)) {
                    total_1 = (total_1 + (*(const f32x16_mem *)(bias_1 + row_9)));
                  }
                }
                if (((row_9 + 16LL) <= rows)) {
                  *(f32x16_mem *)(out_1 + row_9) = total_1;
                } else {
                  float scratch_5[16] __attribute__((aligned(64)));
                  float * spill = scratch_5;
                  *(f32x16_mem *)spill = total_1;
                  for (int64_t r = row_9; r < rows; r += 1LL) {
                    if ((has_bias != 0LL)) {
                      *(out_1 + r) = ((*(spill + (r - row_9))) + (*(bias_1 + r)));
                    } else {
                      *(out_1 + r) = (*(spill + (r - row_9)));
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
