#include <math.h>
#include <stdint.h>
#include <immintrin.h>
typedef union { uint64_t slot; float f32; double f64; } zse_slot;

typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x8_mem __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint16_t f16x8 __attribute__((vector_size(16)));
typedef uint16_t f16x8_mem __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8_mem __attribute__((vector_size(32), aligned(1), may_alias));

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
    if (((last__1 - first__2) <= 2LL)) {
      int64_t tile_last = (tile + 1LL);
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
      float scratch_1[256] __attribute__((aligned(64)));
      float scratch_2[256] __attribute__((aligned(64)));
      float * staged_1 = scratch_1;
      float * staged_2 = scratch_2;
      float scratch_4[1024] __attribute__((aligned(64)));
      float * acc = scratch_4;
      int64_t num_blocks = 0LL;
      int64_t padded = ((((token_last - token_first) + 1LL) / 2LL) * 2LL);
      if (((token_first < token_last) && (tile < tile_last))) {
        num_blocks = blocks;
        int64_t at_stop = (padded * 16LL);
        for (int64_t at = 0LL; at < at_stop; at += 8LL) {
          *(f32x8_mem *)(acc + at) = zse_splat_f32x8((0.0f));
        }
      }
      for (int64_t first__5 = 0LL; first__5 < num_blocks; first__5 += 8LL) {
        int64_t count = zse_minimum_i64((num_blocks - first__5), 8LL);
        for (int64_t tile_1 = tile; tile_1 < tile_last; tile_1 += 1LL) {
          int64_t tile_2 = ((expert_2 * ((rows + 15LL) / 16LL)) + tile_1);
          const int32_t * now = (q + ((tile_2 * blocks) * 64LL));
          const uint16_t * now_2 = (scale + ((tile_2 * groups) * 16LL));
          const uint16_t * now_3 = (offset + ((tile_2 * groups) * 16LL));
          const int32_t * packed = (now + (first__5 * 64LL));
          for (int64_t i = 0LL; i < count; i += 1LL) {
            int64_t block_ = (first__5 + i);
            int64_t group = block_;
            f32x8 s = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)(now_2 + (group * 16LL)))));
            f32x8 value_9 = s;
            f32x8 value_10 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)(now_3 + (group * 16LL)))));
            f32x8 s_1 = value_9;
            f32x8 o = value_10;
            f32x8 unit = s_1;
            f32x8 value_11 = unit;
            f32x8 value_12 = o;
            f32x8 unit_1 = value_11;
            f32x8 offset_1 = value_12;
            *(f32x8_mem *)(staged_1 + (((i * 2LL) + 0LL) * 16LL)) = unit_1;
            *(f32x8_mem *)(staged_2 + (((i * 2LL) + 0LL) * 16LL)) = offset_1;
            group = block_;
            f32x8 s_2 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((now_2 + (group * 16LL)) + 8LL))));
            f32x8 value_13 = s_2;
            f32x8 value_14 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((now_3 + (group * 16LL)) + 8LL))));
            f32x8 s_3 = value_13;
            f32x8 o_1 = value_14;
            f32x8 unit_2 = s_3;
            f32x8 value_15 = unit_2;
            f32x8 value_16 = o_1;
            unit_1 = value_15;
            offset_1 = value_16;
            *(f32x8_mem *)((staged_1 + (((i * 2LL) + 0LL) * 16LL)) + 8LL) = unit_1;
            *(f32x8_mem *)((staged_2 + (((i * 2LL) + 0LL) * 16LL)) + 8LL) = offset_1;
          }
          const int32_t * planes = now;
          const uint16_t * planes_2 = now_2;
          const uint16_t * planes_3 = now_3;
          for (int64_t token = token_first; token < token_last; token += 2LL) {
            const int32_t * ahead = planes;
            const uint16_t * ahead_2 = planes_2;
            const uint16_t * ahead_3 = planes_3;
            int64_t ahead_4 = (first__5 + 16LL);
            _Bool ahead_5 = (token == token_first);
            float * mine = (acc + (((((tile_1 - tile) * padded) + token) - token_first) * 16LL));
            int64_t token_1 = zse_minimum_i64((token + 0LL), (token_last - 1LL));
            int64_t row = (token_1 + 0LL);
            if ((experts == 2LL)) {
              row = ((int64_t)(*(source + token_1)));
            }
            int64_t rows_1 = row;
            int64_t token_2 = zse_minimum_i64((token + 1LL), (token_last - 1LL));
            int64_t row_1 = (token_2 + 0LL);
            if ((experts == 2LL)) {
              row_1 = ((int64_t)(*(source + token_2)));
            }
            int64_t rows_2 = row_1;
            int64_t tokens_1 = ((rows_1 * blocks) + first__5);
            int64_t tokens_2 = ((rows_2 * blocks) + first__5);
            const int32_t * words = ((const int32_t *)(aq + (tokens_1 * 32LL)));
            const int32_t * words_1 = ((const int32_t *)(aq + (tokens_2 * 32LL)));
            const float * item = (a_scale + tokens_1);
            const float * item_1 = (a_scale + tokens_2);
            const float * item_2 = (a_sum + tokens_1);
            const float * item_3 = (a_sum + tokens_2);
            const int32_t * tokens_3 = words;
            const int32_t * tokens_4 = words_1;
            const float * tokens_5 = item;
            const float * tokens_6 = item_1;
            const float * tokens_7 = item_2;
            const float * tokens_8 = item_3;
            f32x8 sums = (*(const f32x8_mem *)mine);
            f32x8 sums_1 = (*(const f32x8_mem *)(mine + 16LL));
            f32x8 sums_2 = sums;
            f32x8 sums_3 = sums_1;
            f32x8 sums_4 = (*(const f32x8_mem *)(mine + 8LL));
            f32x8 sums_5 = (*(const f32x8_mem *)((mine + 16LL) + 8LL));
            f32x8 sums_6 = sums_4;
            f32x8 sums_7 = sums_5;
            for (int64_t i_1 = 0LL; i_1 < count; i_1 += 1LL) {
              if (ahead_5) {
                int64_t block__1 = (ahead_4 + i_1);
                __builtin_prefetch((ahead + (block__1 * 64LL)), 0, 2);
                __builtin_prefetch(((ahead + (block__1 * 64LL)) + 16LL), 0, 2);
                __builtin_prefetch(((ahead + (block__1 * 64LL)) + 32LL), 0, 2);
                __builtin_prefetch(((ahead + (block__1 * 64LL)) + 48LL), 0, 2);
                int64_t group_1 = block__1;
                __builtin_prefetch((ahead_2 + (group_1 * 16LL)), 0, 2);
                __builtin_prefetch((ahead_3 + (group_1 * 16LL)), 0, 2);
              }
              const int32_t * rows_3 = (tokens_3 + (i_1 * 8LL));
              const int32_t * rows_4 = (tokens_4 + (i_1 * 8LL));
              int64_t first__6 = (i_1 * 8LL);
              i32x8 totals = zse_splat_i32x8(0);
              i32x8 totals_1 = zse_splat_i32x8(0);
              i32x8 totals_2 = totals;
              i32x8 totals_3 = totals_1;
              i32x8 totals_4 = zse_splat_i32x8(0);
              i32x8 totals_5 = zse_splat_i32x8(0);
              i32x8 totals_6 = totals_4;
              i32x8 totals_7 = totals_5;
              i32x8 sums_8 = zse_splat_i32x8(0);
              i32x8 sums_9 = zse_splat_i32x8(0);
              i32x8 sums_10 = sums_8;
              i32x8 sums_11 = sums_9;
              i32x8 sums_12 = zse_splat_i32x8(0);
              i32x8 sums_13 = zse_splat_i32x8(0);
              i32x8 sums_14 = sums_12;
              i32x8 sums_15 = sums_13;
              i32x8 packed_1 = (*(const i32x8_mem *)(packed + (((first__6 / 2LL) + 0LL) * 16LL)));
              i32x8 w = (packed_1 & zse_splat_i32x8(252645135));
              i32x8 packed_2 = (*(const i32x8_mem *)((packed + (((first__6 / 2LL) + 0LL) * 16LL)) + 8LL));
              i32x8 w_1 = (packed_2 & zse_splat_i32x8(252645135));
              i32x8 value_21 = zse_splat_i32x8((*rows_3));
              i32x8 pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w, (__m256i)value_21));
              sums_10 = pairs;
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_1, (__m256i)value_21));
              sums_14 = pairs;
              value_21 = zse_splat_i32x8((*rows_4));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w, (__m256i)value_21));
              sums_11 = pairs;
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_1, (__m256i)value_21));
              sums_15 = pairs;
              i32x8 packed_3 = (*(const i32x8_mem *)(packed + (((first__6 / 2LL) + 0LL) * 16LL)));
              i32x8 w_2 = ((packed_3 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 packed_4 = (*(const i32x8_mem *)((packed + (((first__6 / 2LL) + 0LL) * 16LL)) + 8LL));
              i32x8 w_3 = ((packed_4 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              value_21 = zse_splat_i32x8((*(rows_3 + 4LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_2, (__m256i)value_21));
              sums_10 = zse_add_i16_i32x8(sums_10, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_3, (__m256i)value_21));
              sums_14 = zse_add_i16_i32x8(sums_14, pairs);
              value_21 = zse_splat_i32x8((*(rows_4 + 4LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_2, (__m256i)value_21));
              sums_11 = zse_add_i16_i32x8(sums_11, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_3, (__m256i)value_21));
              sums_15 = zse_add_i16_i32x8(sums_15, pairs);
              i32x8 packed_5 = (*(const i32x8_mem *)(packed + (((first__6 / 2LL) + 1LL) * 16LL)));
              i32x8 w_4 = (packed_5 & zse_splat_i32x8(252645135));
              i32x8 packed_6 = (*(const i32x8_mem *)((packed + (((first__6 / 2LL) + 1LL) * 16LL)) + 8LL));
              i32x8 w_5 = (packed_6 & zse_splat_i32x8(252645135));
              value_21 = zse_splat_i32x8((*(rows_3 + 1LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_4, (__m256i)value_21));
              sums_10 = zse_add_i16_i32x8(sums_10, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_5, (__m256i)value_21));
              sums_14 = zse_add_i16_i32x8(sums_14, pairs);
              value_21 = zse_splat_i32x8((*(rows_4 + 1LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_4, (__m256i)value_21));
              sums_11 = zse_add_i16_i32x8(sums_11, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_5, (__m256i)value_21));
              sums_15 = zse_add_i16_i32x8(sums_15, pairs);
              i32x8 packed_7 = (*(const i32x8_mem *)(packed + (((first__6 / 2LL) + 1LL) * 16LL)));
              i32x8 w_6 = ((packed_7 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 packed_8 = (*(const i32x8_mem *)((packed + (((first__6 / 2LL) + 1LL) * 16LL)) + 8LL));
              i32x8 w_7 = ((packed_8 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              value_21 = zse_splat_i32x8((*(rows_3 + 5LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_6, (__m256i)value_21));
              sums_10 = zse_add_i16_i32x8(sums_10, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_7, (__m256i)value_21));
              sums_14 = zse_add_i16_i32x8(sums_14, pairs);
              value_21 = zse_splat_i32x8((*(rows_4 + 5LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_6, (__m256i)value_21));
              sums_11 = zse_add_i16_i32x8(sums_11, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_7, (__m256i)value_21));
              sums_15 = zse_add_i16_i32x8(sums_15, pairs);
              i32x8 packed_9 = (*(const i32x8_mem *)(packed + (((first__6 / 2LL) + 2LL) * 16LL)));
              i32x8 w_8 = (packed_9 & zse_splat_i32x8(252645135));
              i32x8 packed_10 = (*(const i32x8_mem *)((packed + (((first__6 / 2LL) + 2LL) * 16LL)) + 8LL));
              i32x8 w_9 = (packed_10 & zse_splat_i32x8(252645135));
              value_21 = zse_splat_i32x8((*(rows_3 + 2LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)value_21));
              sums_10 = zse_add_i16_i32x8(sums_10, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)value_21));
              sums_14 = zse_add_i16_i32x8(sums_14, pairs);
              value_21 = zse_splat_i32x8((*(rows_4 + 2LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_8, (__m256i)value_21));
              sums_11 = zse_add_i16_i32x8(sums_11, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_9, (__m256i)value_21));
              sums_15 = zse_add_i16_i32x8(sums_15, pairs);
              i32x8 packed_11 = (*(const i32x8_mem *)(packed + (((first__6 / 2LL) + 2LL) * 16LL)));
              i32x8 w_10 = ((packed_11 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 packed_12 = (*(const i32x8_mem *)((packed + (((first__6 / 2LL) + 2LL) * 16LL)) + 8LL));
              i32x8 w_11 = ((packed_12 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              value_21 = zse_splat_i32x8((*(rows_3 + 6LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)value_21));
              sums_10 = zse_add_i16_i32x8(sums_10, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)value_21));
              sums_14 = zse_add_i16_i32x8(sums_14, pairs);
              value_21 = zse_splat_i32x8((*(rows_4 + 6LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_10, (__m256i)value_21));
              sums_11 = zse_add_i16_i32x8(sums_11, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_11, (__m256i)value_21));
              sums_15 = zse_add_i16_i32x8(sums_15, pairs);
              i32x8 packed_13 = (*(const i32x8_mem *)(packed + (((first__6 / 2LL) + 3LL) * 16LL)));
              i32x8 w_12 = (packed_13 & zse_splat_i32x8(252645135));
              i32x8 packed_14 = (*(const i32x8_mem *)((packed + (((first__6 / 2LL) + 3LL) * 16LL)) + 8LL));
              i32x8 w_13 = (packed_14 & zse_splat_i32x8(252645135));
              value_21 = zse_splat_i32x8((*(rows_3 + 3LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)value_21));
              sums_10 = zse_add_i16_i32x8(sums_10, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)value_21));
              sums_14 = zse_add_i16_i32x8(sums_14, pairs);
              value_21 = zse_splat_i32x8((*(rows_4 + 3LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_12, (__m256i)value_21));
              sums_11 = zse_add_i16_i32x8(sums_11, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_13, (__m256i)value_21));
              sums_15 = zse_add_i16_i32x8(sums_15, pairs);
              i32x8 packed_15 = (*(const i32x8_mem *)(packed + (((first__6 / 2LL) + 3LL) * 16LL)));
              i32x8 w_14 = ((packed_15 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 packed_16 = (*(const i32x8_mem *)((packed + (((first__6 / 2LL) + 3LL) * 16LL)) + 8LL));
              i32x8 w_15 = ((packed_16 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              value_21 = zse_splat_i32x8((*(rows_3 + 7LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)value_21));
              sums_10 = zse_add_i16_i32x8(sums_10, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)value_21));
              sums_14 = zse_add_i16_i32x8(sums_14, pairs);
              value_21 = zse_splat_i32x8((*(rows_4 + 7LL)));
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_14, (__m256i)value_21));
              sums_11 = zse_add_i16_i32x8(sums_11, pairs);
              pairs = ((i32x8)_mm256_maddubs_epi16((__m256i)w_15, (__m256i)value_21));
              sums_15 = zse_add_i16_i32x8(sums_15, pairs);
              totals_2 = (totals_2 + ((i32x8)_mm256_madd_epi16((__m256i)sums_10, _mm256_set1_epi16(1))));
              totals_6 = (totals_6 + ((i32x8)_mm256_madd_epi16((__m256i)sums_14, _mm256_set1_epi16(1))));
              totals_3 = (totals_3 + ((i32x8)_mm256_madd_epi16((__m256i)sums_11, _mm256_set1_epi16(1))));
              totals_7 = (totals_7 + ((i32x8)_mm256_madd_epi16((__m256i)sums_15, _mm256_set1_epi16(1))));
              f32x8 scale_1 = (*(const f32x8_mem *)(staged_1 + (((2LL * i_1) + 0LL) * 16LL)));
              f32x8 unit_3 = (scale_1 * zse_splat_f32x8((*(tokens_5 + i_1))));
              sums_2 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_2, f32x8), unit_3, sums_2));
              unit_3 = (scale_1 * zse_splat_f32x8((*(tokens_6 + i_1))));
              sums_3 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_3, f32x8), unit_3, sums_3));
              scale_1 = (*(const f32x8_mem *)((staged_1 + (((2LL * i_1) + 0LL) * 16LL)) + 8LL));
              unit_3 = (scale_1 * zse_splat_f32x8((*(tokens_5 + i_1))));
              sums_6 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_6, f32x8), unit_3, sums_6));
              unit_3 = (scale_1 * zse_splat_f32x8((*(tokens_6 + i_1))));
              sums_7 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_7, f32x8), unit_3, sums_7));
              f32x8 offset_2 = (*(const f32x8_mem *)(staged_2 + (((2LL * i_1) + 0LL) * 16LL)));
              float total = (*(tokens_7 + i_1));
              sums_2 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total), sums_2));
              total = (*(tokens_8 + i_1));
              sums_3 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total), sums_3));
              offset_2 = (*(const f32x8_mem *)((staged_2 + (((2LL * i_1) + 0LL) * 16LL)) + 8LL));
              total = (*(tokens_7 + i_1));
              sums_6 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total), sums_6));
              total = (*(tokens_8 + i_1));
              sums_7 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total), sums_7));
            }
            *(f32x8_mem *)mine = sums_2;
            *(f32x8_mem *)(mine + 16LL) = sums_3;
            *(f32x8_mem *)(mine + 8LL) = sums_6;
            *(f32x8_mem *)((mine + 16LL) + 8LL) = sums_7;
            if (((first__5 + 8LL) >= num_blocks)) {
              int64_t at_stop_1 = zse_minimum_i64((token + 2LL), token_last);
              for (int64_t at_1 = token; at_1 < at_stop_1; at_1 += 1LL) {
                f32x8 total_1 = (*(const f32x8_mem *)(mine + ((at_1 - token) * 16LL)));
                float * out_1 = (out + (at_1 * rows));
                const float * bias_1 = (bias + (expert_2 * rows));
                int64_t row_2 = ((tile_1 * 16LL) + 0LL);
                f32x8 total_2 = total_1;
                if ((has_bias != 0LL)) {
                  if (((row_2 + 8LL) <= rows)) {
                    total_2 = (total_2 + (*(const f32x8_mem *)(bias_1 + row_2)));
                  }
                }
                if (((row_2 + 8LL) <= rows)) {
                  *(f32x8_mem *)(out_1 + row_2) = total_2;
                } else {
                  float scratch_5[16] __attribute__((aligned(64)));
                  float * spill = scratch_5;
                  *(f32x8_mem *)spill = total_2;
                  for (int64_t r = row_2; r < rows; r += 1LL) {
                    if ((has_bias != 0LL)) {
                      *(out_1 + r) = ((*(spill + (r - row_2))) + (*(bias_1 + r)));
                    } else {
                      *(out_1 + r) = (*(spill + (r - row_2)));
                    }
                  }
                }
                total_1 = (*(const f32x8_mem *)((mine + ((at_1 - token) * 16LL)) + 8LL));
                float * out_2 = (out + (at_1 * rows));
                const float * bias_2 = (bias + (expert_2 * rows));
                int64_t row_3 = ((tile_1 * 16LL) + 8LL);
                f32x8 total_3 = total_1;
                if ((has_bias != 0LL)) {
                  if (((row_3 + 8LL) <= rows)) {
                    total_3 = (total_3 + (*(const f32x8_mem *)(bias_2 + row_3)));
                  }
                }
                if (((row_3 + 8LL) <= rows)) {
                  *(f32x8_mem *)(out_2 + row_3) = total_3;
                } else {
                  float scratch_6[16] __attribute__((aligned(64)));
                  float * spill_1 = scratch_6;
                  *(f32x8_mem *)spill_1 = total_3;
                  for (int64_t r_1 = row_3; r_1 < rows; r_1 += 1LL) {
                    if ((has_bias != 0LL)) {
                      *(out_2 + r_1) = ((*(spill_1 + (r_1 - row_3))) + (*(bias_2 + r_1)));
                    } else {
                      *(out_2 + r_1) = (*(spill_1 + (r_1 - row_3)));
                    }
                  }
                }
              }
            }
          }
        }
      }
    } else {
      if (((last__1 - first__2) <= 12LL)) {
        int64_t tile_last_1 = (tile + 1LL);
        int64_t expert_3 = 0LL;
        int64_t first__7 = (block_1 * 64LL);
        int64_t value_22 = first__7;
        int64_t value_23 = zse_minimum_i64((first__7 + 64LL), tokens);
        int64_t first__8 = value_22;
        int64_t last__3 = value_23;
        if ((experts != 0LL)) {
          const int32_t * task_2 = (tasks + (block_1 * 3LL));
          expert_3 = ((int64_t)(*task_2));
          first__8 = ((int64_t)(*(task_2 + 1LL)));
          last__3 = ((int64_t)(*(task_2 + 2LL)));
        }
        int64_t value_24 = expert_3;
        int64_t value_25 = first__8;
        int64_t value_26 = last__3;
        int64_t expert_4 = value_24;
        int64_t token_first_1 = value_25;
        int64_t token_last_1 = value_26;
        int64_t groups_1 = blocks;
        float scratch_8[256] __attribute__((aligned(64)));
        float scratch_9[256] __attribute__((aligned(64)));
        float * staged_5 = scratch_8;
        float * staged_6 = scratch_9;
        float scratch_11[1024] __attribute__((aligned(64)));
        float * acc_1 = scratch_11;
        int64_t num_blocks_1 = 0LL;
        int64_t padded_1 = ((((token_last_1 - token_first_1) + 3LL) / 4LL) * 4LL);
        if (((token_first_1 < token_last_1) && (tile < tile_last_1))) {
          num_blocks_1 = blocks;
          int64_t at_stop_2 = (padded_1 * 16LL);
          for (int64_t at_2 = 0LL; at_2 < at_stop_2; at_2 += 8LL) {
            *(f32x8_mem *)(acc_1 + at_2) = zse_splat_f32x8((0.0f));
          }
        }
        for (int64_t first__9 = 0LL; first__9 < num_blocks_1; first__9 += 8LL) {
          int64_t count_1 = zse_minimum_i64((num_blocks_1 - first__9), 8LL);
          for (int64_t tile_3 = tile; tile_3 < tile_last_1; tile_3 += 1LL) {
            int64_t tile_4 = ((expert_4 * ((rows + 15LL) / 16LL)) + tile_3);
            const int32_t * now_4 = (q + ((tile_4 * blocks) * 64LL));
            const uint16_t * now_6 = (scale + ((tile_4 * groups_1) * 16LL));
            const uint16_t * now_7 = (offset + ((tile_4 * groups_1) * 16LL));
            const int32_t * packed_17 = (now_4 + (first__9 * 64LL));
            for (int64_t i_2 = 0LL; i_2 < count_1; i_2 += 1LL) {
              int64_t block__2 = (first__9 + i_2);
              int64_t group_2 = block__2;
              f32x8 s_4 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)(now_6 + (group_2 * 16LL)))));
              f32x8 value_27 = s_4;
              f32x8 value_28 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)(now_7 + (group_2 * 16LL)))));
              f32x8 s_5 = value_27;
              f32x8 o_2 = value_28;
              f32x8 unit_4 = s_5;
              f32x8 value_29 = unit_4;
              f32x8 value_30 = o_2;
              f32x8 unit_5 = value_29;
              f32x8 offset_3 = value_30;
              *(f32x8_mem *)(staged_5 + (((i_2 * 2LL) + 0LL) * 16LL)) = unit_5;
              *(f32x8_mem *)(staged_6 + (((i_2 * 2LL) + 0LL) * 16LL)) = offset_3;
              group_2 = block__2;
              f32x8 s_6 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((now_6 + (group_2 * 16LL)) + 8LL))));
              f32x8 value_31 = s_6;
              f32x8 value_32 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((now_7 + (group_2 * 16LL)) + 8LL))));
              f32x8 s_7 = value_31;
              f32x8 o_3 = value_32;
              f32x8 unit_6 = s_7;
              f32x8 value_33 = unit_6;
              f32x8 value_34 = o_3;
              unit_5 = value_33;
              offset_3 = value_34;
              *(f32x8_mem *)((staged_5 + (((i_2 * 2LL) + 0LL) * 16LL)) + 8LL) = unit_5;
              *(f32x8_mem *)((staged_6 + (((i_2 * 2LL) + 0LL) * 16LL)) + 8LL) = offset_3;
            }
            const int32_t * planes_4 = now_4;
            const uint16_t * planes_6 = now_6;
            const uint16_t * planes_7 = now_7;
            for (int64_t token_3 = token_first_1; token_3 < token_last_1; token_3 += 4LL) {
              const int32_t * ahead_6 = planes_4;
              const uint16_t * ahead_8 = planes_6;
              const uint16_t * ahead_9 = planes_7;
              int64_t ahead_10 = (first__9 + 16LL);
              _Bool ahead_11 = (token_3 == token_first_1);
              float * mine_1 = (acc_1 + (((((tile_3 - tile) * padded_1) + token_3) - token_first_1) * 16LL));
              int64_t token_4 = zse_minimum_i64((token_3 + 0LL), (token_last_1 - 1LL));
              int64_t row_4 = (token_4 + 0LL);
              if ((experts == 2LL)) {
                row_4 = ((int64_t)(*(source + token_4)));
              }
              int64_t rows_5 = row_4;
              int64_t token_5 = zse_minimum_i64((token_3 + 1LL), (token_last_1 - 1LL));
              int64_t row_5 = (token_5 + 0LL);
              if ((experts == 2LL)) {
                row_5 = ((int64_t)(*(source + token_5)));
              }
              int64_t rows_6 = row_5;
              int64_t token_6 = zse_minimum_i64((token_3 + 2LL), (token_last_1 - 1LL));
              int64_t row_6 = (token_6 + 0LL);
              if ((experts == 2LL)) {
                row_6 = ((int64_t)(*(source + token_6)));
              }
              int64_t rows_7 = row_6;
              int64_t token_7 = zse_minimum_i64((token_3 + 3LL), (token_last_1 - 1LL));
              int64_t row_7 = (token_7 + 0LL);
              if ((experts == 2LL)) {
                row_7 = ((int64_t)(*(source + token_7)));
              }
              int64_t rows_8 = row_7;
              int64_t tokens_9 = ((rows_5 * blocks) + first__9);
              int64_t tokens_10 = ((rows_6 * blocks) + first__9);
              int64_t tokens_11 = ((rows_7 * blocks) + first__9);
              int64_t tokens_12 = ((rows_8 * blocks) + first__9);
              const int32_t * words_2 = ((const int32_t *)(aq + (tokens_9 * 32LL)));
              const int32_t * words_3 = ((const int32_t *)(aq + (tokens_10 * 32LL)));
              const int32_t * words_4 = ((const int32_t *)(aq + (tokens_11 * 32LL)));
              const int32_t * words_5 = ((const int32_t *)(aq + (tokens_12 * 32LL)));
              const float * item_4 = (a_scale + tokens_9);
              const float * item_5 = (a_scale + tokens_10);
              const float * item_6 = (a_scale + tokens_11);
              const float * item_7 = (a_scale + tokens_12);
              const float * item_8 = (a_sum + tokens_9);
              const float * item_9 = (a_sum + tokens_10);
              const float * item_10 = (a_sum + tokens_11);
              const float * item_11 = (a_sum + tokens_12);
              const int32_t * tokens_13 = words_2;
              const int32_t * tokens_14 = words_3;
              const int32_t * tokens_15 = words_4;
              const int32_t * tokens_16 = words_5;
              const float * tokens_17 = item_4;
              const float * tokens_18 = item_5;
              const float * tokens_19 = item_6;
              const float * tokens_20 = item_7;
              const float * tokens_21 = item_8;
              const float * tokens_22 = item_9;
              const float * tokens_23 = item_10;
              const float * tokens_24 = item_11;
              f32x8 sums_16 = (*(const f32x8_mem *)mine_1);
              f32x8 sums_17 = (*(const f32x8_mem *)(mine_1 + 16LL));
              f32x8 sums_18 = (*(const f32x8_mem *)(mine_1 + 32LL));
              f32x8 sums_19 = (*(const f32x8_mem *)(mine_1 + 48LL));
              f32x8 sums_20 = sums_16;
              f32x8 sums_21 = sums_17;
              f32x8 sums_22 = sums_18;
              f32x8 sums_23 = sums_19;
              f32x8 sums_24 = (*(const f32x8_mem *)(mine_1 + 8LL));
              f32x8 sums_25 = (*(const f32x8_mem *)((mine_1 + 16LL) + 8LL));
              f32x8 sums_26 = (*(const f32x8_mem *)((mine_1 + 32LL) + 8LL));
              f32x8 sums_27 = (*(const f32x8_mem *)((mine_1 + 48LL) + 8LL));
              f32x8 sums_28 = sums_24;
              f32x8 sums_29 = sums_25;
              f32x8 sums_30 = sums_26;
              f32x8 sums_31 = sums_27;
              for (int64_t i_3 = 0LL; i_3 < count_1; i_3 += 1LL) {
                if (ahead_11) {
                  int64_t block__3 = (ahead_10 + i_3);
                  __builtin_prefetch((ahead_6 + (block__3 * 64LL)), 0, 2);
                  __builtin_prefetch(((ahead_6 + (block__3 * 64LL)) + 16LL), 0, 2);
                  __builtin_prefetch(((ahead_6 + (block__3 * 64LL)) + 32LL), 0, 2);
                  __builtin_prefetch(((ahead_6 + (block__3 * 64LL)) + 48LL), 0, 2);
                  int64_t group_3 = block__3;
                  __builtin_prefetch((ahead_8 + (group_3 * 16LL)), 0, 2);
                  __builtin_prefetch((ahead_9 + (group_3 * 16LL)), 0, 2);
                }
                const int32_t * rows_9 = (tokens_13 + (i_3 * 8LL));
                const int32_t * rows_10 = (tokens_14 + (i_3 * 8LL));
                const int32_t * rows_11 = (tokens_15 + (i_3 * 8LL));
                const int32_t * rows_12 = (tokens_16 + (i_3 * 8LL));
                int64_t first__10 = (i_3 * 8LL);
                i32x8 totals_8 = zse_splat_i32x8(0);
                i32x8 totals_9 = zse_splat_i32x8(0);
                i32x8 totals_10 = zse_splat_i32x8(0);
                i32x8 totals_11 = zse_splat_i32x8(0);
                i32x8 totals_12 = totals_8;
                i32x8 totals_13 = totals_9;
                i32x8 totals_14 = totals_10;
                i32x8 totals_15 = totals_11;
                i32x8 totals_16 = zse_splat_i32x8(0);
                i32x8 totals_17 = zse_splat_i32x8(0);
                i32x8 totals_18 = zse_splat_i32x8(0);
                i32x8 totals_19 = zse_splat_i32x8(0);
                i32x8 totals_20 = totals_16;
                i32x8 totals_21 = totals_17;
                i32x8 totals_22 = totals_18;
                i32x8 totals_23 = totals_19;
                i32x8 sums_32 = zse_splat_i32x8(0);
                i32x8 sums_33 = zse_splat_i32x8(0);
                i32x8 sums_34 = zse_splat_i32x8(0);
                i32x8 sums_35 = zse_splat_i32x8(0);
                i32x8 sums_36 = sums_32;
                i32x8 sums_37 = sums_33;
                i32x8 sums_38 = sums_34;
                i32x8 sums_39 = sums_35;
                i32x8 sums_40 = zse_splat_i32x8(0);
                i32x8 sums_41 = zse_splat_i32x8(0);
                i32x8 sums_42 = zse_splat_i32x8(0);
                i32x8 sums_43 = zse_splat_i32x8(0);
                i32x8 sums_44 = sums_40;
                i32x8 sums_45 = sums_41;
                i32x8 sums_46 = sums_42;
                i32x8 sums_47 = sums_43;
                i32x8 packed_18 = (*(const i32x8_mem *)(packed_17 + (((first__10 / 2LL) + 0LL) * 16LL)));
                i32x8 w_16 = (packed_18 & zse_splat_i32x8(252645135));
                i32x8 packed_19 = (*(const i32x8_mem *)((packed_17 + (((first__10 / 2LL) + 0LL) * 16LL)) + 8LL));
                i32x8 w_17 = (packed_19 & zse_splat_i32x8(252645135));
                i32x8 value_39 = zse_splat_i32x8((*rows_9));
                i32x8 pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_16, (__m256i)value_39));
                sums_36 = pairs_1;
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_17, (__m256i)value_39));
                sums_44 = pairs_1;
                value_39 = zse_splat_i32x8((*rows_10));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_16, (__m256i)value_39));
                sums_37 = pairs_1;
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_17, (__m256i)value_39));
                sums_45 = pairs_1;
                value_39 = zse_splat_i32x8((*rows_11));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_16, (__m256i)value_39));
                sums_38 = pairs_1;
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_17, (__m256i)value_39));
                sums_46 = pairs_1;
                value_39 = zse_splat_i32x8((*rows_12));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_16, (__m256i)value_39));
                sums_39 = pairs_1;
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_17, (__m256i)value_39));
                sums_47 = pairs_1;
                i32x8 packed_20 = (*(const i32x8_mem *)(packed_17 + (((first__10 / 2LL) + 0LL) * 16LL)));
                i32x8 w_18 = ((packed_20 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
                i32x8 packed_21 = (*(const i32x8_mem *)((packed_17 + (((first__10 / 2LL) + 0LL) * 16LL)) + 8LL));
                i32x8 w_19 = ((packed_21 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
                value_39 = zse_splat_i32x8((*(rows_9 + 4LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_18, (__m256i)value_39));
                sums_36 = zse_add_i16_i32x8(sums_36, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_19, (__m256i)value_39));
                sums_44 = zse_add_i16_i32x8(sums_44, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_10 + 4LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_18, (__m256i)value_39));
                sums_37 = zse_add_i16_i32x8(sums_37, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_19, (__m256i)value_39));
                sums_45 = zse_add_i16_i32x8(sums_45, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_11 + 4LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_18, (__m256i)value_39));
                sums_38 = zse_add_i16_i32x8(sums_38, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_19, (__m256i)value_39));
                sums_46 = zse_add_i16_i32x8(sums_46, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_12 + 4LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_18, (__m256i)value_39));
                sums_39 = zse_add_i16_i32x8(sums_39, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_19, (__m256i)value_39));
                sums_47 = zse_add_i16_i32x8(sums_47, pairs_1);
                i32x8 packed_22 = (*(const i32x8_mem *)(packed_17 + (((first__10 / 2LL) + 1LL) * 16LL)));
                i32x8 w_20 = (packed_22 & zse_splat_i32x8(252645135));
                i32x8 packed_23 = (*(const i32x8_mem *)((packed_17 + (((first__10 / 2LL) + 1LL) * 16LL)) + 8LL));
                i32x8 w_21 = (packed_23 & zse_splat_i32x8(252645135));
                value_39 = zse_splat_i32x8((*(rows_9 + 1LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_20, (__m256i)value_39));
                sums_36 = zse_add_i16_i32x8(sums_36, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_21, (__m256i)value_39));
                sums_44 = zse_add_i16_i32x8(sums_44, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_10 + 1LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_20, (__m256i)value_39));
                sums_37 = zse_add_i16_i32x8(sums_37, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_21, (__m256i)value_39));
                sums_45 = zse_add_i16_i32x8(sums_45, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_11 + 1LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_20, (__m256i)value_39));
                sums_38 = zse_add_i16_i32x8(sums_38, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_21, (__m256i)value_39));
                sums_46 = zse_add_i16_i32x8(sums_46, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_12 + 1LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_20, (__m256i)value_39));
                sums_39 = zse_add_i16_i32x8(sums_39, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_21, (__m256i)value_39));
                sums_47 = zse_add_i16_i32x8(sums_47, pairs_1);
                i32x8 packed_24 = (*(const i32x8_mem *)(packed_17 + (((first__10 / 2LL) + 1LL) * 16LL)));
                i32x8 w_22 = ((packed_24 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
                i32x8 packed_25 = (*(const i32x8_mem *)((packed_17 + (((first__10 / 2LL) + 1LL) * 16LL)) + 8LL));
                i32x8 w_23 = ((packed_25 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
                value_39 = zse_splat_i32x8((*(rows_9 + 5LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_22, (__m256i)value_39));
                sums_36 = zse_add_i16_i32x8(sums_36, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_23, (__m256i)value_39));
                sums_44 = zse_add_i16_i32x8(sums_44, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_10 + 5LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_22, (__m256i)value_39));
                sums_37 = zse_add_i16_i32x8(sums_37, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_23, (__m256i)value_39));
                sums_45 = zse_add_i16_i32x8(sums_45, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_11 + 5LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_22, (__m256i)value_39));
                sums_38 = zse_add_i16_i32x8(sums_38, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_23, (__m256i)value_39));
                sums_46 = zse_add_i16_i32x8(sums_46, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_12 + 5LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_22, (__m256i)value_39));
                sums_39 = zse_add_i16_i32x8(sums_39, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_23, (__m256i)value_39));
                sums_47 = zse_add_i16_i32x8(sums_47, pairs_1);
                i32x8 packed_26 = (*(const i32x8_mem *)(packed_17 + (((first__10 / 2LL) + 2LL) * 16LL)));
                i32x8 w_24 = (packed_26 & zse_splat_i32x8(252645135));
                i32x8 packed_27 = (*(const i32x8_mem *)((packed_17 + (((first__10 / 2LL) + 2LL) * 16LL)) + 8LL));
                i32x8 w_25 = (packed_27 & zse_splat_i32x8(252645135));
                value_39 = zse_splat_i32x8((*(rows_9 + 2LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_24, (__m256i)value_39));
                sums_36 = zse_add_i16_i32x8(sums_36, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_25, (__m256i)value_39));
                sums_44 = zse_add_i16_i32x8(sums_44, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_10 + 2LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_24, (__m256i)value_39));
                sums_37 = zse_add_i16_i32x8(sums_37, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_25, (__m256i)value_39));
                sums_45 = zse_add_i16_i32x8(sums_45, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_11 + 2LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_24, (__m256i)value_39));
                sums_38 = zse_add_i16_i32x8(sums_38, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_25, (__m256i)value_39));
                sums_46 = zse_add_i16_i32x8(sums_46, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_12 + 2LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_24, (__m256i)value_39));
                sums_39 = zse_add_i16_i32x8(sums_39, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_25, (__m256i)value_39));
                sums_47 = zse_add_i16_i32x8(sums_47, pairs_1);
                i32x8 packed_28 = (*(const i32x8_mem *)(packed_17 + (((first__10 / 2LL) + 2LL) * 16LL)));
                i32x8 w_26 = ((packed_28 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
                i32x8 packed_29 = (*(const i32x8_mem *)((packed_17 + (((first__10 / 2LL) + 2LL) * 16LL)) + 8LL));
                i32x8 w_27 = ((packed_29 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
                value_39 = zse_splat_i32x8((*(rows_9 + 6LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_26, (__m256i)value_39));
                sums_36 = zse_add_i16_i32x8(sums_36, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_27, (__m256i)value_39));
                sums_44 = zse_add_i16_i32x8(sums_44, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_10 + 6LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_26, (__m256i)value_39));
                sums_37 = zse_add_i16_i32x8(sums_37, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_27, (__m256i)value_39));
                sums_45 = zse_add_i16_i32x8(sums_45, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_11 + 6LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_26, (__m256i)value_39));
                sums_38 = zse_add_i16_i32x8(sums_38, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_27, (__m256i)value_39));
                sums_46 = zse_add_i16_i32x8(sums_46, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_12 + 6LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_26, (__m256i)value_39));
                sums_39 = zse_add_i16_i32x8(sums_39, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_27, (__m256i)value_39));
                sums_47 = zse_add_i16_i32x8(sums_47, pairs_1);
                i32x8 packed_30 = (*(const i32x8_mem *)(packed_17 + (((first__10 / 2LL) + 3LL) * 16LL)));
                i32x8 w_28 = (packed_30 & zse_splat_i32x8(252645135));
                i32x8 packed_31 = (*(const i32x8_mem *)((packed_17 + (((first__10 / 2LL) + 3LL) * 16LL)) + 8LL));
                i32x8 w_29 = (packed_31 & zse_splat_i32x8(252645135));
                value_39 = zse_splat_i32x8((*(rows_9 + 3LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_28, (__m256i)value_39));
                sums_36 = zse_add_i16_i32x8(sums_36, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_29, (__m256i)value_39));
                sums_44 = zse_add_i16_i32x8(sums_44, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_10 + 3LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_28, (__m256i)value_39));
                sums_37 = zse_add_i16_i32x8(sums_37, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_29, (__m256i)value_39));
                sums_45 = zse_add_i16_i32x8(sums_45, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_11 + 3LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_28, (__m256i)value_39));
                sums_38 = zse_add_i16_i32x8(sums_38, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_29, (__m256i)value_39));
                sums_46 = zse_add_i16_i32x8(sums_46, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_12 + 3LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_28, (__m256i)value_39));
                sums_39 = zse_add_i16_i32x8(sums_39, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_29, (__m256i)value_39));
                sums_47 = zse_add_i16_i32x8(sums_47, pairs_1);
                i32x8 packed_32 = (*(const i32x8_mem *)(packed_17 + (((first__10 / 2LL) + 3LL) * 16LL)));
                i32x8 w_30 = ((packed_32 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
                i32x8 packed_33 = (*(const i32x8_mem *)((packed_17 + (((first__10 / 2LL) + 3LL) * 16LL)) + 8LL));
                i32x8 w_31 = ((packed_33 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
                value_39 = zse_splat_i32x8((*(rows_9 + 7LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_30, (__m256i)value_39));
                sums_36 = zse_add_i16_i32x8(sums_36, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_31, (__m256i)value_39));
                sums_44 = zse_add_i16_i32x8(sums_44, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_10 + 7LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_30, (__m256i)value_39));
                sums_37 = zse_add_i16_i32x8(sums_37, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_31, (__m256i)value_39));
                sums_45 = zse_add_i16_i32x8(sums_45, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_11 + 7LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_30, (__m256i)value_39));
                sums_38 = zse_add_i16_i32x8(sums_38, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_31, (__m256i)value_39));
                sums_46 = zse_add_i16_i32x8(sums_46, pairs_1);
                value_39 = zse_splat_i32x8((*(rows_12 + 7LL)));
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_30, (__m256i)value_39));
                sums_39 = zse_add_i16_i32x8(sums_39, pairs_1);
                pairs_1 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_31, (__m256i)value_39));
                sums_47 = zse_add_i16_i32x8(sums_47, pairs_1);
                totals_12 = (totals_12 + ((i32x8)_mm256_madd_epi16((__m256i)sums_36, _mm256_set1_epi16(1))));
                totals_20 = (totals_20 + ((i32x8)_mm256_madd_epi16((__m256i)sums_44, _mm256_set1_epi16(1))));
                totals_13 = (totals_13 + ((i32x8)_mm256_madd_epi16((__m256i)sums_37, _mm256_set1_epi16(1))));
                totals_21 = (totals_21 + ((i32x8)_mm256_madd_epi16((__m256i)sums_45, _mm256_set1_epi16(1))));
                totals_14 = (totals_14 + ((i32x8)_mm256_madd_epi16((__m256i)sums_38, _mm256_set1_epi16(1))));
                totals_22 = (totals_22 + ((i32x8)_mm256_madd_epi16((__m256i)sums_46, _mm256_set1_epi16(1))));
                totals_15 = (totals_15 + ((i32x8)_mm256_madd_epi16((__m256i)sums_39, _mm256_set1_epi16(1))));
                totals_23 = (totals_23 + ((i32x8)_mm256_madd_epi16((__m256i)sums_47, _mm256_set1_epi16(1))));
                f32x8 scale_2 = (*(const f32x8_mem *)(staged_5 + (((2LL * i_3) + 0LL) * 16LL)));
                f32x8 unit_7 = (scale_2 * zse_splat_f32x8((*(tokens_17 + i_3))));
                sums_20 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_12, f32x8), unit_7, sums_20));
                unit_7 = (scale_2 * zse_splat_f32x8((*(tokens_18 + i_3))));
                sums_21 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_13, f32x8), unit_7, sums_21));
                unit_7 = (scale_2 * zse_splat_f32x8((*(tokens_19 + i_3))));
                sums_22 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_14, f32x8), unit_7, sums_22));
                unit_7 = (scale_2 * zse_splat_f32x8((*(tokens_20 + i_3))));
                sums_23 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_15, f32x8), unit_7, sums_23));
                scale_2 = (*(const f32x8_mem *)((staged_5 + (((2LL * i_3) + 0LL) * 16LL)) + 8LL));
                unit_7 = (scale_2 * zse_splat_f32x8((*(tokens_17 + i_3))));
                sums_28 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_20, f32x8), unit_7, sums_28));
                unit_7 = (scale_2 * zse_splat_f32x8((*(tokens_18 + i_3))));
                sums_29 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_21, f32x8), unit_7, sums_29));
                unit_7 = (scale_2 * zse_splat_f32x8((*(tokens_19 + i_3))));
                sums_30 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_22, f32x8), unit_7, sums_30));
                unit_7 = (scale_2 * zse_splat_f32x8((*(tokens_20 + i_3))));
                sums_31 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_23, f32x8), unit_7, sums_31));
                f32x8 offset_4 = (*(const f32x8_mem *)(staged_6 + (((2LL * i_3) + 0LL) * 16LL)));
                float total_4 = (*(tokens_21 + i_3));
                sums_20 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_20));
                total_4 = (*(tokens_22 + i_3));
                sums_21 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_21));
                total_4 = (*(tokens_23 + i_3));
                sums_22 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_22));
                total_4 = (*(tokens_24 + i_3));
                sums_23 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_23));
                offset_4 = (*(const f32x8_mem *)((staged_6 + (((2LL * i_3) + 0LL) * 16LL)) + 8LL));
                total_4 = (*(tokens_21 + i_3));
                sums_28 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_28));
                total_4 = (*(tokens_22 + i_3));
                sums_29 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_29));
                total_4 = (*(tokens_23 + i_3));
                sums_30 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_30));
                total_4 = (*(tokens_24 + i_3));
                sums_31 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_31));
              }
              *(f32x8_mem *)mine_1 = sums_20;
              *(f32x8_mem *)(mine_1 + 16LL) = sums_21;
              *(f32x8_mem *)(mine_1 + 32LL) = sums_22;
              *(f32x8_mem *)(mine_1 + 48LL) = sums_23;
              *(f32x8_mem *)(mine_1 + 8LL) = sums_28;
              *(f32x8_mem *)((mine_1 + 16LL) + 8LL) = sums_29;
              *(f32x8_mem *)((mine_1 + 32LL) + 8LL) = sums_30;
              *(f32x8_mem *)((mine_1 + 48LL) + 8LL) = sums_31;
              if (((first__9 + 8LL) >= num_blocks_1)) {
                int64_t at_stop_3 = zse_minimum_i64((token_3 + 4LL), token_last_1);
                for (int64_t at_3 = token_3; at_3 < at_stop_3; at_3 += 1LL) {
                  f32x8 total_5 = (*(const f32x8_mem *)(mine_1 + ((at_3 - token_3) * 16LL)));
                  float * out_3 = (out + (at_3 * rows));
                  const float * bias_3 = (bias + (expert_4 * rows));
                  int64_t row_8 = ((tile_3 * 16LL) + 0LL);
                  f32x8 total_6 = total_5;
                  if ((has_bias != 0LL)) {
                    if (((row_8 + 8LL) <= rows)) {
                      total_6 = (total_6 + (*(const f32x8_mem *)(bias_3 + row_8)));
                    }
                  }
                  if (((row_8 + 8LL) <= rows)) {
                    *(f32x8_mem *)(out_3 + row_8) = total_6;
                  } else {
                    float scratch_12[16] __attribute__((aligned(64)));
                    float * spill_2 = scratch_12;
                    *(f32x8_mem *)spill_2 = total_6;
                    for (int64_t r_2 = row_8; r_2 < rows; r_2 += 1LL) {
                      if ((has_bias != 0LL)) {
                        *(out_3 + r_2) = ((*(spill_2 + (r_2 - row_8))) + (*(bias_3 + r_2)));
                      } else {
                        *(out_3 + r_2) = (*(spill_2 + (r_2 - row_8)));
                      }
                    }
                  }
                  total_5 = (*(const f32x8_mem *)((mine_1 + ((at_3 - token_3) * 16LL)) + 8LL));
                  float * out_4 = (out + (at_3 * rows));
                  const float * bias_4 = (bias + (expert_4 * rows));
                  int64_t row_9 = ((tile_3 * 16LL) + 8LL);
                  f32x8 total_7 = total_5;
                  if ((has_bias != 0LL)) {
                    if (((row_9 + 8LL) <= rows)) {
                      total_7 = (total_7 + (*(const f32x8_mem *)(bias_4 + row_9)));
                    }
                  }
                  if (((row_9 + 8LL) <= rows)) {
                    *(f32x8_mem *)(out_4 + row_9) = total_7;
                  } else {
                    float scratch_13[16] __attribute__((aligned(64)));
                    float * spill_3 = scratch_13;
                    *(f32x8_mem *)spill_3 = total_7;
                    for (int64_t r_3 = row_9; r_3 < rows; r_3 += 1LL) {
                      if ((has_bias != 0LL)) {
                        *(out_4 + r_3) = ((*(spill_3 + (r_3 - row_9))) + (*(bias_4 + r_3)));
                      } else {
                        *(out_4 + r_3) = (*(spill_3 + (r_3 - row_9)));
                      }
                    }
                  }
                }
              }
            }
          }
        }
      } else {
        int64_t tile_last_2 = (tile + 1LL);
        int64_t expert_5 = 0LL;
        int64_t first__11 = (block_1 * 64LL);
        int64_t value_40 = first__11;
        int64_t value_41 = zse_minimum_i64((first__11 + 64LL), tokens);
        int64_t first__12 = value_40;
        int64_t last__4 = value_41;
        if ((experts != 0LL)) {
          const int32_t * task_3 = (tasks + (block_1 * 3LL));
          expert_5 = ((int64_t)(*task_3));
          first__12 = ((int64_t)(*(task_3 + 1LL)));
          last__4 = ((int64_t)(*(task_3 + 2LL)));
        }
        int64_t value_42 = expert_5;
        int64_t value_43 = first__12;
        int64_t value_44 = last__4;
        int64_t expert_6 = value_42;
        int64_t token_first_2 = value_43;
        int64_t token_last_2 = value_44;
        int64_t groups_2 = blocks;
        int32_t scratch_14[1024] __attribute__((aligned(64)));
        float scratch_15[256] __attribute__((aligned(64)));
        float scratch_16[256] __attribute__((aligned(64)));
        int32_t * staged_8 = scratch_14;
        float * staged_9 = scratch_15;
        float * staged_10 = scratch_16;
        float scratch_18[1024] __attribute__((aligned(64)));
        float * acc_2 = scratch_18;
        int64_t num_blocks_2 = 0LL;
        int64_t padded_2 = ((((token_last_2 - token_first_2) + 3LL) / 4LL) * 4LL);
        if (((token_first_2 < token_last_2) && (tile < tile_last_2))) {
          num_blocks_2 = blocks;
          int64_t at_stop_4 = (padded_2 * 16LL);
          for (int64_t at_4 = 0LL; at_4 < at_stop_4; at_4 += 8LL) {
            *(f32x8_mem *)(acc_2 + at_4) = zse_splat_f32x8((0.0f));
          }
        }
        for (int64_t first__13 = 0LL; first__13 < num_blocks_2; first__13 += 8LL) {
          int64_t count_2 = zse_minimum_i64((num_blocks_2 - first__13), 8LL);
          for (int64_t tile_5 = tile; tile_5 < tile_last_2; tile_5 += 1LL) {
            int64_t tile_6 = ((expert_6 * ((rows + 15LL) / 16LL)) + tile_5);
            const int32_t * now_8 = (q + ((tile_6 * blocks) * 64LL));
            const uint16_t * now_10 = (scale + ((tile_6 * groups_2) * 16LL));
            const uint16_t * now_11 = (offset + ((tile_6 * groups_2) * 16LL));
            for (int64_t i_4 = 0LL; i_4 < count_2; i_4 += 1LL) {
              int64_t block__4 = (first__13 + i_4);
              i32x8 packed_34 = (*(const i32x8_mem *)(now_8 + (block__4 * 64LL)));
              i32x8 packed_35 = (*(const i32x8_mem *)((now_8 + (block__4 * 64LL)) + 16LL));
              i32x8 packed_36 = (*(const i32x8_mem *)((now_8 + (block__4 * 64LL)) + 32LL));
              i32x8 packed_37 = (*(const i32x8_mem *)((now_8 + (block__4 * 64LL)) + 48LL));
              i32x8 w_32 = (packed_34 & zse_splat_i32x8(252645135));
              i32x8 w_33 = (packed_35 & zse_splat_i32x8(252645135));
              i32x8 w_34 = (packed_36 & zse_splat_i32x8(252645135));
              i32x8 w_35 = (packed_37 & zse_splat_i32x8(252645135));
              i32x8 w_36 = ((packed_34 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 w_37 = ((packed_35 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 w_38 = ((packed_36 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 w_39 = ((packed_37 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              *(i32x8_mem *)(staged_8 + (((i_4 * 8LL) + 0LL) * 16LL)) = w_32;
              *(i32x8_mem *)(staged_8 + (((i_4 * 8LL) + 1LL) * 16LL)) = w_33;
              *(i32x8_mem *)(staged_8 + (((i_4 * 8LL) + 2LL) * 16LL)) = w_34;
              *(i32x8_mem *)(staged_8 + (((i_4 * 8LL) + 3LL) * 16LL)) = w_35;
              *(i32x8_mem *)(staged_8 + (((i_4 * 8LL) + 4LL) * 16LL)) = w_36;
              *(i32x8_mem *)(staged_8 + (((i_4 * 8LL) + 5LL) * 16LL)) = w_37;
              *(i32x8_mem *)(staged_8 + (((i_4 * 8LL) + 6LL) * 16LL)) = w_38;
              *(i32x8_mem *)(staged_8 + (((i_4 * 8LL) + 7LL) * 16LL)) = w_39;
              int64_t group_4 = block__4;
              f32x8 s_8 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)(now_10 + (group_4 * 16LL)))));
              f32x8 value_45 = s_8;
              f32x8 value_46 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)(now_11 + (group_4 * 16LL)))));
              f32x8 s_9 = value_45;
              f32x8 o_4 = value_46;
              f32x8 unit_8 = s_9;
              f32x8 value_47 = unit_8;
              f32x8 value_48 = o_4;
              f32x8 unit_9 = value_47;
              f32x8 offset_5 = value_48;
              *(f32x8_mem *)(staged_9 + (((i_4 * 2LL) + 0LL) * 16LL)) = unit_9;
              *(f32x8_mem *)(staged_10 + (((i_4 * 2LL) + 0LL) * 16LL)) = offset_5;
              i32x8 packed_38 = (*(const i32x8_mem *)((now_8 + (block__4 * 64LL)) + 8LL));
              i32x8 packed_39 = (*(const i32x8_mem *)((now_8 + (block__4 * 64LL)) + 24LL));
              i32x8 packed_40 = (*(const i32x8_mem *)((now_8 + (block__4 * 64LL)) + 40LL));
              i32x8 packed_41 = (*(const i32x8_mem *)((now_8 + (block__4 * 64LL)) + 56LL));
              i32x8 w_40 = (packed_38 & zse_splat_i32x8(252645135));
              i32x8 w_41 = (packed_39 & zse_splat_i32x8(252645135));
              i32x8 w_42 = (packed_40 & zse_splat_i32x8(252645135));
              i32x8 w_43 = (packed_41 & zse_splat_i32x8(252645135));
              i32x8 w_44 = ((packed_38 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 w_45 = ((packed_39 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 w_46 = ((packed_40 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              i32x8 w_47 = ((packed_41 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
              *(i32x8_mem *)((staged_8 + (((i_4 * 8LL) + 0LL) * 16LL)) + 8LL) = w_40;
              *(i32x8_mem *)((staged_8 + (((i_4 * 8LL) + 1LL) * 16LL)) + 8LL) = w_41;
              *(i32x8_mem *)((staged_8 + (((i_4 * 8LL) + 2LL) * 16LL)) + 8LL) = w_42;
              *(i32x8_mem *)((staged_8 + (((i_4 * 8LL) + 3LL) * 16LL)) + 8LL) = w_43;
              *(i32x8_mem *)((staged_8 + (((i_4 * 8LL) + 4LL) * 16LL)) + 8LL) = w_44;
              *(i32x8_mem *)((staged_8 + (((i_4 * 8LL) + 5LL) * 16LL)) + 8LL) = w_45;
              *(i32x8_mem *)((staged_8 + (((i_4 * 8LL) + 6LL) * 16LL)) + 8LL) = w_46;
              *(i32x8_mem *)((staged_8 + (((i_4 * 8LL) + 7LL) * 16LL)) + 8LL) = w_47;
              group_4 = block__4;
              f32x8 s_10 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((now_10 + (group_4 * 16LL)) + 8LL))));
              f32x8 value_49 = s_10;
              f32x8 value_50 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((now_11 + (group_4 * 16LL)) + 8LL))));
              f32x8 s_11 = value_49;
              f32x8 o_5 = value_50;
              f32x8 unit_10 = s_11;
              f32x8 value_51 = unit_10;
              f32x8 value_52 = o_5;
              unit_9 = value_51;
              offset_5 = value_52;
              *(f32x8_mem *)((staged_9 + (((i_4 * 2LL) + 0LL) * 16LL)) + 8LL) = unit_9;
              *(f32x8_mem *)((staged_10 + (((i_4 * 2LL) + 0LL) * 16LL)) + 8LL) = offset_5;
            }
            const int32_t * planes_8 = now_8;
            const uint16_t * planes_10 = now_10;
            const uint16_t * planes_11 = now_11;
            for (int64_t token_8 = token_first_2; token_8 < token_last_2; token_8 += 4LL) {
              const int32_t * ahead_12 = planes_8;
              const uint16_t * ahead_14 = planes_10;
              const uint16_t * ahead_15 = planes_11;
              int64_t ahead_16 = (first__13 + 16LL);
              _Bool ahead_17 = (token_8 == token_first_2);
              float * mine_2 = (acc_2 + (((((tile_5 - tile) * padded_2) + token_8) - token_first_2) * 16LL));
              int64_t token_9 = zse_minimum_i64((token_8 + 0LL), (token_last_2 - 1LL));
              int64_t row_10 = (token_9 + 0LL);
              if ((experts == 2LL)) {
                row_10 = ((int64_t)(*(source + token_9)));
              }
              int64_t rows_13 = row_10;
              int64_t token_10 = zse_minimum_i64((token_8 + 1LL), (token_last_2 - 1LL));
              int64_t row_11 = (token_10 + 0LL);
              if ((experts == 2LL)) {
                row_11 = ((int64_t)(*(source + token_10)));
              }
              int64_t rows_14 = row_11;
              int64_t token_11 = zse_minimum_i64((token_8 + 2LL), (token_last_2 - 1LL));
              int64_t row_12 = (token_11 + 0LL);
              if ((experts == 2LL)) {
                row_12 = ((int64_t)(*(source + token_11)));
              }
              int64_t rows_15 = row_12;
              int64_t token_12 = zse_minimum_i64((token_8 + 3LL), (token_last_2 - 1LL));
              int64_t row_13 = (token_12 + 0LL);
              if ((experts == 2LL)) {
                row_13 = ((int64_t)(*(source + token_12)));
              }
              int64_t rows_16 = row_13;
              int64_t tokens_25 = ((rows_13 * blocks) + first__13);
              int64_t tokens_26 = ((rows_14 * blocks) + first__13);
              int64_t tokens_27 = ((rows_15 * blocks) + first__13);
              int64_t tokens_28 = ((rows_16 * blocks) + first__13);
              const int32_t * words_6 = ((const int32_t *)(aq + (tokens_25 * 32LL)));
              const int32_t * words_7 = ((const int32_t *)(aq + (tokens_26 * 32LL)));
              const int32_t * words_8 = ((const int32_t *)(aq + (tokens_27 * 32LL)));
              const int32_t * words_9 = ((const int32_t *)(aq + (tokens_28 * 32LL)));
              const float * item_12 = (a_scale + tokens_25);
              const float * item_13 = (a_scale + tokens_26);
              const float * item_14 = (a_scale + tokens_27);
              const float * item_15 = (a_scale + tokens_28);
              const float * item_16 = (a_sum + tokens_25);
              const float * item_17 = (a_sum + tokens_26);
              const float * item_18 = (a_sum + tokens_27);
              const float * item_19 = (a_sum + tokens_28);
              const int32_t * tokens_29 = words_6;
              const int32_t * tokens_30 = words_7;
              const int32_t * tokens_31 = words_8;
              const int32_t * tokens_32 = words_9;
              const float * tokens_33 = item_12;
              const float * tokens_34 = item_13;
              const float * tokens_35 = item_14;
              const float * tokens_36 = item_15;
              const float * tokens_37 = item_16;
              const float * tokens_38 = item_17;
              const float * tokens_39 = item_18;
              const float * tokens_40 = item_19;
              f32x8 sums_48 = (*(const f32x8_mem *)mine_2);
              f32x8 sums_49 = (*(const f32x8_mem *)(mine_2 + 16LL));
              f32x8 sums_50 = (*(const f32x8_mem *)(mine_2 + 32LL));
              f32x8 sums_51 = (*(const f32x8_mem *)(mine_2 + 48LL));
              f32x8 sums_52 = sums_48;
              f32x8 sums_53 = sums_49;
              f32x8 sums_54 = sums_50;
              f32x8 sums_55 = sums_51;
              f32x8 sums_56 = (*(const f32x8_mem *)(mine_2 + 8LL));
              f32x8 sums_57 = (*(const f32x8_mem *)((mine_2 + 16LL) + 8LL));
              f32x8 sums_58 = (*(const f32x8_mem *)((mine_2 + 32LL) + 8LL));
              f32x8 sums_59 = (*(const f32x8_mem *)((mine_2 + 48LL) + 8LL));
              f32x8 sums_60 = sums_56;
              f32x8 sums_61 = sums_57;
              f32x8 sums_62 = sums_58;
              f32x8 sums_63 = sums_59;
              for (int64_t i_5 = 0LL; i_5 < count_2; i_5 += 1LL) {
                if (ahead_17) {
                  int64_t block__5 = (ahead_16 + i_5);
                  __builtin_prefetch((ahead_12 + (block__5 * 64LL)), 0, 2);
                  __builtin_prefetch(((ahead_12 + (block__5 * 64LL)) + 16LL), 0, 2);
                  __builtin_prefetch(((ahead_12 + (block__5 * 64LL)) + 32LL), 0, 2);
                  __builtin_prefetch(((ahead_12 + (block__5 * 64LL)) + 48LL), 0, 2);
                  int64_t group_5 = block__5;
                  __builtin_prefetch((ahead_14 + (group_5 * 16LL)), 0, 2);
                  __builtin_prefetch((ahead_15 + (group_5 * 16LL)), 0, 2);
                }
                const int32_t * rows_17 = (tokens_29 + (i_5 * 8LL));
                const int32_t * rows_18 = (tokens_30 + (i_5 * 8LL));
                const int32_t * rows_19 = (tokens_31 + (i_5 * 8LL));
                const int32_t * rows_20 = (tokens_32 + (i_5 * 8LL));
                int64_t first__14 = (i_5 * 8LL);
                i32x8 totals_24 = zse_splat_i32x8(0);
                i32x8 totals_25 = zse_splat_i32x8(0);
                i32x8 totals_26 = zse_splat_i32x8(0);
                i32x8 totals_27 = zse_splat_i32x8(0);
                i32x8 totals_28 = totals_24;
                i32x8 totals_29 = totals_25;
                i32x8 totals_30 = totals_26;
                i32x8 totals_31 = totals_27;
                i32x8 totals_32 = zse_splat_i32x8(0);
                i32x8 totals_33 = zse_splat_i32x8(0);
                i32x8 totals_34 = zse_splat_i32x8(0);
                i32x8 totals_35 = zse_splat_i32x8(0);
                i32x8 totals_36 = totals_32;
                i32x8 totals_37 = totals_33;
                i32x8 totals_38 = totals_34;
                i32x8 totals_39 = totals_35;
                i32x8 sums_64 = zse_splat_i32x8(0);
                i32x8 sums_65 = zse_splat_i32x8(0);
                i32x8 sums_66 = zse_splat_i32x8(0);
                i32x8 sums_67 = zse_splat_i32x8(0);
                i32x8 sums_68 = sums_64;
                i32x8 sums_69 = sums_65;
                i32x8 sums_70 = sums_66;
                i32x8 sums_71 = sums_67;
                i32x8 sums_72 = zse_splat_i32x8(0);
                i32x8 sums_73 = zse_splat_i32x8(0);
                i32x8 sums_74 = zse_splat_i32x8(0);
                i32x8 sums_75 = zse_splat_i32x8(0);
                i32x8 sums_76 = sums_72;
                i32x8 sums_77 = sums_73;
                i32x8 sums_78 = sums_74;
                i32x8 sums_79 = sums_75;
                i32x8 w_48 = (*(const i32x8_mem *)(staged_8 + ((first__14 + 0LL) * 16LL)));
                i32x8 w_49 = (*(const i32x8_mem *)((staged_8 + ((first__14 + 0LL) * 16LL)) + 8LL));
                i32x8 value_57 = zse_splat_i32x8((*rows_17));
                i32x8 pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_48, (__m256i)value_57));
                sums_68 = pairs_2;
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_49, (__m256i)value_57));
                sums_76 = pairs_2;
                value_57 = zse_splat_i32x8((*rows_18));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_48, (__m256i)value_57));
                sums_69 = pairs_2;
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_49, (__m256i)value_57));
                sums_77 = pairs_2;
                value_57 = zse_splat_i32x8((*rows_19));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_48, (__m256i)value_57));
                sums_70 = pairs_2;
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_49, (__m256i)value_57));
                sums_78 = pairs_2;
                value_57 = zse_splat_i32x8((*rows_20));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_48, (__m256i)value_57));
                sums_71 = pairs_2;
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_49, (__m256i)value_57));
                sums_79 = pairs_2;
                i32x8 w_50 = (*(const i32x8_mem *)(staged_8 + ((first__14 + 1LL) * 16LL)));
                i32x8 w_51 = (*(const i32x8_mem *)((staged_8 + ((first__14 + 1LL) * 16LL)) + 8LL));
                value_57 = zse_splat_i32x8((*(rows_17 + 1LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_50, (__m256i)value_57));
                sums_68 = zse_add_i16_i32x8(sums_68, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_51, (__m256i)value_57));
                sums_76 = zse_add_i16_i32x8(sums_76, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_18 + 1LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_50, (__m256i)value_57));
                sums_69 = zse_add_i16_i32x8(sums_69, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_51, (__m256i)value_57));
                sums_77 = zse_add_i16_i32x8(sums_77, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_19 + 1LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_50, (__m256i)value_57));
                sums_70 = zse_add_i16_i32x8(sums_70, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_51, (__m256i)value_57));
                sums_78 = zse_add_i16_i32x8(sums_78, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_20 + 1LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_50, (__m256i)value_57));
                sums_71 = zse_add_i16_i32x8(sums_71, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_51, (__m256i)value_57));
                sums_79 = zse_add_i16_i32x8(sums_79, pairs_2);
                i32x8 w_52 = (*(const i32x8_mem *)(staged_8 + ((first__14 + 2LL) * 16LL)));
                i32x8 w_53 = (*(const i32x8_mem *)((staged_8 + ((first__14 + 2LL) * 16LL)) + 8LL));
                value_57 = zse_splat_i32x8((*(rows_17 + 2LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_52, (__m256i)value_57));
                sums_68 = zse_add_i16_i32x8(sums_68, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_53, (__m256i)value_57));
                sums_76 = zse_add_i16_i32x8(sums_76, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_18 + 2LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_52, (__m256i)value_57));
                sums_69 = zse_add_i16_i32x8(sums_69, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_53, (__m256i)value_57));
                sums_77 = zse_add_i16_i32x8(sums_77, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_19 + 2LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_52, (__m256i)value_57));
                sums_70 = zse_add_i16_i32x8(sums_70, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_53, (__m256i)value_57));
                sums_78 = zse_add_i16_i32x8(sums_78, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_20 + 2LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_52, (__m256i)value_57));
                sums_71 = zse_add_i16_i32x8(sums_71, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_53, (__m256i)value_57));
                sums_79 = zse_add_i16_i32x8(sums_79, pairs_2);
                i32x8 w_54 = (*(const i32x8_mem *)(staged_8 + ((first__14 + 3LL) * 16LL)));
                i32x8 w_55 = (*(const i32x8_mem *)((staged_8 + ((first__14 + 3LL) * 16LL)) + 8LL));
                value_57 = zse_splat_i32x8((*(rows_17 + 3LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_54, (__m256i)value_57));
                sums_68 = zse_add_i16_i32x8(sums_68, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_55, (__m256i)value_57));
                sums_76 = zse_add_i16_i32x8(sums_76, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_18 + 3LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_54, (__m256i)value_57));
                sums_69 = zse_add_i16_i32x8(sums_69, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_55, (__m256i)value_57));
                sums_77 = zse_add_i16_i32x8(sums_77, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_19 + 3LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_54, (__m256i)value_57));
                sums_70 = zse_add_i16_i32x8(sums_70, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_55, (__m256i)value_57));
                sums_78 = zse_add_i16_i32x8(sums_78, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_20 + 3LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_54, (__m256i)value_57));
                sums_71 = zse_add_i16_i32x8(sums_71, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_55, (__m256i)value_57));
                sums_79 = zse_add_i16_i32x8(sums_79, pairs_2);
                i32x8 w_56 = (*(const i32x8_mem *)(staged_8 + ((first__14 + 4LL) * 16LL)));
                i32x8 w_57 = (*(const i32x8_mem *)((staged_8 + ((first__14 + 4LL) * 16LL)) + 8LL));
                value_57 = zse_splat_i32x8((*(rows_17 + 4LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_56, (__m256i)value_57));
                sums_68 = zse_add_i16_i32x8(sums_68, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_57, (__m256i)value_57));
                sums_76 = zse_add_i16_i32x8(sums_76, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_18 + 4LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_56, (__m256i)value_57));
                sums_69 = zse_add_i16_i32x8(sums_69, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_57, (__m256i)value_57));
                sums_77 = zse_add_i16_i32x8(sums_77, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_19 + 4LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_56, (__m256i)value_57));
                sums_70 = zse_add_i16_i32x8(sums_70, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_57, (__m256i)value_57));
                sums_78 = zse_add_i16_i32x8(sums_78, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_20 + 4LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_56, (__m256i)value_57));
                sums_71 = zse_add_i16_i32x8(sums_71, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_57, (__m256i)value_57));
                sums_79 = zse_add_i16_i32x8(sums_79, pairs_2);
                i32x8 w_58 = (*(const i32x8_mem *)(staged_8 + ((first__14 + 5LL) * 16LL)));
                i32x8 w_59 = (*(const i32x8_mem *)((staged_8 + ((first__14 + 5LL) * 16LL)) + 8LL));
                value_57 = zse_splat_i32x8((*(rows_17 + 5LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_58, (__m256i)value_57));
                sums_68 = zse_add_i16_i32x8(sums_68, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_59, (__m256i)value_57));
                sums_76 = zse_add_i16_i32x8(sums_76, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_18 + 5LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_58, (__m256i)value_57));
                sums_69 = zse_add_i16_i32x8(sums_69, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_59, (__m256i)value_57));
                sums_77 = zse_add_i16_i32x8(sums_77, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_19 + 5LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_58, (__m256i)value_57));
                sums_70 = zse_add_i16_i32x8(sums_70, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_59, (__m256i)value_57));
                sums_78 = zse_add_i16_i32x8(sums_78, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_20 + 5LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_58, (__m256i)value_57));
                sums_71 = zse_add_i16_i32x8(sums_71, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_59, (__m256i)value_57));
                sums_79 = zse_add_i16_i32x8(sums_79, pairs_2);
                i32x8 w_60 = (*(const i32x8_mem *)(staged_8 + ((first__14 + 6LL) * 16LL)));
                i32x8 w_61 = (*(const i32x8_mem *)((staged_8 + ((first__14 + 6LL) * 16LL)) + 8LL));
                value_57 = zse_splat_i32x8((*(rows_17 + 6LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_60, (__m256i)value_57));
                sums_68 = zse_add_i16_i32x8(sums_68, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_61, (__m256i)value_57));
                sums_76 = zse_add_i16_i32x8(sums_76, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_18 + 6LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_60, (__m256i)value_57));
                sums_69 = zse_add_i16_i32x8(sums_69, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_61, (__m256i)value_57));
                sums_77 = zse_add_i16_i32x8(sums_77, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_19 + 6LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_60, (__m256i)value_57));
                sums_70 = zse_add_i16_i32x8(sums_70, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_61, (__m256i)value_57));
                sums_78 = zse_add_i16_i32x8(sums_78, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_20 + 6LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_60, (__m256i)value_57));
                sums_71 = zse_add_i16_i32x8(sums_71, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_61, (__m256i)value_57));
                sums_79 = zse_add_i16_i32x8(sums_79, pairs_2);
                i32x8 w_62 = (*(const i32x8_mem *)(staged_8 + ((first__14 + 7LL) * 16LL)));
                i32x8 w_63 = (*(const i32x8_mem *)((staged_8 + ((first__14 + 7LL) * 16LL)) + 8LL));
                value_57 = zse_splat_i32x8((*(rows_17 + 7LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_62, (__m256i)value_57));
                sums_68 = zse_add_i16_i32x8(sums_68, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_63, (__m256i)value_57));
                sums_76 = zse_add_i16_i32x8(sums_76, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_18 + 7LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_62, (__m256i)value_57));
                sums_69 = zse_add_i16_i32x8(sums_69, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_63, (__m256i)value_57));
                sums_77 = zse_add_i16_i32x8(sums_77, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_19 + 7LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_62, (__m256i)value_57));
                sums_70 = zse_add_i16_i32x8(sums_70, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_63, (__m256i)value_57));
                sums_78 = zse_add_i16_i32x8(sums_78, pairs_2);
                value_57 = zse_splat_i32x8((*(rows_20 + 7LL)));
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_62, (__m256i)value_57));
                sums_71 = zse_add_i16_i32x8(sums_71, pairs_2);
                pairs_2 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_63, (__m256i)value_57));
                sums_79 = zse_add_i16_i32x8(sums_79, pairs_2);
                totals_28 = (totals_28 + ((i32x8)_mm256_madd_epi16((__m256i)sums_68, _mm256_set1_epi16(1))));
                totals_36 = (totals_36 + ((i32x8)_mm256_madd_epi16((__m256i)sums_76, _mm256_set1_epi16(1))));
                totals_29 = (totals_29 + ((i32x8)_mm256_madd_epi16((__m256i)sums_69, _mm256_set1_epi16(1))));
                totals_37 = (totals_37 + ((i32x8)_mm256_madd_epi16((__m256i)sums_77, _mm256_set1_epi16(1))));
                totals_30 = (totals_30 + ((i32x8)_mm256_madd_epi16((__m256i)sums_70, _mm256_set1_epi16(1))));
                totals_38 = (totals_38 + ((i32x8)_mm256_madd_epi16((__m256i)sums_78, _mm256_set1_epi16(1))));
                totals_31 = (totals_31 + ((i32x8)_mm256_madd_epi16((__m256i)sums_71, _mm256_set1_epi16(1))));
                totals_39 = (totals_39 + ((i32x8)_mm256_madd_epi16((__m256i)sums_79, _mm256_set1_epi16(1))));
                f32x8 scale_3 = (*(const f32x8_mem *)(staged_9 + (((2LL * i_5) + 0LL) * 16LL)));
                f32x8 unit_11 = (scale_3 * zse_splat_f32x8((*(tokens_33 + i_5))));
                sums_52 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_28, f32x8), unit_11, sums_52));
                unit_11 = (scale_3 * zse_splat_f32x8((*(tokens_34 + i_5))));
                sums_53 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_29, f32x8), unit_11, sums_53));
                unit_11 = (scale_3 * zse_splat_f32x8((*(tokens_35 + i_5))));
                sums_54 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_30, f32x8), unit_11, sums_54));
                unit_11 = (scale_3 * zse_splat_f32x8((*(tokens_36 + i_5))));
                sums_55 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_31, f32x8), unit_11, sums_55));
                scale_3 = (*(const f32x8_mem *)((staged_9 + (((2LL * i_5) + 0LL) * 16LL)) + 8LL));
                unit_11 = (scale_3 * zse_splat_f32x8((*(tokens_33 + i_5))));
                sums_60 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_36, f32x8), unit_11, sums_60));
                unit_11 = (scale_3 * zse_splat_f32x8((*(tokens_34 + i_5))));
                sums_61 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_37, f32x8), unit_11, sums_61));
                unit_11 = (scale_3 * zse_splat_f32x8((*(tokens_35 + i_5))));
                sums_62 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_38, f32x8), unit_11, sums_62));
                unit_11 = (scale_3 * zse_splat_f32x8((*(tokens_36 + i_5))));
                sums_63 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_39, f32x8), unit_11, sums_63));
                f32x8 offset_6 = (*(const f32x8_mem *)(staged_10 + (((2LL * i_5) + 0LL) * 16LL)));
                float total_8 = (*(tokens_37 + i_5));
                sums_52 = ((f32x8)_mm256_fmadd_ps(offset_6, zse_splat_f32x8(total_8), sums_52));
                total_8 = (*(tokens_38 + i_5));
                sums_53 = ((f32x8)_mm256_fmadd_ps(offset_6, zse_splat_f32x8(total_8), sums_53));
                total_8 = (*(tokens_39 + i_5));
                sums_54 = ((f32x8)_mm256_fmadd_ps(offset_6, zse_splat_f32x8(total_8), sums_54));
                total_8 = (*(tokens_40 + i_5));
                sums_55 = ((f32x8)_mm256_fmadd_ps(offset_6, zse_splat_f32x8(total_8), sums_55));
                offset_6 = (*(const f32x8_mem *)((staged_10 + (((2LL * i_5) + 0LL) * 16LL)) + 8LL));
                total_8 = (*(tokens_37 + i_5));
                sums_60 = ((f32x8)_mm256_fmadd_ps(offset_6, zse_splat_f32x8(total_8), sums_60));
                total_8 = (*(tokens_38 + i_5));
                sums_61 = ((f32x8)_mm256_fmadd_ps(offset_6, zse_splat_f32x8(total_8), sums_61));
                total_8 = (*(tokens_39 + i_5));
                sums_62 = ((f32x8)_mm256_fmadd_ps(offset_6, zse_splat_f32x8(total_8), sums_62));
                total_8 = (*(tokens_40 + i_5));
                sums_63 = ((f32x8)_mm256_fmadd_ps(offset_6, zse_splat_f32x8(total_8), sums_63));
              }
              *(f32x8_mem *)mine_2 = sums_52;
              *(f32x8_mem *)(mine_2 + 16LL) = sums_53;
              *(f32x8_mem *)(mine_2 + 32LL) = sums_54;
              *(f32x8_mem *)(mine_2 + 48LL) = sums_55;
              *(f32x8_mem *)(mine_2 + 8LL) = sums_60;
              *(f32x8_mem *)((mine_2 + 16LL) + 8LL) = sums_61;
              *(f32x8_mem *)((mine_2 + 32LL) + 8LL) = sums_62;
              *(f32x8_mem *)((mine_2 + 48LL) + 8LL) = sums_63;
              if (((first__13 + 8LL) >= num_blocks_2)) {
                int64_t at_stop_5 = zse_minimum_i64((token_8 + 4LL), token_last_2);
                for (int64_t at_5 = token_8; at_5 < at_stop_5; at_5 += 1LL) {
                  f32x8 total_9 = (*(const f32x8_mem *)(mine_2 + ((at_5 - token_8) * 16LL)));
                  float * out_5 = (out + (at_5 * rows));
                  const float * bias_5 = (bias + (expert_6 * rows));
                  int64_t row_14 = ((tile_5 * 16LL) + 0LL);
                  f32x8 total_10 = total_9;
                  if ((has_bias != 0LL)) {
                    if (((row_14 + 8LL) <= rows)) {
                      total_10 = (total_10 + (*(const f32x8_mem *)(bias_5 + row_14)));
                    }
                  }
                  if (((row_14 + 8LL) <= rows)) {
                    *(f32x8_mem *)(out_5 + row_14) = total_10;
                  } else {
                    float scratch_19[16] __attribute__((aligned(64)));
                    float * spill_4 = scratch_19;
                    *(f32x8_mem *)spill_4 = total_10;
                    for (int64_t r_4 = row_14; r_4 < rows; r_4 += 1LL) {
                      if ((has_bias != 0LL)) {
                        *(out_5 + r_4) = ((*(spill_4 + (r_4 - row_14))) + (*(bias_5 + r_4)));
                      } else {
                        *(out_5 + r_4) = (*(spill_4 + (r_4 - row_14)));
                      }
                    }
                  }
                  total_9 = (*(const f32x8_mem *)((mine_2 + ((at_5 - token_8) * 16LL)) + 8LL));
                  float * out_6 = (out + (at_5 * rows));
                  const float * bias_6 = (bias + (expert_6 * rows));
                  int64_t row_15 = ((tile_5 * 16LL) + 8LL);
                  f32x8 total_11 = total_9;
                  if ((has_bias != 0LL)) {
                    if (((row_15 + 8LL) <= rows)) {
                      total_11 = (total_11 + (*(const f32x8_mem *)(bias_6 + row_15)));
                    }
                  }
                  if (((row_15 + 8LL) <= rows)) {
                    *(f32x8_mem *)(out_6 + row_15) = total_11;
                  } else {
                    float scratch_20[16] __attribute__((aligned(64)));
                    float * spill_5 = scratch_20;
                    *(f32x8_mem *)spill_5 = total_11;
                    for (int64_t r_5 = row_15; r_5 < rows; r_5 += 1LL) {
                      if ((has_bias != 0LL)) {
                        *(out_6 + r_5) = ((*(spill_5 + (r_5 - row_15))) + (*(bias_6 + r_5)));
                      } else {
                        *(out_6 + r_5) = (*(spill_5 + (r_5 - row_15)));
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
}
