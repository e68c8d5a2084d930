#include <math.h>
#include <stdint.h>
#include <immintrin.h>
typedef union { uint64_t slot; float f32; double f64; } zse_slot;

typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x8_mem __attribute__((vector_size(32), aligned(1), may_alias));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8_mem __attribute__((vector_size(32), aligned(1), may_alias));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4_mem __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t i32x2 __attribute__((vector_size(8)));
typedef int32_t i32x2_mem __attribute__((vector_size(8), aligned(1), may_alias));
typedef uint16_t f16x8 __attribute__((vector_size(16)));
typedef uint16_t f16x8_mem __attribute__((vector_size(16), aligned(1), may_alias));

static inline int64_t zse_minimum_i64(int64_t a, int64_t b) { return (a < b ? a : b); }
static inline f32x8 zse_splat_f32x8(float a) { return (f32x8)_mm256_set1_ps(a); }
static inline i32x4 zse_splat_i32x4(int32_t a) { return (i32x4)_mm_set1_epi32(a); }
static inline int32_t zse_reduce_add_i32x4(i32x4 v) { i32x2 a2 = __builtin_shufflevector(v, v, 0, 1), b2 = __builtin_shufflevector(v, v, 2, 3); i32x2 r2 = a2 + b2; return r2[0] + r2[1]; }
static inline i32x8 zse_splat_i32x8(int32_t a) { return (i32x8)_mm256_set1_epi32(a); }
static inline i32x8 zse_add_i16_i32x8(i32x8 a, i32x8 b) { __asm__("vpaddw %2, %1, %0" : "=x"(a) : "x"(a), "x"(b)); return a; }

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
    int64_t value = (block_1 * 4LL);
    int64_t value_1 = (((rows + 16LL) - 1LL) / 16LL);
    int64_t tile = value;
    int64_t tiles = value_1;
    int64_t last_tile = zse_minimum_i64((tile + 4LL), tiles);
    if ((tiles >= 64LL)) {
      last_tile = (tile + 0LL);
      if (((block_1 % 2LL) == 0LL)) {
        last_tile = zse_minimum_i64((tile + 8LL), tiles);
      }
    }
    int64_t first_ = (block_0 * 64LL);
    int64_t value_2 = first_;
    int64_t value_3 = zse_minimum_i64((first_ + 64LL), tokens);
    int64_t first__1 = value_2;
    int64_t last_ = value_3;
    if ((experts != 0LL)) {
      const int32_t * task = (tasks + (block_0 * 3LL));
      first__1 = ((int64_t)(*(task + 1LL)));
      last_ = ((int64_t)(*(task + 2LL)));
    }
    int64_t value_4 = first__1;
    int64_t value_5 = last_;
    int64_t first__2 = value_4;
    int64_t last__1 = value_5;
    if (((last__1 - first__2) <= 2LL)) {
      int64_t expert_1 = 0LL;
      int64_t first__3 = (block_0 * 64LL);
      int64_t value_6 = first__3;
      int64_t value_7 = zse_minimum_i64((first__3 + 64LL), tokens);
      int64_t first__4 = value_6;
      int64_t last__2 = value_7;
      if ((experts != 0LL)) {
        const int32_t * task_1 = (tasks + (block_0 * 3LL));
        expert_1 = ((int64_t)(*task_1));
        first__4 = ((int64_t)(*(task_1 + 1LL)));
        last__2 = ((int64_t)(*(task_1 + 2LL)));
      }
      int64_t value_8 = expert_1;
      int64_t value_9 = first__4;
      int64_t value_10 = last__2;
      int64_t expert_2 = value_8;
      int64_t token_first = value_9;
      int64_t token_last = value_10;
      int64_t groups = (blocks * 2LL);
      int32_t scratch[1024] __attribute__((aligned(64)));
      float scratch_1[256] __attribute__((aligned(64)));
      float scratch_2[256] __attribute__((aligned(64)));
      int32_t * staged = scratch;
      float * staged_1 = scratch_1;
      float * staged_2 = scratch_2;
      int32_t scratch_4[4096] __attribute__((aligned(64)));
      int32_t * q_1 = scratch_4;
      float scratch_5[1536] __attribute__((aligned(64)));
      float * factors = scratch_5;
      float scratch_6[8192] __attribute__((aligned(64)));
      float * acc = scratch_6;
      int64_t num_blocks = 0LL;
      int64_t padded = ((((token_last - token_first) + 1LL) / 2LL) * 2LL);
      if (((token_first < token_last) && (tile < last_tile))) {
        num_blocks = blocks;
        int64_t at_stop = (padded * 128LL);
        for (int64_t at = 0LL; at < at_stop; at += 8LL) {
          *(f32x8_mem *)(acc + at) = zse_splat_f32x8((0.0f));
        }
      }
      for (int64_t first__5 = 0LL; first__5 < num_blocks; first__5 += 8LL) {
        int64_t count = zse_minimum_i64((num_blocks - first__5), 8LL);
        int64_t token_stop = (token_last + ((token_first - token_last) & 3LL));
        for (int64_t token = token_first; token < token_stop; token += 1LL) {
          int64_t a = zse_minimum_i64(token, (token_last - 1LL));
          int64_t row = (a + 0LL);
          if ((experts == 2LL)) {
            row = ((int64_t)(*(source + a)));
          }
          int64_t rows_1 = row;
          const int8_t * item = (aq + (rows_1 * (blocks * 32LL)));
          const float * item_1 = (a_scale + (rows_1 * blocks));
          const float * item_2 = (a_sum + (rows_1 * blocks));
          const int8_t * a_1 = item;
          const float * a_2 = item_1;
          const float * a_3 = item_2;
          float * mine = (factors + ((token - token_first) * 24LL));
          for (int64_t i = 0LL; i < count; i += 1LL) {
            int64_t value_11 = (first__5 + i);
            int32_t * value_12 = (q_1 + ((((token - token_first) * 8LL) + i) * 8LL));
            int64_t block_ = value_11;
            int32_t * place = value_12;
            const int32_t * words = ((const int32_t *)(a_1 + (block_ * 32LL)));
            i32x8 word = (*(const i32x8_mem *)words);
            *(i32x8_mem *)place = word;
            *(mine + i) = (*(a_2 + block_));
            *(mine + (8LL + i)) = (*(a_3 + block_));
            const int32_t * q_2 = ((const int32_t *)(a_1 + (block_ * 32LL)));
            i32x4 value_13 = zse_splat_i32x4(16843009);
            i32x4 value_14 = (*(const i32x4_mem *)q_2);
            i32x4 ones = value_13;
            i32x4 bytes_ = value_14;
            *(mine + (16LL + i)) = (((float)zse_reduce_add_i32x4(((i32x4)_mm_madd_epi16((__m128i)((i32x4)_mm_maddubs_epi16((__m128i)ones, (__m128i)bytes_)), _mm_set1_epi16(1))))) * (*(a_2 + block_)));
          }
        }
        for (int64_t tile_1 = tile; tile_1 < last_tile; tile_1 += 1LL) {
          int64_t tile_2 = ((expert_2 * ((rows + 15LL) / 16LL)) + tile_1);
          const int32_t * now = (q + ((tile_2 * blocks) * 64LL));
          const int32_t * now_1 = (high + ((tile_2 * blocks) * 32LL));
          const uint16_t * now_2 = (scale + ((tile_2 * groups) * 16LL));
          for (int64_t i_1 = 0LL; i_1 < count; i_1 += 1LL) {
            int64_t block__1 = (first__5 + i_1);
            i32x8 packed = (*(const i32x8_mem *)(now + (block__1 * 64LL)));
            i32x8 packed_1 = (*(const i32x8_mem *)((now + (block__1 * 64LL)) + 16LL));
            i32x8 packed_2 = (*(const i32x8_mem *)((now + (block__1 * 64LL)) + 32LL));
            i32x8 packed_3 = (*(const i32x8_mem *)((now + (block__1 * 64LL)) + 48LL));
            i32x8 w = (packed & zse_splat_i32x8(252645135));
            i32x8 w_1 = (packed_1 & zse_splat_i32x8(252645135));
            i32x8 w_2 = (packed_2 & zse_splat_i32x8(252645135));
            i32x8 w_3 = (packed_3 & zse_splat_i32x8(252645135));
            i32x8 w_4 = ((packed >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_5 = ((packed_1 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_6 = ((packed_2 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_7 = ((packed_3 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 pairs = (*(const i32x8_mem *)(now_1 + (block__1 * 32LL)));
            i32x8 pairs_1 = (*(const i32x8_mem *)((now_1 + (block__1 * 32LL)) + 16LL));
            i32x8 w_8 = (w | ((pairs << zse_splat_i32x8(4)) & zse_splat_i32x8(808464432)));
            i32x8 w_9 = (w_1 | ((pairs << zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            i32x8 w_10 = (w_2 | ((pairs << zse_splat_i32x8(0)) & zse_splat_i32x8(808464432)));
            i32x8 w_11 = (w_3 | ((pairs >> zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            i32x8 w_12 = (w_4 | ((pairs_1 << zse_splat_i32x8(4)) & zse_splat_i32x8(808464432)));
            i32x8 w_13 = (w_5 | ((pairs_1 << zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            i32x8 w_14 = (w_6 | ((pairs_1 << zse_splat_i32x8(0)) & zse_splat_i32x8(808464432)));
            i32x8 w_15 = (w_7 | ((pairs_1 >> zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            *(i32x8_mem *)(staged + (((i_1 * 8LL) + 0LL) * 16LL)) = w_8;
            *(i32x8_mem *)(staged + (((i_1 * 8LL) + 1LL) * 16LL)) = w_9;
            *(i32x8_mem *)(staged + (((i_1 * 8LL) + 2LL) * 16LL)) = w_10;
            *(i32x8_mem *)(staged + (((i_1 * 8LL) + 3LL) * 16LL)) = w_11;
            *(i32x8_mem *)(staged + (((i_1 * 8LL) + 4LL) * 16LL)) = w_12;
            *(i32x8_mem *)(staged + (((i_1 * 8LL) + 5LL) * 16LL)) = w_13;
            *(i32x8_mem *)(staged + (((i_1 * 8LL) + 6LL) * 16LL)) = w_14;
            *(i32x8_mem *)(staged + (((i_1 * 8LL) + 7LL) * 16LL)) = w_15;
            int64_t group = ((block__1 * 2LL) + 0LL);
            f32x8 s = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)(now_2 + (group * 16LL)))));
            f32x8 value_15 = s;
            f32x8 s_1 = value_15;
            f32x8 unit = s_1;
            f32x8 value_16 = unit;
            f32x8 value_17 = (s_1 * zse_splat_f32x8((-32.0f)));
            f32x8 unit_1 = value_16;
            f32x8 offset_1 = value_17;
            *(f32x8_mem *)(staged_1 + (((i_1 * 2LL) + 0LL) * 16LL)) = unit_1;
            *(f32x8_mem *)(staged_2 + (((i_1 * 2LL) + 0LL) * 16LL)) = offset_1;
            group = ((block__1 * 2LL) + 1LL);
            f32x8 s_2 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)(now_2 + (group * 16LL)))));
            f32x8 value_18 = s_2;
            f32x8 s_3 = value_18;
            f32x8 unit_2 = s_3;
            f32x8 value_19 = unit_2;
            f32x8 value_20 = (s_3 * zse_splat_f32x8((-32.0f)));
            unit_1 = value_19;
            offset_1 = value_20;
            *(f32x8_mem *)(staged_1 + (((i_1 * 2LL) + 1LL) * 16LL)) = unit_1;
            *(f32x8_mem *)(staged_2 + (((i_1 * 2LL) + 1LL) * 16LL)) = offset_1;
            i32x8 packed_4 = (*(const i32x8_mem *)((now + (block__1 * 64LL)) + 8LL));
            i32x8 packed_5 = (*(const i32x8_mem *)((now + (block__1 * 64LL)) + 24LL));
            i32x8 packed_6 = (*(const i32x8_mem *)((now + (block__1 * 64LL)) + 40LL));
            i32x8 packed_7 = (*(const i32x8_mem *)((now + (block__1 * 64LL)) + 56LL));
            i32x8 w_16 = (packed_4 & zse_splat_i32x8(252645135));
            i32x8 w_17 = (packed_5 & zse_splat_i32x8(252645135));
            i32x8 w_18 = (packed_6 & zse_splat_i32x8(252645135));
            i32x8 w_19 = (packed_7 & zse_splat_i32x8(252645135));
            i32x8 w_20 = ((packed_4 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_21 = ((packed_5 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_22 = ((packed_6 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_23 = ((packed_7 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 pairs_2 = (*(const i32x8_mem *)((now_1 + (block__1 * 32LL)) + 8LL));
            i32x8 pairs_3 = (*(const i32x8_mem *)((now_1 + (block__1 * 32LL)) + 24LL));
            i32x8 w_24 = (w_16 | ((pairs_2 << zse_splat_i32x8(4)) & zse_splat_i32x8(808464432)));
            i32x8 w_25 = (w_17 | ((pairs_2 << zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            i32x8 w_26 = (w_18 | ((pairs_2 << zse_splat_i32x8(0)) & zse_splat_i32x8(808464432)));
            i32x8 w_27 = (w_19 | ((pairs_2 >> zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            i32x8 w_28 = (w_20 | ((pairs_3 << zse_splat_i32x8(4)) & zse_splat_i32x8(808464432)));
            i32x8 w_29 = (w_21 | ((pairs_3 << zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            i32x8 w_30 = (w_22 | ((pairs_3 << zse_splat_i32x8(0)) & zse_splat_i32x8(808464432)));
            i32x8 w_31 = (w_23 | ((pairs_3 >> zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            *(i32x8_mem *)((staged + (((i_1 * 8LL) + 0LL) * 16LL)) + 8LL) = w_24;
            *(i32x8_mem *)((staged + (((i_1 * 8LL) + 1LL) * 16LL)) + 8LL) = w_25;
            *(i32x8_mem *)((staged + (((i_1 * 8LL) + 2LL) * 16LL)) + 8LL) = w_26;
            *(i32x8_mem *)((staged + (((i_1 * 8LL) + 3LL) * 16LL)) + 8LL) = w_27;
            *(i32x8_mem *)((staged + (((i_1 * 8LL) + 4LL) * 16LL)) + 8LL) = w_28;
            *(i32x8_mem *)((staged + (((i_1 * 8LL) + 5LL) * 16LL)) + 8LL) = w_29;
            *(i32x8_mem *)((staged + (((i_1 * 8LL) + 6LL) * 16LL)) + 8LL) = w_30;
            *(i32x8_mem *)((staged + (((i_1 * 8LL) + 7LL) * 16LL)) + 8LL) = w_31;
            group = ((block__1 * 2LL) + 0LL);
            f32x8 s_4 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((now_2 + (group * 16LL)) + 8LL))));
            f32x8 value_21 = s_4;
            f32x8 s_5 = value_21;
            f32x8 unit_3 = s_5;
            f32x8 value_22 = unit_3;
            f32x8 value_23 = (s_5 * zse_splat_f32x8((-32.0f)));
            unit_1 = value_22;
            offset_1 = value_23;
            *(f32x8_mem *)((staged_1 + (((i_1 * 2LL) + 0LL) * 16LL)) + 8LL) = unit_1;
            *(f32x8_mem *)((staged_2 + (((i_1 * 2LL) + 0LL) * 16LL)) + 8LL) = offset_1;
            group = ((block__1 * 2LL) + 1LL);
            f32x8 s_6 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((now_2 + (group * 16LL)) + 8LL))));
            f32x8 value_24 = s_6;
            f32x8 s_7 = value_24;
            f32x8 unit_4 = s_7;
            f32x8 value_25 = unit_4;
            f32x8 value_26 = (s_7 * zse_splat_f32x8((-32.0f)));
            unit_1 = value_25;
            offset_1 = value_26;
            *(f32x8_mem *)((staged_1 + (((i_1 * 2LL) + 1LL) * 16LL)) + 8LL) = unit_1;
            *(f32x8_mem *)((staged_2 + (((i_1 * 2LL) + 1LL) * 16LL)) + 8LL) = offset_1;
          }
          int64_t value_27 = (tile_1 + 1LL);
          int64_t value_28 = (first__5 + 0LL);
          int64_t after = value_27;
          int64_t after_first = value_28;
          if ((after == last_tile)) {
            after = tile;
            after_first = (first__5 + count);
          }
          int64_t tile_3 = ((expert_2 * ((rows + 15LL) / 16LL)) + after);
          const int32_t * planes_4 = (q + ((tile_3 * blocks) * 64LL));
          const int32_t * planes_5 = (high + ((tile_3 * blocks) * 32LL));
          const uint16_t * planes_6 = (scale + ((tile_3 * groups) * 16LL));
          for (int64_t token_1 = token_first; token_1 < token_last; token_1 += 2LL) {
            const int32_t * ahead = planes_4;
            const int32_t * ahead_1 = planes_5;
            const uint16_t * ahead_2 = planes_6;
            int64_t ahead_4 = after_first;
            _Bool ahead_5 = (token_1 == token_first);
            float * mine_1 = (acc + (((((tile_1 - tile) * padded) + token_1) - token_first) * 16LL));
            int64_t place_1 = (token_1 - token_first);
            int64_t places = (place_1 + 0LL);
            int64_t places_1 = (place_1 + 1LL);
            float * mine_2 = (factors + (places * 24LL));
            float * mine_3 = (factors + (places_1 * 24LL));
            int32_t * words_1 = (q_1 + (places * 64LL));
            int32_t * words_2 = (q_1 + (places_1 * 64LL));
            float * item_3 = (mine_2 + 8LL);
            float * item_4 = (mine_3 + 8LL);
            float * item_5 = (mine_2 + 16LL);
            float * item_6 = (mine_3 + 16LL);
            int32_t * tokens_1 = words_1;
            int32_t * tokens_2 = words_2;
            float * tokens_3 = mine_2;
            float * tokens_4 = mine_3;
            float * tokens_5 = item_3;
            float * tokens_6 = item_4;
            float * tokens_7 = item_5;
            float * tokens_8 = item_6;
            f32x8 sums = (*(const f32x8_mem *)mine_1);
            f32x8 sums_1 = (*(const f32x8_mem *)(mine_1 + 16LL));
            f32x8 sums_2 = sums;
            f32x8 sums_3 = sums_1;
            f32x8 sums_4 = (*(const f32x8_mem *)(mine_1 + 8LL));
            f32x8 sums_5 = (*(const f32x8_mem *)((mine_1 + 16LL) + 8LL));
            f32x8 sums_6 = sums_4;
            f32x8 sums_7 = sums_5;
            for (int64_t i_2 = 0LL; i_2 < count; i_2 += 1LL) {
              if (ahead_5) {
                int64_t block__2 = (ahead_4 + i_2);
                __builtin_prefetch((ahead + (block__2 * 64LL)), 0, 2);
                __builtin_prefetch(((ahead + (block__2 * 64LL)) + 16LL), 0, 2);
                __builtin_prefetch(((ahead + (block__2 * 64LL)) + 32LL), 0, 2);
                __builtin_prefetch(((ahead + (block__2 * 64LL)) + 48LL), 0, 2);
                __builtin_prefetch((ahead_1 + (block__2 * 32LL)), 0, 2);
                __builtin_prefetch(((ahead_1 + (block__2 * 32LL)) + 16LL), 0, 2);
                int64_t group_1 = (block__2 * 2LL);
                __builtin_prefetch((ahead_2 + (group_1 * 16LL)), 0, 2);
              }
              int32_t * rows_2 = (tokens_1 + (i_2 * 8LL));
              int32_t * rows_3 = (tokens_2 + (i_2 * 8LL));
              int64_t first__6 = (i_2 * 8LL);
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
              i32x8 w_32 = (*(const i32x8_mem *)(staged + ((first__6 + 0LL) * 16LL)));
              i32x8 w_33 = (*(const i32x8_mem *)((staged + ((first__6 + 0LL) * 16LL)) + 8LL));
              i32x8 value_31 = zse_splat_i32x8((*rows_2));
              i32x8 pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_32, (__m256i)value_31));
              sums_10 = pairs_4;
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_33, (__m256i)value_31));
              sums_14 = pairs_4;
              value_31 = zse_splat_i32x8((*rows_3));
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_32, (__m256i)value_31));
              sums_11 = pairs_4;
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_33, (__m256i)value_31));
              sums_15 = pairs_4;
              i32x8 w_34 = (*(const i32x8_mem *)(staged + ((first__6 + 1LL) * 16LL)));
              i32x8 w_35 = (*(const i32x8_mem *)((staged + ((first__6 + 1LL) * 16LL)) + 8LL));
              value_31 = zse_splat_i32x8((*(rows_2 + 1LL)));
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_34, (__m256i)value_31));
              sums_10 = zse_add_i16_i32x8(sums_10, pairs_4);
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_35, (__m256i)value_31));
              sums_14 = zse_add_i16_i32x8(sums_14, pairs_4);
              value_31 = zse_splat_i32x8((*(rows_3 + 1LL)));
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_34, (__m256i)value_31));
              sums_11 = zse_add_i16_i32x8(sums_11, pairs_4);
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_35, (__m256i)value_31));
              sums_15 = zse_add_i16_i32x8(sums_15, pairs_4);
              totals_2 = (totals_2 + ((i32x8)_mm256_madd_epi16((__m256i)sums_10, _mm256_set1_epi16(1))));
              totals_6 = (totals_6 + ((i32x8)_mm256_madd_epi16((__m256i)sums_14, _mm256_set1_epi16(1))));
              totals_3 = (totals_3 + ((i32x8)_mm256_madd_epi16((__m256i)sums_11, _mm256_set1_epi16(1))));
              totals_7 = (totals_7 + ((i32x8)_mm256_madd_epi16((__m256i)sums_15, _mm256_set1_epi16(1))));
              i32x8 sums_16 = zse_splat_i32x8(0);
              i32x8 sums_17 = zse_splat_i32x8(0);
              i32x8 sums_18 = sums_16;
              i32x8 sums_19 = sums_17;
              i32x8 sums_20 = zse_splat_i32x8(0);
              i32x8 sums_21 = zse_splat_i32x8(0);
              i32x8 sums_22 = sums_20;
              i32x8 sums_23 = sums_21;
              i32x8 w_36 = (*(const i32x8_mem *)(staged + ((first__6 + 2LL) * 16LL)));
              i32x8 w_37 = (*(const i32x8_mem *)((staged + ((first__6 + 2LL) * 16LL)) + 8LL));
              value_31 = zse_splat_i32x8((*(rows_2 + 2LL)));
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_36, (__m256i)value_31));
              sums_18 = pairs_4;
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_37, (__m256i)value_31));
              sums_22 = pairs_4;
              value_31 = zse_splat_i32x8((*(rows_3 + 2LL)));
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_36, (__m256i)value_31));
              sums_19 = pairs_4;
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_37, (__m256i)value_31));
              sums_23 = pairs_4;
              i32x8 w_38 = (*(const i32x8_mem *)(staged + ((first__6 + 3LL) * 16LL)));
              i32x8 w_39 = (*(const i32x8_mem *)((staged + ((first__6 + 3LL) * 16LL)) + 8LL));
              value_31 = zse_splat_i32x8((*(rows_2 + 3LL)));
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_38, (__m256i)value_31));
              sums_18 = zse_add_i16_i32x8(sums_18, pairs_4);
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_39, (__m256i)value_31));
              sums_22 = zse_add_i16_i32x8(sums_22, pairs_4);
              value_31 = zse_splat_i32x8((*(rows_3 + 3LL)));
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_38, (__m256i)value_31));
              sums_19 = zse_add_i16_i32x8(sums_19, pairs_4);
              pairs_4 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_39, (__m256i)value_31));
              sums_23 = zse_add_i16_i32x8(sums_23, pairs_4);
              totals_2 = (totals_2 + ((i32x8)_mm256_madd_epi16((__m256i)sums_18, _mm256_set1_epi16(1))));
              totals_6 = (totals_6 + ((i32x8)_mm256_madd_epi16((__m256i)sums_22, _mm256_set1_epi16(1))));
              totals_3 = (totals_3 + ((i32x8)_mm256_madd_epi16((__m256i)sums_19, _mm256_set1_epi16(1))));
              totals_7 = (totals_7 + ((i32x8)_mm256_madd_epi16((__m256i)sums_23, _mm256_set1_epi16(1))));
              f32x8 scale_1 = (*(const f32x8_mem *)(staged_1 + (((2LL * i_2) + 0LL) * 16LL)));
              f32x8 unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_3 + i_2))));
              sums_2 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_2, f32x8), unit_5, sums_2));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_4 + i_2))));
              sums_3 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_3, f32x8), unit_5, sums_3));
              scale_1 = (*(const f32x8_mem *)((staged_1 + (((2LL * i_2) + 0LL) * 16LL)) + 8LL));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_3 + i_2))));
              sums_6 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_6, f32x8), unit_5, sums_6));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_4 + i_2))));
              sums_7 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_7, f32x8), unit_5, sums_7));
              int64_t first__7 = (i_2 * 8LL);
              i32x8 totals_8 = zse_splat_i32x8(0);
              i32x8 totals_9 = zse_splat_i32x8(0);
              i32x8 totals_10 = totals_8;
              i32x8 totals_11 = totals_9;
              i32x8 totals_12 = zse_splat_i32x8(0);
              i32x8 totals_13 = zse_splat_i32x8(0);
              i32x8 totals_14 = totals_12;
              i32x8 totals_15 = totals_13;
              i32x8 sums_24 = zse_splat_i32x8(0);
              i32x8 sums_25 = zse_splat_i32x8(0);
              i32x8 sums_26 = sums_24;
              i32x8 sums_27 = sums_25;
              i32x8 sums_28 = zse_splat_i32x8(0);
              i32x8 sums_29 = zse_splat_i32x8(0);
              i32x8 sums_30 = sums_28;
              i32x8 sums_31 = sums_29;
              i32x8 w_40 = (*(const i32x8_mem *)(staged + ((first__7 + 4LL) * 16LL)));
              i32x8 w_41 = (*(const i32x8_mem *)((staged + ((first__7 + 4LL) * 16LL)) + 8LL));
              i32x8 value_32 = zse_splat_i32x8((*(rows_2 + 4LL)));
              i32x8 pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_40, (__m256i)value_32));
              sums_26 = pairs_5;
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_41, (__m256i)value_32));
              sums_30 = pairs_5;
              value_32 = zse_splat_i32x8((*(rows_3 + 4LL)));
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_40, (__m256i)value_32));
              sums_27 = pairs_5;
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_41, (__m256i)value_32));
              sums_31 = pairs_5;
              i32x8 w_42 = (*(const i32x8_mem *)(staged + ((first__7 + 5LL) * 16LL)));
              i32x8 w_43 = (*(const i32x8_mem *)((staged + ((first__7 + 5LL) * 16LL)) + 8LL));
              value_32 = zse_splat_i32x8((*(rows_2 + 5LL)));
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_42, (__m256i)value_32));
              sums_26 = zse_add_i16_i32x8(sums_26, pairs_5);
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_43, (__m256i)value_32));
              sums_30 = zse_add_i16_i32x8(sums_30, pairs_5);
              value_32 = zse_splat_i32x8((*(rows_3 + 5LL)));
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_42, (__m256i)value_32));
              sums_27 = zse_add_i16_i32x8(sums_27, pairs_5);
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_43, (__m256i)value_32));
              sums_31 = zse_add_i16_i32x8(sums_31, pairs_5);
              totals_10 = (totals_10 + ((i32x8)_mm256_madd_epi16((__m256i)sums_26, _mm256_set1_epi16(1))));
              totals_14 = (totals_14 + ((i32x8)_mm256_madd_epi16((__m256i)sums_30, _mm256_set1_epi16(1))));
              totals_11 = (totals_11 + ((i32x8)_mm256_madd_epi16((__m256i)sums_27, _mm256_set1_epi16(1))));
              totals_15 = (totals_15 + ((i32x8)_mm256_madd_epi16((__m256i)sums_31, _mm256_set1_epi16(1))));
              i32x8 sums_32 = zse_splat_i32x8(0);
              i32x8 sums_33 = zse_splat_i32x8(0);
              i32x8 sums_34 = sums_32;
              i32x8 sums_35 = sums_33;
              i32x8 sums_36 = zse_splat_i32x8(0);
              i32x8 sums_37 = zse_splat_i32x8(0);
              i32x8 sums_38 = sums_36;
              i32x8 sums_39 = sums_37;
              i32x8 w_44 = (*(const i32x8_mem *)(staged + ((first__7 + 6LL) * 16LL)));
              i32x8 w_45 = (*(const i32x8_mem *)((staged + ((first__7 + 6LL) * 16LL)) + 8LL));
              value_32 = zse_splat_i32x8((*(rows_2 + 6LL)));
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_44, (__m256i)value_32));
              sums_34 = pairs_5;
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_45, (__m256i)value_32));
              sums_38 = pairs_5;
              value_32 = zse_splat_i32x8((*(rows_3 + 6LL)));
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_44, (__m256i)value_32));
              sums_35 = pairs_5;
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_45, (__m256i)value_32));
              sums_39 = pairs_5;
              i32x8 w_46 = (*(const i32x8_mem *)(staged + ((first__7 + 7LL) * 16LL)));
              i32x8 w_47 = (*(const i32x8_mem *)((staged + ((first__7 + 7LL) * 16LL)) + 8LL));
              value_32 = zse_splat_i32x8((*(rows_2 + 7LL)));
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_46, (__m256i)value_32));
              sums_34 = zse_add_i16_i32x8(sums_34, pairs_5);
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_47, (__m256i)value_32));
              sums_38 = zse_add_i16_i32x8(sums_38, pairs_5);
              value_32 = zse_splat_i32x8((*(rows_3 + 7LL)));
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_46, (__m256i)value_32));
              sums_35 = zse_add_i16_i32x8(sums_35, pairs_5);
              pairs_5 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_47, (__m256i)value_32));
              sums_39 = zse_add_i16_i32x8(sums_39, pairs_5);
              totals_10 = (totals_10 + ((i32x8)_mm256_madd_epi16((__m256i)sums_34, _mm256_set1_epi16(1))));
              totals_14 = (totals_14 + ((i32x8)_mm256_madd_epi16((__m256i)sums_38, _mm256_set1_epi16(1))));
              totals_11 = (totals_11 + ((i32x8)_mm256_madd_epi16((__m256i)sums_35, _mm256_set1_epi16(1))));
              totals_15 = (totals_15 + ((i32x8)_mm256_madd_epi16((__m256i)sums_39, _mm256_set1_epi16(1))));
              scale_1 = (*(const f32x8_mem *)(staged_1 + (((2LL * i_2) + 1LL) * 16LL)));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_3 + i_2))));
              sums_2 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_10, f32x8), unit_5, sums_2));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_4 + i_2))));
              sums_3 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_11, f32x8), unit_5, sums_3));
              scale_1 = (*(const f32x8_mem *)((staged_1 + (((2LL * i_2) + 1LL) * 16LL)) + 8LL));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_3 + i_2))));
              sums_6 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_14, f32x8), unit_5, sums_6));
              unit_5 = (scale_1 * zse_splat_f32x8((*(tokens_4 + i_2))));
              sums_7 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_15, f32x8), unit_5, sums_7));
              f32x8 offset_2 = (*(const f32x8_mem *)(staged_2 + (((2LL * i_2) + 0LL) * 16LL)));
              float total = (*(tokens_5 + i_2));
              total = (*(tokens_7 + i_2));
              sums_2 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total), sums_2));
              total = (*(tokens_6 + i_2));
              total = (*(tokens_8 + i_2));
              sums_3 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total), sums_3));
              offset_2 = (*(const f32x8_mem *)(staged_2 + (((2LL * i_2) + 1LL) * 16LL)));
              total = (*(tokens_5 + i_2));
              total = (total - (*(tokens_7 + i_2)));
              sums_2 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total), sums_2));
              total = (*(tokens_6 + i_2));
              total = (total - (*(tokens_8 + i_2)));
              sums_3 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total), sums_3));
              offset_2 = (*(const f32x8_mem *)((staged_2 + (((2LL * i_2) + 0LL) * 16LL)) + 8LL));
              total = (*(tokens_5 + i_2));
              total = (*(tokens_7 + i_2));
              sums_6 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total), sums_6));
              total = (*(tokens_6 + i_2));
              total = (*(tokens_8 + i_2));
              sums_7 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total), sums_7));
              offset_2 = (*(const f32x8_mem *)((staged_2 + (((2LL * i_2) + 1LL) * 16LL)) + 8LL));
              total = (*(tokens_5 + i_2));
              total = (total - (*(tokens_7 + i_2)));
              sums_6 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total), sums_6));
              total = (*(tokens_6 + i_2));
              total = (total - (*(tokens_8 + i_2)));
              sums_7 = ((f32x8)_mm256_fmadd_ps(offset_2, zse_splat_f32x8(total), sums_7));
            }
            *(f32x8_mem *)mine_1 = sums_2;
            *(f32x8_mem *)(mine_1 + 16LL) = sums_3;
            *(f32x8_mem *)(mine_1 + 8LL) = sums_6;
            *(f32x8_mem *)((mine_1 + 16LL) + 8LL) = sums_7;
            if (((first__5 + 8LL) >= num_blocks)) {
              int64_t at_stop_1 = zse_minimum_i64((token_1 + 2LL), token_last);
              for (int64_t at_1 = token_1; at_1 < at_stop_1; at_1 += 1LL) {
                f32x8 total_1 = (*(const f32x8_mem *)(mine_1 + ((at_1 - token_1) * 16LL)));
                float * out_1 = (out + (at_1 * rows));
                const float * bias_1 = (bias + (expert_2 * rows));
                int64_t row_1 = ((tile_1 * 16LL) + 0LL);
                f32x8 total_2 = total_1;
                if ((has_bias != 0LL)) {
                  if (((row_1 + 8LL) <= rows)) {
                    total_2 = (total_2 + (*(const f32x8_mem *)(bias_1 + row_1)));
                  }
                }
                if (((row_1 + 8LL) <= rows)) {
                  *(f32x8_mem *)(out_1 + row_1) = total_2;
                } else {
                  float scratch_7[16] __attribute__((aligned(64)));
                  float * spill = scratch_7;
                  *(f32x8_mem *)spill = total_2;
                  for (int64_t r = row_1; r < rows; r += 1LL) {
                    if ((has_bias != 0LL)) {
                      *(out_1 + r) = ((*(spill + (r - row_1))) + (*(bias_1 + r)));
                    } else {
                      *(out_1 + r) = (*(spill + (r - row_1)));
                    }
                  }
                }
                total_1 = (*(const f32x8_mem *)((mine_1 + ((at_1 - token_1) * 16LL)) + 8LL));
                float * out_2 = (out + (at_1 * rows));
                const float * bias_2 = (bias + (expert_2 * rows));
                int64_t row_2 = ((tile_1 * 16LL) + 8LL);
                f32x8 total_3 = total_1;
                if ((has_bias != 0LL)) {
                  if (((row_2 + 8LL) <= rows)) {
                    total_3 = (total_3 + (*(const f32x8_mem *)(bias_2 + row_2)));
                  }
                }
                if (((row_2 + 8LL) <= rows)) {
                  *(f32x8_mem *)(out_2 + row_2) = total_3;
                } else {
                  float scratch_8[16] __attribute__((aligned(64)));
                  float * spill_1 = scratch_8;
                  *(f32x8_mem *)spill_1 = total_3;
                  for (int64_t r_1 = row_2; r_1 < rows; r_1 += 1LL) {
                    if ((has_bias != 0LL)) {
                      *(out_2 + r_1) = ((*(spill_1 + (r_1 - row_2))) + (*(bias_2 + r_1)));
                    } else {
                      *(out_2 + r_1) = (*(spill_1 + (r_1 - row_2)));
                    }
                  }
                }
              }
            }
          }
        }
      }
    } else {
      int64_t expert_3 = 0LL;
      int64_t first__8 = (block_0 * 64LL);
      int64_t value_33 = first__8;
      int64_t value_34 = zse_minimum_i64((first__8 + 64LL), tokens);
      int64_t first__9 = value_33;
      int64_t last__3 = value_34;
      if ((experts != 0LL)) {
        const int32_t * task_2 = (tasks + (block_0 * 3LL));
        expert_3 = ((int64_t)(*task_2));
        first__9 = ((int64_t)(*(task_2 + 1LL)));
        last__3 = ((int64_t)(*(task_2 + 2LL)));
      }
      int64_t value_35 = expert_3;
      int64_t value_36 = first__9;
      int64_t value_37 = last__3;
      int64_t expert_4 = value_35;
      int64_t token_first_1 = value_36;
      int64_t token_last_1 = value_37;
      int64_t groups_1 = (blocks * 2LL);
      int32_t scratch_9[1024] __attribute__((aligned(64)));
      float scratch_10[256] __attribute__((aligned(64)));
      float scratch_11[256] __attribute__((aligned(64)));
      int32_t * staged_4 = scratch_9;
      float * staged_5 = scratch_10;
      float * staged_6 = scratch_11;
      int32_t scratch_13[4096] __attribute__((aligned(64)));
      int32_t * q_3 = scratch_13;
      float scratch_14[1536] __attribute__((aligned(64)));
      float * factors_1 = scratch_14;
      float scratch_15[8192] __attribute__((aligned(64)));
      float * acc_1 = scratch_15;
      int64_t num_blocks_1 = 0LL;
      int64_t padded_1 = ((((token_last_1 - token_first_1) + 3LL) / 4LL) * 4LL);
      if (((token_first_1 < token_last_1) && (tile < last_tile))) {
        num_blocks_1 = blocks;
        int64_t at_stop_2 = (padded_1 * 128LL);
        for (int64_t at_2 = 0LL; at_2 < at_stop_2; at_2 += 8LL) {
          *(f32x8_mem *)(acc_1 + at_2) = zse_splat_f32x8((0.0f));
        }
      }
      for (int64_t first__10 = 0LL; first__10 < num_blocks_1; first__10 += 8LL) {
        int64_t count_1 = zse_minimum_i64((num_blocks_1 - first__10), 8LL);
        int64_t token_stop_1 = (token_last_1 + ((token_first_1 - token_last_1) & 3LL));
        for (int64_t token_2 = token_first_1; token_2 < token_stop_1; token_2 += 1LL) {
          int64_t a_4 = zse_minimum_i64(token_2, (token_last_1 - 1LL));
          int64_t row_3 = (a_4 + 0LL);
          if ((experts == 2LL)) {
            row_3 = ((int64_t)(*(source + a_4)));
          }
          int64_t rows_4 = row_3;
          const int8_t * item_7 = (aq + (rows_4 * (blocks * 32LL)));
          const float * item_8 = (a_scale + (rows_4 * blocks));
          const float * item_9 = (a_sum + (rows_4 * blocks));
          const int8_t * a_5 = item_7;
          const float * a_6 = item_8;
          const float * a_7 = item_9;
          float * mine_4 = (factors_1 + ((token_2 - token_first_1) * 24LL));
          for (int64_t i_3 = 0LL; i_3 < count_1; i_3 += 1LL) {
            int64_t value_38 = (first__10 + i_3);
            int32_t * value_39 = (q_3 + ((((token_2 - token_first_1) * 8LL) + i_3) * 8LL));
            int64_t block__3 = value_38;
            int32_t * place_2 = value_39;
            const int32_t * words_3 = ((const int32_t *)(a_5 + (block__3 * 32LL)));
            i32x8 word_1 = (*(const i32x8_mem *)words_3);
            *(i32x8_mem *)place_2 = word_1;
            *(mine_4 + i_3) = (*(a_6 + block__3));
            *(mine_4 + (8LL + i_3)) = (*(a_7 + block__3));
            const int32_t * q_4 = ((const int32_t *)(a_5 + (block__3 * 32LL)));
            i32x4 value_40 = zse_splat_i32x4(16843009);
            i32x4 value_41 = (*(const i32x4_mem *)q_4);
            i32x4 ones_1 = value_40;
            i32x4 bytes__1 = value_41;
            *(mine_4 + (16LL + i_3)) = (((float)zse_reduce_add_i32x4(((i32x4)_mm_madd_epi16((__m128i)((i32x4)_mm_maddubs_epi16((__m128i)ones_1, (__m128i)bytes__1)), _mm_set1_epi16(1))))) * (*(a_6 + block__3)));
          }
        }
        for (int64_t tile_4 = tile; tile_4 < last_tile; tile_4 += 1LL) {
          int64_t tile_5 = ((expert_4 * ((rows + 15LL) / 16LL)) + tile_4);
          const int32_t * now_4 = (q + ((tile_5 * blocks) * 64LL));
          const int32_t * now_5 = (high + ((tile_5 * blocks) * 32LL));
          const uint16_t * now_6 = (scale + ((tile_5 * groups_1) * 16LL));
          for (int64_t i_4 = 0LL; i_4 < count_1; i_4 += 1LL) {
            int64_t block__4 = (first__10 + i_4);
            i32x8 packed_8 = (*(const i32x8_mem *)(now_4 + (block__4 * 64LL)));
            i32x8 packed_9 = (*(const i32x8_mem *)((now_4 + (block__4 * 64LL)) + 16LL));
            i32x8 packed_10 = (*(const i32x8_mem *)((now_4 + (block__4 * 64LL)) + 32LL));
            i32x8 packed_11 = (*(const i32x8_mem *)((now_4 + (block__4 * 64LL)) + 48LL));
            i32x8 w_48 = (packed_8 & zse_splat_i32x8(252645135));
            i32x8 w_49 = (packed_9 & zse_splat_i32x8(252645135));
            i32x8 w_50 = (packed_10 & zse_splat_i32x8(252645135));
            i32x8 w_51 = (packed_11 & zse_splat_i32x8(252645135));
            i32x8 w_52 = ((packed_8 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_53 = ((packed_9 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_54 = ((packed_10 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_55 = ((packed_11 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 pairs_6 = (*(const i32x8_mem *)(now_5 + (block__4 * 32LL)));
            i32x8 pairs_7 = (*(const i32x8_mem *)((now_5 + (block__4 * 32LL)) + 16LL));
            i32x8 w_56 = (w_48 | ((pairs_6 << zse_splat_i32x8(4)) & zse_splat_i32x8(808464432)));
            i32x8 w_57 = (w_49 | ((pairs_6 << zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            i32x8 w_58 = (w_50 | ((pairs_6 << zse_splat_i32x8(0)) & zse_splat_i32x8(808464432)));
            i32x8 w_59 = (w_51 | ((pairs_6 >> zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            i32x8 w_60 = (w_52 | ((pairs_7 << zse_splat_i32x8(4)) & zse_splat_i32x8(808464432)));
            i32x8 w_61 = (w_53 | ((pairs_7 << zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            i32x8 w_62 = (w_54 | ((pairs_7 << zse_splat_i32x8(0)) & zse_splat_i32x8(808464432)));
            i32x8 w_63 = (w_55 | ((pairs_7 >> zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            *(i32x8_mem *)(staged_4 + (((i_4 * 8LL) + 0LL) * 16LL)) = w_56;
            *(i32x8_mem *)(staged_4 + (((i_4 * 8LL) + 1LL) * 16LL)) = w_57;
            *(i32x8_mem *)(staged_4 + (((i_4 * 8LL) + 2LL) * 16LL)) = w_58;
            *(i32x8_mem *)(staged_4 + (((i_4 * 8LL) + 3LL) * 16LL)) = w_59;
            *(i32x8_mem *)(staged_4 + (((i_4 * 8LL) + 4LL) * 16LL)) = w_60;
            *(i32x8_mem *)(staged_4 + (((i_4 * 8LL) + 5LL) * 16LL)) = w_61;
            *(i32x8_mem *)(staged_4 + (((i_4 * 8LL) + 6LL) * 16LL)) = w_62;
            *(i32x8_mem *)(staged_4 + (((i_4 * 8LL) + 7LL) * 16LL)) = w_63;
            int64_t group_2 = ((block__4 * 2LL) + 0LL);
            f32x8 s_8 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)(now_6 + (group_2 * 16LL)))));
            f32x8 value_42 = s_8;
            f32x8 s_9 = value_42;
            f32x8 unit_6 = s_9;
            f32x8 value_43 = unit_6;
            f32x8 value_44 = (s_9 * zse_splat_f32x8((-32.0f)));
            f32x8 unit_7 = value_43;
            f32x8 offset_3 = value_44;
            *(f32x8_mem *)(staged_5 + (((i_4 * 2LL) + 0LL) * 16LL)) = unit_7;
            *(f32x8_mem *)(staged_6 + (((i_4 * 2LL) + 0LL) * 16LL)) = offset_3;
            group_2 = ((block__4 * 2LL) + 1LL);
            f32x8 s_10 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)(now_6 + (group_2 * 16LL)))));
            f32x8 value_45 = s_10;
            f32x8 s_11 = value_45;
            f32x8 unit_8 = s_11;
            f32x8 value_46 = unit_8;
            f32x8 value_47 = (s_11 * zse_splat_f32x8((-32.0f)));
            unit_7 = value_46;
            offset_3 = value_47;
            *(f32x8_mem *)(staged_5 + (((i_4 * 2LL) + 1LL) * 16LL)) = unit_7;
            *(f32x8_mem *)(staged_6 + (((i_4 * 2LL) + 1LL) * 16LL)) = offset_3;
            i32x8 packed_12 = (*(const i32x8_mem *)((now_4 + (block__4 * 64LL)) + 8LL));
            i32x8 packed_13 = (*(const i32x8_mem *)((now_4 + (block__4 * 64LL)) + 24LL));
            i32x8 packed_14 = (*(const i32x8_mem *)((now_4 + (block__4 * 64LL)) + 40LL));
            i32x8 packed_15 = (*(const i32x8_mem *)((now_4 + (block__4 * 64LL)) + 56LL));
            i32x8 w_64 = (packed_12 & zse_splat_i32x8(252645135));
            i32x8 w_65 = (packed_13 & zse_splat_i32x8(252645135));
            i32x8 w_66 = (packed_14 & zse_splat_i32x8(252645135));
            i32x8 w_67 = (packed_15 & zse_splat_i32x8(252645135));
            i32x8 w_68 = ((packed_12 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_69 = ((packed_13 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_70 = ((packed_14 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 w_71 = ((packed_15 >> zse_splat_i32x8(4)) & zse_splat_i32x8(252645135));
            i32x8 pairs_8 = (*(const i32x8_mem *)((now_5 + (block__4 * 32LL)) + 8LL));
            i32x8 pairs_9 = (*(const i32x8_mem *)((now_5 + (block__4 * 32LL)) + 24LL));
            i32x8 w_72 = (w_64 | ((pairs_8 << zse_splat_i32x8(4)) & zse_splat_i32x8(808464432)));
            i32x8 w_73 = (w_65 | ((pairs_8 << zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            i32x8 w_74 = (w_66 | ((pairs_8 << zse_splat_i32x8(0)) & zse_splat_i32x8(808464432)));
            i32x8 w_75 = (w_67 | ((pairs_8 >> zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            i32x8 w_76 = (w_68 | ((pairs_9 << zse_splat_i32x8(4)) & zse_splat_i32x8(808464432)));
            i32x8 w_77 = (w_69 | ((pairs_9 << zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            i32x8 w_78 = (w_70 | ((pairs_9 << zse_splat_i32x8(0)) & zse_splat_i32x8(808464432)));
            i32x8 w_79 = (w_71 | ((pairs_9 >> zse_splat_i32x8(2)) & zse_splat_i32x8(808464432)));
            *(i32x8_mem *)((staged_4 + (((i_4 * 8LL) + 0LL) * 16LL)) + 8LL) = w_72;
            *(i32x8_mem *)((staged_4 + (((i_4 * 8LL) + 1LL) * 16LL)) + 8LL) = w_73;
            *(i32x8_mem *)((staged_4 + (((i_4 * 8LL) + 2LL) * 16LL)) + 8LL) = w_74;
            *(i32x8_mem *)((staged_4 + (((i_4 * 8LL) + 3LL) * 16LL)) + 8LL) = w_75;
            *(i32x8_mem *)((staged_4 + (((i_4 * 8LL) + 4LL) * 16LL)) + 8LL) = w_76;
            *(i32x8_mem *)((staged_4 + (((i_4 * 8LL) + 5LL) * 16LL)) + 8LL) = w_77;
            *(i32x8_mem *)((staged_4 + (((i_4 * 8LL) + 6LL) * 16LL)) + 8LL) = w_78;
            *(i32x8_mem *)((staged_4 + (((i_4 * 8LL) + 7LL) * 16LL)) + 8LL) = w_79;
            group_2 = ((block__4 * 2LL) + 0LL);
            f32x8 s_12 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((now_6 + (group_2 * 16LL)) + 8LL))));
            f32x8 value_48 = s_12;
            f32x8 s_13 = value_48;
            f32x8 unit_9 = s_13;
            f32x8 value_49 = unit_9;
            f32x8 value_50 = (s_13 * zse_splat_f32x8((-32.0f)));
            unit_7 = value_49;
            offset_3 = value_50;
            *(f32x8_mem *)((staged_5 + (((i_4 * 2LL) + 0LL) * 16LL)) + 8LL) = unit_7;
            *(f32x8_mem *)((staged_6 + (((i_4 * 2LL) + 0LL) * 16LL)) + 8LL) = offset_3;
            group_2 = ((block__4 * 2LL) + 1LL);
            f32x8 s_14 = ((f32x8)_mm256_cvtph_ps((__m128i)(*(const f16x8_mem *)((now_6 + (group_2 * 16LL)) + 8LL))));
            f32x8 value_51 = s_14;
            f32x8 s_15 = value_51;
            f32x8 unit_10 = s_15;
            f32x8 value_52 = unit_10;
            f32x8 value_53 = (s_15 * zse_splat_f32x8((-32.0f)));
            unit_7 = value_52;
            offset_3 = value_53;
            *(f32x8_mem *)((staged_5 + (((i_4 * 2LL) + 1LL) * 16LL)) + 8LL) = unit_7;
            *(f32x8_mem *)((staged_6 + (((i_4 * 2LL) + 1LL) * 16LL)) + 8LL) = offset_3;
          }
          int64_t value_54 = (tile_4 + 1LL);
          int64_t value_55 = (first__10 + 0LL);
          int64_t after_1 = value_54;
          int64_t after_first_1 = value_55;
          if ((after_1 == last_tile)) {
            after_1 = tile;
            after_first_1 = (first__10 + count_1);
          }
          int64_t tile_6 = ((expert_4 * ((rows + 15LL) / 16LL)) + after_1);
          const int32_t * planes_12 = (q + ((tile_6 * blocks) * 64LL));
          const int32_t * planes_13 = (high + ((tile_6 * blocks) * 32LL));
          const uint16_t * planes_14 = (scale + ((tile_6 * groups_1) * 16LL));
          int64_t value_56 = ((31LL / (token_last_1 - token_first_1)) + 1LL);
          int64_t value_57 = 0LL;
          int64_t share_1 = value_56;
          int64_t done_1 = value_57;
          for (int64_t token_3 = token_first_1; token_3 < token_last_1; token_3 += 4LL) {
            int64_t first__11 = (first__10 + 8LL);
            int64_t line = (tile_4 - tile);
            int64_t token_4 = zse_minimum_i64((token_3 + 0LL), (token_last_1 - 1LL));
            int64_t row_4 = (token_4 + 0LL);
            if ((experts == 2LL)) {
              row_4 = ((int64_t)(*(source + token_4)));
            }
            int64_t row_5 = row_4;
            if ((line < 4LL)) {
              const int8_t * item_10 = aq;
              __builtin_prefetch(((item_10 + (((row_5 * blocks) + first__11) * 32LL)) + (line * 64LL)), 0, 2);
            } else {
              if ((line == 4LL)) {
                __builtin_prefetch(((a_scale + (row_5 * blocks)) + first__11), 0, 2);
              } else {
                if ((line == 5LL)) {
                  __builtin_prefetch(((a_sum + (row_5 * blocks)) + first__11), 0, 2);
                }
              }
            }
            int64_t token_5 = zse_minimum_i64((token_3 + 1LL), (token_last_1 - 1LL));
            int64_t row_6 = (token_5 + 0LL);
            if ((experts == 2LL)) {
              row_6 = ((int64_t)(*(source + token_5)));
            }
            row_5 = row_6;
            if ((line < 4LL)) {
              const int8_t * item_11 = aq;
              __builtin_prefetch(((item_11 + (((row_5 * blocks) + first__11) * 32LL)) + (line * 64LL)), 0, 2);
            } else {
              if ((line == 4LL)) {
                __builtin_prefetch(((a_scale + (row_5 * blocks)) + first__11), 0, 2);
              } else {
                if ((line == 5LL)) {
                  __builtin_prefetch(((a_sum + (row_5 * blocks)) + first__11), 0, 2);
                }
              }
            }
            int64_t token_6 = zse_minimum_i64((token_3 + 2LL), (token_last_1 - 1LL));
            int64_t row_7 = (token_6 + 0LL);
            if ((experts == 2LL)) {
              row_7 = ((int64_t)(*(source + token_6)));
            }
            row_5 = row_7;
            if ((line < 4LL)) {
              const int8_t * item_12 = aq;
              __builtin_prefetch(((item_12 + (((row_5 * blocks) + first__11) * 32LL)) + (line * 64LL)), 0, 2);
            } else {
              if ((line == 4LL)) {
                __builtin_prefetch(((a_scale + (row_5 * blocks)) + first__11), 0, 2);
              } else {
                if ((line == 5LL)) {
                  __builtin_prefetch(((a_sum + (row_5 * blocks)) + first__11), 0, 2);
                }
              }
            }
            int64_t token_7 = zse_minimum_i64((token_3 + 3LL), (token_last_1 - 1LL));
            int64_t row_8 = (token_7 + 0LL);
            if ((experts == 2LL)) {
              row_8 = ((int64_t)(*(source + token_7)));
            }
            row_5 = row_8;
            if ((line < 4LL)) {
              const int8_t * item_13 = aq;
              __builtin_prefetch(((item_13 + (((row_5 * blocks) + first__11) * 32LL)) + (line * 64LL)), 0, 2);
            } else {
              if ((line == 4LL)) {
                __builtin_prefetch(((a_scale + (row_5 * blocks)) + first__11), 0, 2);
              } else {
                if ((line == 5LL)) {
                  __builtin_prefetch(((a_sum + (row_5 * blocks)) + first__11), 0, 2);
                }
              }
            }
            int64_t until = zse_minimum_i64((done_1 + share_1), 8LL);
            for (int64_t i_5 = done_1; i_5 < until; i_5 += 1LL) {
              int64_t block__5 = (after_first_1 + i_5);
              __builtin_prefetch((planes_12 + (block__5 * 64LL)), 0, 2);
              __builtin_prefetch(((planes_12 + (block__5 * 64LL)) + 16LL), 0, 2);
              __builtin_prefetch(((planes_12 + (block__5 * 64LL)) + 32LL), 0, 2);
              __builtin_prefetch(((planes_12 + (block__5 * 64LL)) + 48LL), 0, 2);
              __builtin_prefetch((planes_13 + (block__5 * 32LL)), 0, 2);
              __builtin_prefetch(((planes_13 + (block__5 * 32LL)) + 16LL), 0, 2);
              int64_t group_3 = (block__5 * 2LL);
              __builtin_prefetch((planes_14 + (group_3 * 16LL)), 0, 2);
            }
            done_1 = until;
            float * mine_5 = (acc_1 + (((((tile_4 - tile) * padded_1) + token_3) - token_first_1) * 16LL));
            int64_t place_3 = (token_3 - token_first_1);
            int64_t places_2 = (place_3 + 0LL);
            int64_t places_3 = (place_3 + 1LL);
            int64_t places_4 = (place_3 + 2LL);
            int64_t places_5 = (place_3 + 3LL);
            float * mine_6 = (factors_1 + (places_2 * 24LL));
            float * mine_7 = (factors_1 + (places_3 * 24LL));
            float * mine_8 = (factors_1 + (places_4 * 24LL));
            float * mine_9 = (factors_1 + (places_5 * 24LL));
            int32_t * words_4 = (q_3 + (places_2 * 64LL));
            int32_t * words_5 = (q_3 + (places_3 * 64LL));
            int32_t * words_6 = (q_3 + (places_4 * 64LL));
            int32_t * words_7 = (q_3 + (places_5 * 64LL));
            float * item_14 = (mine_6 + 8LL);
            float * item_15 = (mine_7 + 8LL);
            float * item_16 = (mine_8 + 8LL);
            float * item_17 = (mine_9 + 8LL);
            float * item_18 = (mine_6 + 16LL);
            float * item_19 = (mine_7 + 16LL);
            float * item_20 = (mine_8 + 16LL);
            float * item_21 = (mine_9 + 16LL);
            int32_t * tokens_9 = words_4;
            int32_t * tokens_10 = words_5;
            int32_t * tokens_11 = words_6;
            int32_t * tokens_12 = words_7;
            float * tokens_13 = mine_6;
            float * tokens_14 = mine_7;
            float * tokens_15 = mine_8;
            float * tokens_16 = mine_9;
            float * tokens_17 = item_14;
            float * tokens_18 = item_15;
            float * tokens_19 = item_16;
            float * tokens_20 = item_17;
            float * tokens_21 = item_18;
            float * tokens_22 = item_19;
            float * tokens_23 = item_20;
            float * tokens_24 = item_21;
            f32x8 sums_40 = (*(const f32x8_mem *)mine_5);
            f32x8 sums_41 = (*(const f32x8_mem *)(mine_5 + 16LL));
            f32x8 sums_42 = (*(const f32x8_mem *)(mine_5 + 32LL));
            f32x8 sums_43 = (*(const f32x8_mem *)(mine_5 + 48LL));
            f32x8 sums_44 = sums_40;
            f32x8 sums_45 = sums_41;
            f32x8 sums_46 = sums_42;
            f32x8 sums_47 = sums_43;
            f32x8 sums_48 = (*(const f32x8_mem *)(mine_5 + 8LL));
            f32x8 sums_49 = (*(const f32x8_mem *)((mine_5 + 16LL) + 8LL));
            f32x8 sums_50 = (*(const f32x8_mem *)((mine_5 + 32LL) + 8LL));
            f32x8 sums_51 = (*(const f32x8_mem *)((mine_5 + 48LL) + 8LL));
            f32x8 sums_52 = sums_48;
            f32x8 sums_53 = sums_49;
            f32x8 sums_54 = sums_50;
            f32x8 sums_55 = sums_51;
            for (int64_t i_6 = 0LL; i_6 < count_1; i_6 += 1LL) {
              int32_t * rows_5 = (tokens_9 + (i_6 * 8LL));
              int32_t * rows_6 = (tokens_10 + (i_6 * 8LL));
              int32_t * rows_7 = (tokens_11 + (i_6 * 8LL));
              int32_t * rows_8 = (tokens_12 + (i_6 * 8LL));
              int64_t first__12 = (i_6 * 8LL);
              i32x8 totals_16 = zse_splat_i32x8(0);
              i32x8 totals_17 = zse_splat_i32x8(0);
              i32x8 totals_18 = zse_splat_i32x8(0);
              i32x8 totals_19 = zse_splat_i32x8(0);
              i32x8 totals_20 = totals_16;
              i32x8 totals_21 = totals_17;
              i32x8 totals_22 = totals_18;
              i32x8 totals_23 = totals_19;
              i32x8 totals_24 = zse_splat_i32x8(0);
              i32x8 totals_25 = zse_splat_i32x8(0);
              i32x8 totals_26 = zse_splat_i32x8(0);
              i32x8 totals_27 = zse_splat_i32x8(0);
              i32x8 totals_28 = totals_24;
              i32x8 totals_29 = totals_25;
              i32x8 totals_30 = totals_26;
              i32x8 totals_31 = totals_27;
              i32x8 sums_56 = zse_splat_i32x8(0);
              i32x8 sums_57 = zse_splat_i32x8(0);
              i32x8 sums_58 = sums_56;
              i32x8 sums_59 = sums_57;
              i32x8 sums_60 = zse_splat_i32x8(0);
              i32x8 sums_61 = zse_splat_i32x8(0);
              i32x8 sums_62 = sums_60;
              i32x8 sums_63 = sums_61;
              i32x8 w_80 = (*(const i32x8_mem *)(staged_4 + ((first__12 + 0LL) * 16LL)));
              i32x8 w_81 = (*(const i32x8_mem *)((staged_4 + ((first__12 + 0LL) * 16LL)) + 8LL));
              i32x8 value_58 = zse_splat_i32x8((*rows_5));
              i32x8 pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_80, (__m256i)value_58));
              sums_58 = pairs_10;
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_81, (__m256i)value_58));
              sums_62 = pairs_10;
              value_58 = zse_splat_i32x8((*rows_6));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_80, (__m256i)value_58));
              sums_59 = pairs_10;
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_81, (__m256i)value_58));
              sums_63 = pairs_10;
              i32x8 w_82 = (*(const i32x8_mem *)(staged_4 + ((first__12 + 1LL) * 16LL)));
              i32x8 w_83 = (*(const i32x8_mem *)((staged_4 + ((first__12 + 1LL) * 16LL)) + 8LL));
              value_58 = zse_splat_i32x8((*(rows_5 + 1LL)));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_82, (__m256i)value_58));
              sums_58 = zse_add_i16_i32x8(sums_58, pairs_10);
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_83, (__m256i)value_58));
              sums_62 = zse_add_i16_i32x8(sums_62, pairs_10);
              value_58 = zse_splat_i32x8((*(rows_6 + 1LL)));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_82, (__m256i)value_58));
              sums_59 = zse_add_i16_i32x8(sums_59, pairs_10);
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_83, (__m256i)value_58));
              sums_63 = zse_add_i16_i32x8(sums_63, pairs_10);
              totals_20 = (totals_20 + ((i32x8)_mm256_madd_epi16((__m256i)sums_58, _mm256_set1_epi16(1))));
              totals_28 = (totals_28 + ((i32x8)_mm256_madd_epi16((__m256i)sums_62, _mm256_set1_epi16(1))));
              totals_21 = (totals_21 + ((i32x8)_mm256_madd_epi16((__m256i)sums_59, _mm256_set1_epi16(1))));
              totals_29 = (totals_29 + ((i32x8)_mm256_madd_epi16((__m256i)sums_63, _mm256_set1_epi16(1))));
              i32x8 sums_64 = zse_splat_i32x8(0);
              i32x8 sums_65 = zse_splat_i32x8(0);
              i32x8 sums_66 = sums_64;
              i32x8 sums_67 = sums_65;
              i32x8 sums_68 = zse_splat_i32x8(0);
              i32x8 sums_69 = zse_splat_i32x8(0);
              i32x8 sums_70 = sums_68;
              i32x8 sums_71 = sums_69;
              i32x8 w_84 = (*(const i32x8_mem *)(staged_4 + ((first__12 + 0LL) * 16LL)));
              i32x8 w_85 = (*(const i32x8_mem *)((staged_4 + ((first__12 + 0LL) * 16LL)) + 8LL));
              value_58 = zse_splat_i32x8((*rows_7));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_84, (__m256i)value_58));
              sums_66 = pairs_10;
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_85, (__m256i)value_58));
              sums_70 = pairs_10;
              value_58 = zse_splat_i32x8((*rows_8));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_84, (__m256i)value_58));
              sums_67 = pairs_10;
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_85, (__m256i)value_58));
              sums_71 = pairs_10;
              i32x8 w_86 = (*(const i32x8_mem *)(staged_4 + ((first__12 + 1LL) * 16LL)));
              i32x8 w_87 = (*(const i32x8_mem *)((staged_4 + ((first__12 + 1LL) * 16LL)) + 8LL));
              value_58 = zse_splat_i32x8((*(rows_7 + 1LL)));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_86, (__m256i)value_58));
              sums_66 = zse_add_i16_i32x8(sums_66, pairs_10);
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_87, (__m256i)value_58));
              sums_70 = zse_add_i16_i32x8(sums_70, pairs_10);
              value_58 = zse_splat_i32x8((*(rows_8 + 1LL)));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_86, (__m256i)value_58));
              sums_67 = zse_add_i16_i32x8(sums_67, pairs_10);
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_87, (__m256i)value_58));
              sums_71 = zse_add_i16_i32x8(sums_71, pairs_10);
              totals_22 = (totals_22 + ((i32x8)_mm256_madd_epi16((__m256i)sums_66, _mm256_set1_epi16(1))));
              totals_30 = (totals_30 + ((i32x8)_mm256_madd_epi16((__m256i)sums_70, _mm256_set1_epi16(1))));
              totals_23 = (totals_23 + ((i32x8)_mm256_madd_epi16((__m256i)sums_67, _mm256_set1_epi16(1))));
              totals_31 = (totals_31 + ((i32x8)_mm256_madd_epi16((__m256i)sums_71, _mm256_set1_epi16(1))));
              i32x8 sums_72 = zse_splat_i32x8(0);
              i32x8 sums_73 = zse_splat_i32x8(0);
              i32x8 sums_74 = sums_72;
              i32x8 sums_75 = sums_73;
              i32x8 sums_76 = zse_splat_i32x8(0);
              i32x8 sums_77 = zse_splat_i32x8(0);
              i32x8 sums_78 = sums_76;
              i32x8 sums_79 = sums_77;
              i32x8 w_88 = (*(const i32x8_mem *)(staged_4 + ((first__12 + 2LL) * 16LL)));
              i32x8 w_89 = (*(const i32x8_mem *)((staged_4 + ((first__12 + 2LL) * 16LL)) + 8LL));
              value_58 = zse_splat_i32x8((*(rows_5 + 2LL)));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_88, (__m256i)value_58));
              sums_74 = pairs_10;
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_89, (__m256i)value_58));
              sums_78 = pairs_10;
              value_58 = zse_splat_i32x8((*(rows_6 + 2LL)));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_88, (__m256i)value_58));
              sums_75 = pairs_10;
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_89, (__m256i)value_58));
              sums_79 = pairs_10;
              i32x8 w_90 = (*(const i32x8_mem *)(staged_4 + ((first__12 + 3LL) * 16LL)));
              i32x8 w_91 = (*(const i32x8_mem *)((staged_4 + ((first__12 + 3LL) * 16LL)) + 8LL));
              value_58 = zse_splat_i32x8((*(rows_5 + 3LL)));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_90, (__m256i)value_58));
              sums_74 = zse_add_i16_i32x8(sums_74, pairs_10);
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_91, (__m256i)value_58));
              sums_78 = zse_add_i16_i32x8(sums_78, pairs_10);
              value_58 = zse_splat_i32x8((*(rows_6 + 3LL)));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_90, (__m256i)value_58));
              sums_75 = zse_add_i16_i32x8(sums_75, pairs_10);
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_91, (__m256i)value_58));
              sums_79 = zse_add_i16_i32x8(sums_79, pairs_10);
              totals_20 = (totals_20 + ((i32x8)_mm256_madd_epi16((__m256i)sums_74, _mm256_set1_epi16(1))));
              totals_28 = (totals_28 + ((i32x8)_mm256_madd_epi16((__m256i)sums_78, _mm256_set1_epi16(1))));
              totals_21 = (totals_21 + ((i32x8)_mm256_madd_epi16((__m256i)sums_75, _mm256_set1_epi16(1))));
              totals_29 = (totals_29 + ((i32x8)_mm256_madd_epi16((__m256i)sums_79, _mm256_set1_epi16(1))));
              i32x8 sums_80 = zse_splat_i32x8(0);
              i32x8 sums_81 = zse_splat_i32x8(0);
              i32x8 sums_82 = sums_80;
              i32x8 sums_83 = sums_81;
              i32x8 sums_84 = zse_splat_i32x8(0);
              i32x8 sums_85 = zse_splat_i32x8(0);
              i32x8 sums_86 = sums_84;
              i32x8 sums_87 = sums_85;
              i32x8 w_92 = (*(const i32x8_mem *)(staged_4 + ((first__12 + 2LL) * 16LL)));
              i32x8 w_93 = (*(const i32x8_mem *)((staged_4 + ((first__12 + 2LL) * 16LL)) + 8LL));
              value_58 = zse_splat_i32x8((*(rows_7 + 2LL)));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_92, (__m256i)value_58));
              sums_82 = pairs_10;
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_93, (__m256i)value_58));
              sums_86 = pairs_10;
              value_58 = zse_splat_i32x8((*(rows_8 + 2LL)));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_92, (__m256i)value_58));
              sums_83 = pairs_10;
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_93, (__m256i)value_58));
              sums_87 = pairs_10;
              i32x8 w_94 = (*(const i32x8_mem *)(staged_4 + ((first__12 + 3LL) * 16LL)));
              i32x8 w_95 = (*(const i32x8_mem *)((staged_4 + ((first__12 + 3LL) * 16LL)) + 8LL));
              value_58 = zse_splat_i32x8((*(rows_7 + 3LL)));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_94, (__m256i)value_58));
              sums_82 = zse_add_i16_i32x8(sums_82, pairs_10);
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_95, (__m256i)value_58));
              sums_86 = zse_add_i16_i32x8(sums_86, pairs_10);
              value_58 = zse_splat_i32x8((*(rows_8 + 3LL)));
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_94, (__m256i)value_58));
              sums_83 = zse_add_i16_i32x8(sums_83, pairs_10);
              pairs_10 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_95, (__m256i)value_58));
              sums_87 = zse_add_i16_i32x8(sums_87, pairs_10);
              totals_22 = (totals_22 + ((i32x8)_mm256_madd_epi16((__m256i)sums_82, _mm256_set1_epi16(1))));
              totals_30 = (totals_30 + ((i32x8)_mm256_madd_epi16((__m256i)sums_86, _mm256_set1_epi16(1))));
              totals_23 = (totals_23 + ((i32x8)_mm256_madd_epi16((__m256i)sums_83, _mm256_set1_epi16(1))));
              totals_31 = (totals_31 + ((i32x8)_mm256_madd_epi16((__m256i)sums_87, _mm256_set1_epi16(1))));
              f32x8 scale_2 = (*(const f32x8_mem *)(staged_5 + (((2LL * i_6) + 0LL) * 16LL)));
              f32x8 unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_13 + i_6))));
              sums_44 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_20, f32x8), unit_11, sums_44));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_14 + i_6))));
              sums_45 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_21, f32x8), unit_11, sums_45));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_15 + i_6))));
              sums_46 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_22, f32x8), unit_11, sums_46));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_16 + i_6))));
              sums_47 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_23, f32x8), unit_11, sums_47));
              scale_2 = (*(const f32x8_mem *)((staged_5 + (((2LL * i_6) + 0LL) * 16LL)) + 8LL));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_13 + i_6))));
              sums_52 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_28, f32x8), unit_11, sums_52));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_14 + i_6))));
              sums_53 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_29, f32x8), unit_11, sums_53));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_15 + i_6))));
              sums_54 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_30, f32x8), unit_11, sums_54));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_16 + i_6))));
              sums_55 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_31, f32x8), unit_11, sums_55));
              int64_t first__13 = (i_6 * 8LL);
              i32x8 totals_32 = zse_splat_i32x8(0);
              i32x8 totals_33 = zse_splat_i32x8(0);
              i32x8 totals_34 = zse_splat_i32x8(0);
              i32x8 totals_35 = zse_splat_i32x8(0);
              i32x8 totals_36 = totals_32;
              i32x8 totals_37 = totals_33;
              i32x8 totals_38 = totals_34;
              i32x8 totals_39 = totals_35;
              i32x8 totals_40 = zse_splat_i32x8(0);
              i32x8 totals_41 = zse_splat_i32x8(0);
              i32x8 totals_42 = zse_splat_i32x8(0);
              i32x8 totals_43 = zse_splat_i32x8(0);
              i32x8 totals_44 = totals_40;
              i32x8 totals_45 = totals_41;
              i32x8 totals_46 = totals_42;
              i32x8 totals_47 = totals_43;
              i32x8 sums_88 = zse_splat_i32x8(0);
              i32x8 sums_89 = zse_splat_i32x8(0);
              i32x8 sums_90 = sums_88;
              i32x8 sums_91 = sums_89;
              i32x8 sums_92 = zse_splat_i32x8(0);
              i32x8 sums_93 = zse_splat_i32x8(0);
              i32x8 sums_94 = sums_92;
              i32x8 sums_95 = sums_93;
              i32x8 w_96 = (*(const i32x8_mem *)(staged_4 + ((first__13 + 4LL) * 16LL)));
              i32x8 w_97 = (*(const i32x8_mem *)((staged_4 + ((first__13 + 4LL) * 16LL)) + 8LL));
              i32x8 value_59 = zse_splat_i32x8((*(rows_5 + 4LL)));
              i32x8 pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_96, (__m256i)value_59));
              sums_90 = pairs_11;
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_97, (__m256i)value_59));
              sums_94 = pairs_11;
              value_59 = zse_splat_i32x8((*(rows_6 + 4LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_96, (__m256i)value_59));
              sums_91 = pairs_11;
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_97, (__m256i)value_59));
              sums_95 = pairs_11;
              i32x8 w_98 = (*(const i32x8_mem *)(staged_4 + ((first__13 + 5LL) * 16LL)));
              i32x8 w_99 = (*(const i32x8_mem *)((staged_4 + ((first__13 + 5LL) * 16LL)) + 8LL));
              value_59 = zse_splat_i32x8((*(rows_5 + 5LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_98, (__m256i)value_59));
              sums_90 = zse_add_i16_i32x8(sums_90, pairs_11);
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_99, (__m256i)value_59));
              sums_94 = zse_add_i16_i32x8(sums_94, pairs_11);
              value_59 = zse_splat_i32x8((*(rows_6 + 5LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_98, (__m256i)value_59));
              sums_91 = zse_add_i16_i32x8(sums_91, pairs_11);
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_99, (__m256i)value_59));
              sums_95 = zse_add_i16_i32x8(sums_95, pairs_11);
              totals_36 = (totals_36 + ((i32x8)_mm256_madd_epi16((__m256i)sums_90, _mm256_set1_epi16(1))));
              totals_44 = (totals_44 + ((i32x8)_mm256_madd_epi16((__m256i)sums_94, _mm256_set1_epi16(1))));
              totals_37 = (totals_37 + ((i32x8)_mm256_madd_epi16((__m256i)sums_91, _mm256_set1_epi16(1))));
              totals_45 = (totals_45 + ((i32x8)_mm256_madd_epi16((__m256i)sums_95, _mm256_set1_epi16(1))));
              i32x8 sums_96 = zse_splat_i32x8(0);
              i32x8 sums_97 = zse_splat_i32x8(0);
              i32x8 sums_98 = sums_96;
              i32x8 sums_99 = sums_97;
              i32x8 sums_100 = zse_splat_i32x8(0);
              i32x8 sums_101 = zse_splat_i32x8(0);
              i32x8 sums_102 = sums_100;
              i32x8 sums_103 = sums_101;
              i32x8 w_100 = (*(const i32x8_mem *)(staged_4 + ((first__13 + 4LL) * 16LL)));
              i32x8 w_101 = (*(const i32x8_mem *)((staged_4 + ((first__13 + 4LL) * 16LL)) + 8LL));
              value_59 = zse_splat_i32x8((*(rows_7 + 4LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_100, (__m256i)value_59));
              sums_98 = pairs_11;
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_101, (__m256i)value_59));
              sums_102 = pairs_11;
              value_59 = zse_splat_i32x8((*(rows_8 + 4LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_100, (__m256i)value_59));
              sums_99 = pairs_11;
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_101, (__m256i)value_59));
              sums_103 = pairs_11;
              i32x8 w_102 = (*(const i32x8_mem *)(staged_4 + ((first__13 + 5LL) * 16LL)));
              i32x8 w_103 = (*(const i32x8_mem *)((staged_4 + ((first__13 + 5LL) * 16LL)) + 8LL));
              value_59 = zse_splat_i32x8((*(rows_7 + 5LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_102, (__m256i)value_59));
              sums_98 = zse_add_i16_i32x8(sums_98, pairs_11);
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_103, (__m256i)value_59));
              sums_102 = zse_add_i16_i32x8(sums_102, pairs_11);
              value_59 = zse_splat_i32x8((*(rows_8 + 5LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_102, (__m256i)value_59));
              sums_99 = zse_add_i16_i32x8(sums_99, pairs_11);
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_103, (__m256i)value_59));
              sums_103 = zse_add_i16_i32x8(sums_103, pairs_11);
              totals_38 = (totals_38 + ((i32x8)_mm256_madd_epi16((__m256i)sums_98, _mm256_set1_epi16(1))));
              totals_46 = (totals_46 + ((i32x8)_mm256_madd_epi16((__m256i)sums_102, _mm256_set1_epi16(1))));
              totals_39 = (totals_39 + ((i32x8)_mm256_madd_epi16((__m256i)sums_99, _mm256_set1_epi16(1))));
              totals_47 = (totals_47 + ((i32x8)_mm256_madd_epi16((__m256i)sums_103, _mm256_set1_epi16(1))));
              i32x8 sums_104 = zse_splat_i32x8(0);
              i32x8 sums_105 = zse_splat_i32x8(0);
              i32x8 sums_106 = sums_104;
              i32x8 sums_107 = sums_105;
              i32x8 sums_108 = zse_splat_i32x8(0);
              i32x8 sums_109 = zse_splat_i32x8(0);
              i32x8 sums_110 = sums_108;
              i32x8 sums_111 = sums_109;
              i32x8 w_104 = (*(const i32x8_mem *)(staged_4 + ((first__13 + 6LL) * 16LL)));
              i32x8 w_105 = (*(const i32x8_mem *)((staged_4 + ((first__13 + 6LL) * 16LL)) + 8LL));
              value_59 = zse_splat_i32x8((*(rows_5 + 6LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_104, (__m256i)value_59));
              sums_106 = pairs_11;
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_105, (__m256i)value_59));
              sums_110 = pairs_11;
              value_59 = zse_splat_i32x8((*(rows_6 + 6LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_104, (__m256i)value_59));
              sums_107 = pairs_11;
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_105, (__m256i)value_59));
              sums_111 = pairs_11;
              i32x8 w_106 = (*(const i32x8_mem *)(staged_4 + ((first__13 + 7LL) * 16LL)));
              i32x8 w_107 = (*(const i32x8_mem *)((staged_4 + ((first__13 + 7LL) * 16LL)) + 8LL));
              value_59 = zse_splat_i32x8((*(rows_5 + 7LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_106, (__m256i)value_59));
              sums_106 = zse_add_i16_i32x8(sums_106, pairs_11);
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_107, (__m256i)value_59));
              sums_110 = zse_add_i16_i32x8(sums_110, pairs_11);
              value_59 = zse_splat_i32x8((*(rows_6 + 7LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_106, (__m256i)value_59));
              sums_107 = zse_add_i16_i32x8(sums_107, pairs_11);
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_107, (__m256i)value_59));
              sums_111 = zse_add_i16_i32x8(sums_111, pairs_11);
              totals_36 = (totals_36 + ((i32x8)_mm256_madd_epi16((__m256i)sums_106, _mm256_set1_epi16(1))));
              totals_44 = (totals_44 + ((i32x8)_mm256_madd_epi16((__m256i)sums_110, _mm256_set1_epi16(1))));
              totals_37 = (totals_37 + ((i32x8)_mm256_madd_epi16((__m256i)sums_107, _mm256_set1_epi16(1))));
              totals_45 = (totals_45 + ((i32x8)_mm256_madd_epi16((__m256i)sums_111, _mm256_set1_epi16(1))));
              i32x8 sums_112 = zse_splat_i32x8(0);
              i32x8 sums_113 = zse_splat_i32x8(0);
              i32x8 sums_114 = sums_112;
              i32x8 sums_115 = sums_113;
              i32x8 sums_116 = zse_splat_i32x8(0);
              i32x8 sums_117 = zse_splat_i32x8(0);
              i32x8 sums_118 = sums_116;
              i32x8 sums_119 = sums_117;
              i32x8 w_108 = (*(const i32x8_mem *)(staged_4 + ((first__13 + 6LL) * 16LL)));
              i32x8 w_109 = (*(const i32x8_mem *)((staged_4 + ((first__13 + 6LL) * 16LL)) + 8LL));
              value_59 = zse_splat_i32x8((*(rows_7 + 6LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_108, (__m256i)value_59));
              sums_114 = pairs_11;
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_109, (__m256i)value_59));
              sums_118 = pairs_11;
              value_59 = zse_splat_i32x8((*(rows_8 + 6LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_108, (__m256i)value_59));
              sums_115 = pairs_11;
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_109, (__m256i)value_59));
              sums_119 = pairs_11;
              i32x8 w_110 = (*(const i32x8_mem *)(staged_4 + ((first__13 + 7LL) * 16LL)));
              i32x8 w_111 = (*(const i32x8_mem *)((staged_4 + ((first__13 + 7LL) * 16LL)) + 8LL));
              value_59 = zse_splat_i32x8((*(rows_7 + 7LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_110, (__m256i)value_59));
              sums_114 = zse_add_i16_i32x8(sums_114, pairs_11);
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_111, (__m256i)value_59));
              sums_118 = zse_add_i16_i32x8(sums_118, pairs_11);
              value_59 = zse_splat_i32x8((*(rows_8 + 7LL)));
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_110, (__m256i)value_59));
              sums_115 = zse_add_i16_i32x8(sums_115, pairs_11);
              pairs_11 = ((i32x8)_mm256_maddubs_epi16((__m256i)w_111, (__m256i)value_59));
              sums_119 = zse_add_i16_i32x8(sums_119, pairs_11);
              totals_38 = (totals_38 + ((i32x8)_mm256_madd_epi16((__m256i)sums_114, _mm256_set1_epi16(1))));
              totals_46 = (totals_46 + ((i32x8)_mm256_madd_epi16((__m256i)sums_118, _mm256_set1_epi16(1))));
              totals_39 = (totals_39 + ((i32x8)_mm256_madd_epi16((__m256i)sums_115, _mm256_set1_epi16(1))));
              totals_47 = (totals_47 + ((i32x8)_mm256_madd_epi16((__m256i)sums_119, _mm256_set1_epi16(1))));
              scale_2 = (*(const f32x8_mem *)(staged_5 + (((2LL * i_6) + 1LL) * 16LL)));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_13 + i_6))));
              sums_44 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_36, f32x8), unit_11, sums_44));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_14 + i_6))));
              sums_45 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_37, f32x8), unit_11, sums_45));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_15 + i_6))));
              sums_46 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_38, f32x8), unit_11, sums_46));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_16 + i_6))));
              sums_47 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_39, f32x8), unit_11, sums_47));
              scale_2 = (*(const f32x8_mem *)((staged_5 + (((2LL * i_6) + 1LL) * 16LL)) + 8LL));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_13 + i_6))));
              sums_52 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_44, f32x8), unit_11, sums_52));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_14 + i_6))));
              sums_53 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_45, f32x8), unit_11, sums_53));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_15 + i_6))));
              sums_54 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_46, f32x8), unit_11, sums_54));
              unit_11 = (scale_2 * zse_splat_f32x8((*(tokens_16 + i_6))));
              sums_55 = ((f32x8)_mm256_fmadd_ps(__builtin_convertvector(totals_47, f32x8), unit_11, sums_55));
              f32x8 offset_4 = (*(const f32x8_mem *)(staged_6 + (((2LL * i_6) + 0LL) * 16LL)));
              float total_4 = (*(tokens_17 + i_6));
              total_4 = (*(tokens_21 + i_6));
              sums_44 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_44));
              total_4 = (*(tokens_18 + i_6));
              total_4 = (*(tokens_22 + i_6));
              sums_45 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_45));
              total_4 = (*(tokens_19 + i_6));
              total_4 = (*(tokens_23 + i_6));
              sums_46 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_46));
              total_4 = (*(tokens_20 + i_6));
              total_4 = (*(tokens_24 + i_6));
              sums_47 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_47));
              offset_4 = (*(const f32x8_mem *)(staged_6 + (((2LL * i_6) + 1LL) * 16LL)));
              total_4 = (*(tokens_17 + i_6));
              total_4 = (total_4 - (*(tokens_21 + i_6)));
              sums_44 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_44));
              total_4 = (*(tokens_18 + i_6));
              total_4 = (total_4 - (*(tokens_22 + i_6)));
              sums_45 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_45));
              total_4 = (*(tokens_19 + i_6));
              total_4 = (total_4 - (*(tokens_23 + i_6)));
              sums_46 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_46));
              total_4 = (*(tokens_20 + i_6));
              total_4 = (total_4 - (*(tokens_24 + i_6)));
              sums_47 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_47));
              offset_4 = (*(const f32x8_mem *)((staged_6 + (((2LL * i_6) + 0LL) * 16LL)) + 8LL));
              total_4 = (*(tokens_17 + i_6));
              total_4 = (*(tokens_21 + i_6));
              sums_52 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_52));
              total_4 = (*(tokens_18 + i_6));
              total_4 = (*(tokens_22 + i_6));
              sums_53 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_53));
              total_4 = (*(tokens_19 + i_6));
              total_4 = (*(tokens_23 + i_6));
              sums_54 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_54));
              total_4 = (*(tokens_20 + i_6));
              total_4 = (*(tokens_24 + i_6));
              sums_55 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_55));
              offset_4 = (*(const f32x8_mem *)((staged_6 + (((2LL * i_6) + 1LL) * 16LL)) + 8LL));
              total_4 = (*(tokens_17 + i_6));
              total_4 = (total_4 - (*(tokens_21 + i_6)));
              sums_52 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_52));
              total_4 = (*(tokens_18 + i_6));
              total_4 = (total_4 - (*(tokens_22 + i_6)));
              sums_53 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_53));
              total_4 = (*(tokens_19 + i_6));
              total_4 = (total_4 - (*(tokens_23 + i_6)));
              sums_54 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_54));
              total_4 = (*(tokens_20 + i_6));
              total_4 = (total_4 - (*(tokens_24 + i_6)));
              sums_55 = ((f32x8)_mm256_fmadd_ps(offset_4, zse_splat_f32x8(total_4), sums_55));
            }
            *(f32x8_mem *)mine_5 = sums_44;
            *(f32x8_mem *)(mine_5 + 16LL) = sums_45;
            *(f32x8_mem *)(mine_5 + 32LL) = sums_46;
            *(f32x8_mem *)(mine_5 + 48LL) = sums_47;
            *(f32x8_mem *)(mine_5 + 8LL) = sums_52;
            *(f32x8_mem *)((mine_5 + 16LL) + 8LL) = sums_53;
            *(f32x8_mem *)((mine_5 + 32LL) + 8LL) = sums_54;
            *(f32x8_mem *)((mine_5 + 48LL) + 8LL) = sums_55;
            if (((first__10 + 8LL) >= num_blocks_1)) {
              int64_t at_stop_3 = zse_minimum_i64((token_3 + 4LL), token_last_1);
              for (int64_t at_3 = token_3; at_3 < at_stop_3; at_3 += 1LL) {
                f32x8 total_5 = (*(const f32x8_mem *)(mine_5 + ((at_3 - token_3) * 16LL)));
                float * out_3 = (out + (at_3 * rows));
                const float * bias_3 = (bias + (expert_4 * rows));
                int64_t row_9 = ((tile_4 * 16LL) + 0LL);
                f32x8 total_6 = total_5;
                if ((has_bias != 0LL)) {
                  if (((row_9 + 8LL) <= rows)) {
                    total_6 = (total_6 + (*(const f32x8_mem *)(bias_3 + row_9)));
                  }
                }
                if (((row_9 + 8LL) <= rows)) {
                  *(f32x8_mem *)(out_3 + row_9) = total_6;
                } else {
                  float scratch_16[16] __attribute__((aligned(64)));
                  float * spill_2 = scratch_16;
                  *(f32x8_mem *)spill_2 = total_6;
                  for (int64_t r_2 = row_9; r_2 < rows; r_2 += 1LL) {
                    if ((has_bias != 0LL)) {
                      *(out_3 + r_2) = ((*(spill_2 + (r_2 - row_9))) + (*(bias_3 + r_2)));
                    } else {
                      *(out_3 + r_2) = (*(spill_2 + (r_2 - row_9)));
                    }
                  }
                }
                total_5 = (*(const f32x8_mem *)((mine_5 + ((at_3 - token_3) * 16LL)) + 8LL));
                float * out_4 = (out + (at_3 * rows));
                const float * bias_4 = (bias + (expert_4 * rows));
                int64_t row_10 = ((tile_4 * 16LL) + 8LL);
                f32x8 total_7 = total_5;
                if ((has_bias != 0LL)) {
                  if (((row_10 + 8LL) <= rows)) {
                    total_7 = (total_7 + (*(const f32x8_mem *)(bias_4 + row_10)));
                  }
                }
                if (((row_10 + 8LL) <= rows)) {
                  *(f32x8_mem *)(out_4 + row_10) = total_7;
                } else {
                  float scratch_17[16] __attribute__((aligned(64)));
                  float * spill_3 = scratch_17;
                  *(f32x8_mem *)spill_3 = total_7;
                  for (int64_t r_3 = row_10; r_3 < rows; r_3 += 1LL) {
                    if ((has_bias != 0LL)) {
                      *(out_4 + r_3) = ((*(spill_3 + (r_3 - row_10))) + (*(bias_4 + r_3)));
                    } else {
                      *(out_4 + r_3) = (*(spill_3 + (r_3 - row_10)));
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
