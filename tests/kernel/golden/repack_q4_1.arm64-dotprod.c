#include <math.h>
#include <stdint.h>
#include <arm_neon.h>
typedef union { uint64_t slot; float f32; double f64; } zse_slot;

typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4_mem __attribute__((vector_size(16), aligned(1), may_alias));


/* zse/kernels/repack.py: repack_affine(KIND=Q4_1, SCALE=u16, CODED=False) */
void repack_q4_1(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {
  const uint8_t *const src = (const uint8_t *)(uintptr_t)args[0];
  int32_t *const q = (int32_t *)(uintptr_t)args[1];
  uint16_t *const scale = (uint16_t *)(uintptr_t)args[3];
  uint16_t *const offset = (uint16_t *)(uintptr_t)args[4];
  const int32_t *const order = (const int32_t *)(uintptr_t)args[6];
  int64_t const row_bytes = (int64_t)args[7];
  int64_t const rows = (int64_t)args[8];
  int64_t const blocks = (int64_t)args[9];
  int64_t const has_order = (int64_t)args[10];
  int64_t const unit = (int64_t)args[11];
  for (int64_t block = first; block < last; ++block) {
    const int64_t block_0 = block % grid[0];
    int64_t tile = block_0;
    int32_t * q_tile = (q + ((tile * blocks) * 64LL));
    uint16_t * scale_tile = (scale + ((tile * blocks) * 16LL));
    uint16_t * offset_tile = (offset + ((tile * blocks) * 16LL));
    for (int64_t r = 0LL; r < 16LL; r += 1LL) {
      int64_t place = ((tile * 16LL) + r);
      if ((place < rows)) {
        int64_t row = place;
        if ((has_order != 0LL)) {
          row = (((place / unit) * unit) + ((int64_t)(*(order + (place % unit)))));
        }
        const uint8_t * row_src = (src + (row * row_bytes));
        int64_t block_stop = (blocks / 1LL);
        for (int64_t block_ = 0LL; block_ < block_stop; block_ += 1LL) {
          const uint8_t * p = (row_src + (block_ * 20LL));
          const uint16_t * halves = ((const uint16_t *)p);
          *(scale_tile + ((block_ * 16LL) + r)) = (*halves);
          *(offset_tile + ((block_ * 16LL) + r)) = (*(halves + 1LL));
          i32x4 v = (*(const i32x4_mem *)((const int32_t *)(p + 4LL)));
          int64_t index = ((block_ * 4LL) + 0LL);
          int32_t value = v[0];
          *(q_tile + ((index * 16LL) + r)) = value;
          int64_t index_1 = ((block_ * 4LL) + 1LL);
          int32_t value_1 = v[1];
          *(q_tile + ((index_1 * 16LL) + r)) = value_1;
          int64_t index_2 = ((block_ * 4LL) + 2LL);
          int32_t value_2 = v[2];
          *(q_tile + ((index_2 * 16LL) + r)) = value_2;
          int64_t index_3 = ((block_ * 4LL) + 3LL);
          int32_t value_3 = v[3];
          *(q_tile + ((index_3 * 16LL) + r)) = value_3;
        }
      } else {
        for (int64_t block__1 = 0LL; block__1 < blocks; block__1 += 1LL) {
          int64_t index_4 = ((block__1 * 4LL) + 0LL);
          *(q_tile + ((index_4 * 16LL) + r)) = 0;
          int64_t index_5 = ((block__1 * 4LL) + 1LL);
          *(q_tile + ((index_5 * 16LL) + r)) = 0;
          int64_t index_6 = ((block__1 * 4LL) + 2LL);
          *(q_tile + ((index_6 * 16LL) + r)) = 0;
          int64_t index_7 = ((block__1 * 4LL) + 3LL);
          *(q_tile + ((index_7 * 16LL) + r)) = 0;
          *(scale_tile + ((((block__1 * 1LL) + 0LL) * 16LL) + r)) = 0;
          *(offset_tile + ((((block__1 * 1LL) + 0LL) * 16LL) + r)) = 0;
        }
      }
    }
  }
}
