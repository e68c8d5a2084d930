/* Matrix units. What a register holds comes from the layout tables that the generated text brings along. */
#include <algorithm>

#include "emulate_state.h"

namespace emulate {

enum { MMA = 20, LDMATRIX, STMATRIX, WGMMA, WGMMA_WAIT, WGMMA_FENCE, WGMMA_COMMIT };

static f32 value_of(const char *dtype, u32 bits) {
  if (dtype[0] == 'b') return zse_f32_of_bf16((bf16)bits);
  if (dtype[0] == 'e') return zse_f32_of_e4m3((e4m3)bits);
  if (dtype[1] == '1') return zse_f32_of_f16((f16)bits);
  return zse_float(bits);
}

/* The elements of one operand that the lanes of a warp hold, by their places in the matrix. */
template <class T, class Value> static void spread(const Fragment &part, i32 lane, const void *registers, f32 *matrix, i32 width, Value value) {
  const T *held = (const T *)registers;
  const u8 (*place)[2] = part.place + lane * part.per_lane;
  for (i32 i = 0; i < part.per_lane; ++i) matrix[place[i][0] * width + place[i][1]] = value(held[i]);
}

static void spread(const char *dtype, bool is_a, const Fragment &part, i32 lane, const u32 *registers, f32 *matrix, i32 width) {
  if (dtype[0] == 'b') spread<bf16>(part, lane, registers, matrix, width, zse_f32_of_bf16);
  else if (dtype[0] == 'e') spread<e4m3>(part, lane, registers, matrix, width, zse_f32_of_e4m3);
  else if (dtype[0] == 'f') spread<f16>(part, lane, registers, matrix, width, zse_f32_of_f16);
  else if (is_a) spread<u8>(part, lane, registers, matrix, width, [](u8 it) { return (f32)it; });
  else spread<i8>(part, lane, registers, matrix, width, [](i8 it) { return (f32)it; });
}

/* sums += left right, each in f64 and in the order of k. A product of two f32 is exact in f64. */
#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
static void multiply_into(f64 *__restrict__ sums, const f32 *__restrict__ left, const f32 *__restrict__ right, i32 m, i32 n, i32 depth) {
  for (i32 row = 0; row < m; ++row)
    for (i32 start = 0; start < n; start += 8) {
      f64 some[8];
      for (i32 j = 0; j < 8; ++j) some[j] = sums[row * n + start + j];
      for (i32 k = 0; k < depth; ++k)
        for (i32 j = 0; j < 8; ++j) some[j] += (f64)left[row * depth + k] * right[k * n + start + j];
      for (i32 j = 0; j < 8; ++j) sums[row * n + start + j] = some[j];
    }
}

static u32 element(const u32 *registers, i32 index, i32 bits) {
  i32 per = 32 / bits;
  u32 word = registers[index / per] >> index % per * bits;
  return bits == 32 ? word : word & ((1u << bits) - 1);
}

static Warp &whole_warp(Thread *t, const char *what) {
  if (warp_size(t) != launch->kernel->warp) fail(t, "%s in a warp of %d threads", what, warp_size(t));
  return t->state->block->warps[t->warp];
}

/* Sums are f32; of "u8s8", A unsigned and B signed bytes, the i32 are in the same places. */
void mma(Thread *t, const Mma &table, f32 *const *acc, const u32 *a, const u32 *b) {
  Warp &w = whole_warp(t, "mma");
  i32 size = launch->kernel->warp;
  bool last = arrive(t, w, size, MMA, "mma");
  struct Operands { f32 *const *acc; const u32 *a, *b; } mine{acc, a, b};
  w.data[t->lane] = &mine;
  if (!last) { wait_here(t, "mma"); return; }
  bool integers = table.dtype[0] == 'u';
  static std::vector<f32> left, right;
  static std::vector<f64> sums;
  left.resize(table.m * table.k);
  right.resize(table.k * table.n);
  sums.resize(table.m * table.n);
  auto sum_at = [&](i32 lane, i32 i) -> f64 & {
    const u8 *p = table.c.place[lane * table.c.per_lane + i];
    return sums[p[0] * table.n + p[1]];
  };
  for (i32 lane = 0; lane < size; ++lane) {
    const Operands &o = *(const Operands *)w.data[lane];
    spread(table.dtype, true, table.a, lane, o.a, left.data(), table.k);
    spread(table.dtype, false, table.b, lane, o.b, right.data(), table.n);
    for (i32 i = 0; i < table.c.per_lane; ++i) sum_at(lane, i) = integers ? *(i32 *)o.acc[i] : *o.acc[i];
  }
  multiply_into(sums.data(), left.data(), right.data(), table.m, table.n, table.k);
  for (i32 lane = 0; lane < size; ++lane) {
    const Operands &o = *(const Operands *)w.data[lane];
    for (i32 i = 0; i < table.c.per_lane; ++i) {
      if (integers) *(i32 *)o.acc[i] = (i32)sum_at(lane, i);
      else *o.acc[i] = (f32)sum_at(lane, i);
    }
  }
  leave(t, w);
}

/* The lanes' reads count as the first lane's: afterwards every lane knows that all of them are done. */
static void learn_from_first(Warp &w) {
  Thread *first = w.members[0];
  i32 own = cluster_thread(first);
  u32 clock = first->state->clock[own];
  for (Thread *other : w.members) other->state->clock[own] = std::max(other->state->clock[own], clock);
  tick(first);
}

void ldmatrix(Thread *t, const void *row, i32 count, bool transposed, u32 *const *out, const u8 (*table)[3]) {
  Warp &w = whole_warp(t, "ldmatrix()");
  bool last = arrive(t, w, 32, LDMATRIX + 8 * count + transposed, "ldmatrix()");
  w.data[t->lane] = row;
  w.values[t->lane] = (u64)out;
  if (!last) { wait_here(t, "ldmatrix()"); return; }
  Thread *first = w.members[0];
  u16 rows[4][8][8];
  for (i32 m = 0; m < count; ++m)
    for (i32 r = 0; r < 8; ++r) {
      check_shared_read(first, w.data[m * 8 + r], 16);
      memcpy(rows[m][r], w.data[m * 8 + r], 16);
    }
  for (i32 lane = 0; lane < 32; ++lane)
    for (i32 i = 0; i < count; ++i) {
      u32 word = 0;
      for (i32 half = 0; half < 2; ++half) {
        const u8 *p = table[(lane * 4 + i) * 2 + half];
        word |= (u32)rows[p[0]][p[1]][p[2]] << 16 * half;
      }
      *((u32 *const *)w.values[lane])[i] = word;
    }
  learn_from_first(w);
  leave(t, w);
}

void stmatrix(Thread *t, void *row, i32 count, bool transposed, const u32 *values, const u8 (*table)[3]) {
  Warp &w = whole_warp(t, "stmatrix()");
  bool last = arrive(t, w, 32, STMATRIX + 8 * count + transposed, "stmatrix()");
  w.data[t->lane] = row;
  w.values[t->lane] = (u64)values;
  if (!last) { wait_here(t, "stmatrix()"); return; }
  u16 rows[4][8][8];
  for (i32 lane = 0; lane < 32; ++lane)
    for (i32 i = 0; i < count; ++i)
      for (i32 half = 0; half < 2; ++half) {
        const u8 *p = table[(lane * 4 + i) * 2 + half];
        rows[p[0]][p[1]][p[2]] = (u16)(((const u32 *)w.values[lane])[i] >> 16 * half);
      }
  for (i32 m = 0; m < count; ++m)
    for (i32 r = 0; r < 8; ++r) {
      check_shared_write(w.members[m * 8 + r], (void *)w.data[m * 8 + r], 16);
      memcpy((void *)w.data[m * 8 + r], rows[m][r], 16);
    }
  leave(t, w);
}

/* wgmma ----------------------------------------------------------------------------------------------------------- */

static Group &group_of(Thread *t, const char *what) {
  if (launch->kernel->threads - t->index / 128 * 128 < 128) fail(t, "%s needs four whole warps", what);
  return t->state->block->groups[t->index / 128];
}

static const char *const DTYPES[] = {"bf16", "f16", "e4m3"};

/* An operand's element at (row of M or N, k) through its descriptor. */
struct Operand {
  const Product &one;
  u64 descriptor;
  bool transposed;
  u32 offset(i32 row, i32 k, i32 bytes) const {
    u32 start = (u32)(descriptor & 0x3fff) << 4, leading = (u32)(descriptor >> 16 & 0x3fff) << 4, stride = (u32)(descriptor >> 32 & 0x3fff) << 4;
    u32 swizzle = (u32[]){0, 128, 64, 32}[descriptor >> 62];
    u32 mask = swizzle == 128 ? 7 : swizzle == 64 ? 3 : swizzle == 32 ? 1 : 0, at;
    if (!transposed && swizzle) at = start + row / 8 * stride + row % 8 * swizzle + k * bytes;
    else if (!transposed) at = start + row / 8 * stride + k * bytes / 16 * leading + row % 8 * 16 + k * bytes % 16;
    else {
      i32 wide = swizzle / bytes;
      at = start + row / wide * leading + k / 8 * stride + k % 8 * swizzle + row % wide * bytes;
    }
    return at ^ (at >> 7 & mask) << 4;
  }
};

template <class T, class Value> static void values(const T *from, i32 count, f32 *into, i32 step, Value value) {
  for (i32 i = 0; i < count; ++i) into[i * step] = value(from[i]);
}

static void multiply(Product &p) {
  Block *block = p.leader->state->block;
  i32 bytes = p.dtype == 2 ? 1 : 2, depth = p.dtype == 2 ? 32 : 16;
  if ((p.trans_a && !(p.a >> 62)) || (p.trans_b && !(p.b >> 62))) {
    p.leader->at = p.at;
    fail(p.leader, "wgmma of a transposed operand without a swizzle is not emulated");
  }
  std::vector<f32> a(64 * depth), b(p.n * depth);
  /* 16 bytes lie together: elements of one row after each other, or transposed, of one k. */
  auto fetch = [&](const Operand &operand, i32 rows, f32 *into, i32 row_step, i32 k_step) {
    i32 per = 16 / bytes;
    for (i32 row = 0; row < rows; row += operand.transposed ? per : 1)
      for (i32 k = 0; k < depth; k += operand.transposed ? 1 : per) {
        u32 offset = operand.offset(row, k, bytes);
        engine_reads(block, offset, 16, p.clock, p.epoch, p.at, p.leader, "wgmma");
        f32 *first = into + row * row_step + k * k_step;
        i32 step = operand.transposed ? row_step : k_step;
        if (p.dtype == 2) values(block->shared + offset, per, first, step, zse_f32_of_e4m3);
        else if (p.dtype == 1) values((const f16 *)(block->shared + offset), per, first, step, zse_f32_of_f16);
        else values((const bf16 *)(block->shared + offset), per, first, step, zse_f32_of_bf16);
      }
  };
  if (!p.in_registers) fetch(Operand{p, p.a, p.trans_a}, 64, a.data(), depth, 1);
  fetch(Operand{p, p.b, p.trans_b}, p.n, b.data(), 1, p.n);
  for (i32 thread = 0; thread < 128 && p.in_registers; ++thread)
    for (i32 i = 0; i < 16 / bytes; ++i) {
      i32 per = 4 / bytes, r = i / per, lane = thread % 32;
      i32 row = thread / 32 * 16 + lane / 4 + 8 * (r % 2), k = lane % 4 * per + i % per + depth / 2 * (r / 2);
      a[row * depth + k] = value_of(DTYPES[p.dtype], element(&p.registers[thread * 4], i, bytes * 8));
    }
  std::vector<f64> sums(64 * p.n);
  auto sum_at = [&](i32 thread, i32 i) -> f64 & {
    i32 lane = thread % 32, row = thread / 32 * 16 + lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + lane % 4 * 2 + i % 2;
    return sums[row * p.n + column];
  };
  for (i32 thread = 0; thread < 128 && p.accumulate; ++thread)
    for (i32 i = 0; i < p.n / 2; ++i) sum_at(thread, i) = p.acc->values[thread][i];
  multiply_into(sums.data(), a.data(), b.data(), 64, p.n, depth);
  for (i32 thread = 0; thread < 128; ++thread)
    for (i32 i = 0; i < p.n / 2; ++i) p.acc->values[thread][i] = (f32)sum_at(thread, i);
}

void wgmma(Thread *t, i32 dtype, f32 *const *acc, i32 n, const u32 *a_registers, u64 a, u64 b, bool accumulate, bool trans_a, bool trans_b) {
  Group &g = group_of(t, "wgmma");
  bool last = arrive(t, g, 128, WGMMA, "wgmma");
  struct Operands { f32 *const *acc; const u32 *a; } mine{acc, a_registers};
  g.data[t->index % 128] = &mine;
  g.values[t->index % 128] = b ^ (u64)accumulate << 61 ^ a * 31;
  if (!last) { wait_here(t, "wgmma"); return; }
  Thread *leader = g.members[0];
  for (i32 i = 0; i < 128; ++i)
    if (!a_registers && g.values[i] != g.values[0]) fail(g.members[i], "the threads of a warpgroup give wgmma different descriptors");
  f32 *key = ((const Operands *)g.data[0])->acc[0];
  std::shared_ptr<Accumulator> &accumulator = g.accumulators[key];
  if (!accumulator) {
    if (!g.fenced) fail(t, "wgmma without wgmma_fence() since its registers were touched");
    accumulator = std::make_shared<Accumulator>();
    for (i32 i = 0; i < 128; ++i) {
      f32 *const *places = ((const Operands *)g.data[i])->acc;
      accumulator->places.emplace_back(places, places + n / 2);
      accumulator->values.emplace_back();
      for (f32 *p : accumulator->places.back()) { accumulator->values.back().push_back(*p); *p = zse_float(0x7fffffffu); }
    }
  }
  if ((i32)accumulator->values[0].size() != n / 2) fail(t, "wgmma of n = %d with accumulators of n = %zu in flight", n, accumulator->values[0].size() * 2);
  ++accumulator->users;
  Product one{accumulator, dtype, n, a_registers != nullptr, accumulate, trans_a, trans_b, {}, a, b, snapshot(t), leader->state->block->epoch, t->at, leader};
  one.clock = snapshot(leader);
  for (i32 i = 0; i < 128; ++i) {
    join_thread(one.clock, g.members[i]);
    for (i32 r = 0; r < 4 && a_registers; ++r) one.registers.push_back(((const Operands *)g.data[i])->a[r]);
  }
  g.open.push_back(std::move(one));
  leave(t, g);
}

static void group_step(Thread *t, Group &g, i32 kind, const char *doing, void (*work)(Thread *, Group &, i32), i32 argument) {
  if (!arrive(t, g, 128, kind, doing)) { wait_here(t, doing); return; }
  work(t, g, argument);
  leave(t, g);
}

void wgmma_fence(Thread *t) {
  group_step(t, group_of(t, "wgmma_fence()"), WGMMA_FENCE, "wgmma_fence()", [](Thread *, Group &g, i32) { g.fenced = true; }, 0);
}

void wgmma_commit(Thread *t) {
  group_step(t, group_of(t, "wgmma_commit()"), WGMMA_COMMIT, "wgmma_commit()", [](Thread *, Group &g, i32) {
    g.closed.push_back(std::move(g.open));
    g.open.clear();
  }, 0);
}

void wgmma_wait(Thread *t, i32 groups) {
  group_step(t, group_of(t, "wgmma_wait()"), WGMMA_WAIT, "wgmma_wait()", [](Thread *, Group &g, i32 left) {
    while ((i32)g.closed.size() > left) {
      for (Product &p : g.closed.front()) {
        multiply(p);
        /* the whole warpgroup knows now that the operands have been read */
        i32 own = cluster_thread(p.leader);
        for (Thread *other : g.members) other->state->clock[own] = std::max(other->state->clock[own], p.clock[own]);
        if (--p.acc->users == 0) {
          for (i32 i = 0; i < 128; ++i)
            for (size_t k = 0; k < p.acc->places[i].size(); ++k) *p.acc->places[i][k] = p.acc->values[i][k];
          for (auto found = g.accumulators.begin(); found != g.accumulators.end(); ++found)
            if (found->second == p.acc) { g.accumulators.erase(found); break; }
        }
      }
      g.closed.pop_front();
    }
    if (g.closed.empty() && g.open.empty()) g.fenced = false;
    if (!g.members.empty()) tick(g.members[0]);
  }, groups);
}

}  /* namespace emulate */
