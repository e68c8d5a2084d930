/* Copies that run beside the threads: cp.async, mbarriers, bulk copies, tensor maps. A copy in flight leaves its destination poisoned
 * and is done some time between its issue and the wait, as the seed has it. */
#include <algorithm>

#include "emulate_state.h"

namespace emulate {

/* Accesses of natural alignment to `size` bytes. */
static void access_pieces(Thread *t, u64 address, i32 size, bool write) {
  for (i32 k = 0; k < size; ) {
    i32 piece = 16;
    while (piece > size - k || (address + k) % piece) piece /= 2;
    global_access(t, address + k, piece, write, false);
    k += piece;
  }
}

/* The destination may be overwritten now, and is in flight from here on. */
static void claim(Thread *t, Block *block, u32 offset, u32 size, const char *verb) {
  Access now = access_of(t);
  u32 step = touch(block, offset, size);
  for (u32 k = offset; k < offset + size; k += step) {
    Cell &c = block->cells.at(k, step);
    if (c.state == OUTSIDE) fail(t, "%s shared memory outside of the arrays (offset %u)", verb, k);
    if (c.state == MBARRIER) fail(t, "%s an mbarrier (offset %u of shared memory)", verb, k);
    if (c.state == IN_FLIGHT) fail(t, "%s shared memory into which the copy of %s is in flight (offset %u)", verb, place(c.write.at), k);
    if (c.write.valid && !ordered(t, c.write))
      fail(t, "race: %s what %s wrote at %s, no barrier between (offset %u of shared memory)", verb, who(c.write).c_str(),
           place(c.write.at), k);
    for (Access &read : c.read)
      if (read.valid && !ordered(t, read))
        fail(t, "race: %s what %s reads at %s, no barrier between (offset %u of shared memory)", verb, who(read).c_str(),
             place(read.at), k);
    c.write = now;
    c.read[0].valid = c.read[1].valid = false;
    c.state = IN_FLIGHT;
    c.generic = true;
    c.atomic = false;
  }
  memset(block->shared + offset, 0xff, size);
}

static void land(Block *block, const Copy &copy, u32 offset, const Access &by, bool generic) {
  if (copy.src) memcpy(block->shared + offset, copy.src, copy.valid);
  memset(block->shared + offset + (copy.src ? copy.valid : 0), 0, copy.size - (copy.src ? copy.valid : 0));
  u32 step = touch(block, offset, copy.size);
  for (u32 k = offset; k < offset + (u32)copy.size; k += step) {
    Cell &c = block->cells.at(k, step);
    c.write = by;
    c.state = WRITTEN;
    c.generic = generic;
  }
}

/* cp.async -------------------------------------------------------------------------------------------------------- */

void copy_async(Thread *t, void *dst, const void *src, i32 size, i32 valid) {
  if (valid < 0 || valid > size) fail(t, "copy_async() of %d bytes with %d valid", size, valid);
  u32 offset = shared_offset(t, dst, size, "copies");
  if (valid) {
    if ((u64)src % size) fail(t, "copy_async() of %d bytes from an address that is no multiple of it", size);
    access_pieces(t, (u64)src, valid, false);
  }
  claim(t, t->state->block, offset, size, "copies into");
  t->state->open.push_back(Copy{(u8 *)dst, (const u8 *)src, size, valid, t->at});
}

void copy_commit(Thread *t) {
  t->state->groups.push_back(std::move(t->state->open));
  t->state->open.clear();
}

void finish_copies(Thread *t, size_t groups) {
  auto &all = t->state->groups;
  while (all.size() > groups) {
    for (Copy &copy : all.front()) {
      Access by = access_of(t);
      by.at = copy.at;
      land(t->state->block, copy, (u32)(copy.dst - t->shared), by, true);
    }
    all.erase(all.begin());
  }
}

void copy_wait(Thread *t, i32 groups) { finish_copies(t, groups); if (random_below(2)) spin(t, "copy_wait()"); }

/* mbarriers ------------------------------------------------------------------------------------------------------- */

static MBarrierState &barrier_at(Thread *t, Block *block, u32 offset, const char *verb) {
  auto found = block->mbarriers.find(offset);
  if (found == block->mbarriers.end()) fail(t, "%s an mbarrier that has not been initialised (offset %u of shared memory)", verb, offset);
  Cell &c = block->cells.at(offset, touch(block, offset, 8));
  if (!ordered(t, c.write)) fail(t, "%s an mbarrier whose init at %s no barrier has published", verb, place(c.write.at));
  return found->second;
}

void mbarrier_init(Thread *t, u64 *barrier, i32 count) {
  u32 offset = shared_offset(t, barrier, 8, "initialises");
  Block *block = t->state->block;
  if (count < 1 || count > (1 << 20) - 1) fail(t, "an mbarrier of %d arrivals", count);
  u32 step = touch(block, offset, 8);
  for (u32 k = offset; k < offset + 8; k += step) {
    Cell &c = block->cells.at(k, step);
    if (c.write.valid && !ordered(t, c.write)) fail(t, "race: initialises an mbarrier that thread %d wrote at %s", c.write.thread % launch->kernel->threads, place(c.write.at));
    c.write = access_of(t);
    c.state = MBARRIER;
  }
  block->mbarriers[offset] = MBarrierState{count, count, 0, 0, false, Clock(), Clock()};
}

void mbarrier_init_fence(Thread *t) { for (auto &item : t->state->block->mbarriers) item.second.fenced = true; }

static void complete(MBarrierState &b) {
  if (b.pending || b.bytes) return;
  ++b.phase;
  b.pending = b.expected;
  b.done = b.arriving;
}

/* Threads that wait for an mbarrier poll it: a try_wait of the hardware gives up after some time as well. */
void mbarrier_wait(Thread *t, u64 *barrier, i32 parity) {
  u32 offset = shared_offset(t, barrier, 8, "waits for");
  Block *block = t->state->block;
  barrier_at(t, block, offset, "waits for");
  while ((i32)(block->mbarriers[offset].phase & 1) == (parity & 1)) spin(t, "mbarrier_wait()");
  join(t->state->clock, block->mbarriers[offset].done);
}

static void arrive_once(Thread *t, Block *block, u32 offset, const Clock &clock, i32 bytes) {
  MBarrierState &b = barrier_at(t, block, offset, "arrives at");
  if (b.pending <= 0) fail(t, "arrives at an mbarrier of %d arrivals once more", b.expected);
  join(b.arriving, clock);
  b.bytes += bytes;
  --b.pending;
  complete(b);
}

void mbarrier_arrive(Thread *t, u64 *barrier, i32 rank, i32 bytes) {
  u32 offset = shared_offset(t, barrier, 8, "arrives at");
  Block *block = t->state->block;
  if (rank >= 0) {
    if (rank >= launch->kernel->cluster) fail(t, "arrives at block %d of a cluster of %d", rank, launch->kernel->cluster);
    block = block->cluster->blocks[rank];
    if (!block->mbarriers.count(offset) || !block->mbarriers[offset].fenced) fail(t, "arrives at another block's mbarrier without mbarrier_init_fence() there");
  }
  arrive_once(t, block, offset, snapshot(t), bytes);
  tick(t);
}

/* the copy engine ------------------------------------------------------------------------------------------------- */

static void check_engine_barrier(Thread *t, Block *block, u32 offset) {
  if (!barrier_at(t, block, offset, "copies to").fenced) fail(t, "a bulk copy to an mbarrier without mbarrier_init_fence() after its init");
}

void copy_arrive(Thread *t, u64 *barrier) {
  u32 offset = shared_offset(t, barrier, 8, "arrives at");
  ThreadState *state = t->state;
  barrier_at(t, state->block, offset, "arrives at");
  Pending one{state->block, t, snapshot(t), state->block->epoch, t->at, {}, {state->block}, offset, 0, true};
  for (auto &group : state->groups) for (Copy &copy : group) one.copies.push_back(copy);
  for (Copy &copy : state->open) one.copies.push_back(copy);
  for (auto &group : state->groups) group.clear();
  state->open.clear();
  launch->pending.push_back(std::move(one));
  tick(t);
}

void run_pending() {
  size_t pick = random_below((u32)launch->pending.size());
  Pending one = std::move(launch->pending[pick]);
  launch->pending.erase(launch->pending.begin() + pick);
  const Kernel *kernel = launch->kernel;
  i32 engine = kernel->threads * kernel->cluster + one.block->rank;
  Access by{0, ++one.block->engine, one.at, (u16)engine, true};
  one.clock[engine + kernel->cluster] = by.clock;
  for (Block *target : one.targets) {
    for (Copy &copy : one.copies) land(target, copy, (u32)(copy.dst - one.block->shared), by, one.arrives);
    MBarrierState &b = target->mbarriers[one.barrier];
    join(b.arriving, one.clock);
    if (one.arrives) {
      if (b.pending <= 0) { launch->failed = true; launch->message = std::string(place(one.at)) + ": arrives at an mbarrier once more than it expects"; return; }
      --b.pending;
    } else {
      b.bytes -= one.bytes;
    }
    complete(b);
  }
}

void bulk_copy(Thread *t, void *dst, const void *src, i32 size, u64 *barrier) {
  if (size <= 0 || size % 16 || (u64)src % 16) fail(t, "bulk_copy() of %d bytes from %#llx: multiples of 16", size, (u64)src);
  u32 offset = shared_offset(t, dst, size, "copies"), at = shared_offset(t, barrier, 8, "copies to");
  for (i32 k = 0; k < size; k += 16) global_access(t, (u64)src + k, 16, false, false);
  Block *block = t->state->block;
  check_engine_barrier(t, block, at);
  claim(t, block, offset, size, "copies into");
  launch->pending.push_back(Pending{block, t, snapshot(t), block->epoch, t->at, {Copy{(u8 *)dst, (const u8 *)src, size, size, t->at}},
                                    {block}, at, size, false});
  tick(t);
}

static u32 swizzled(u32 offset, u32 swizzle) {
  u32 mask = swizzle == 128 ? 7 : swizzle == 64 ? 3 : swizzle == 32 ? 1 : 0;
  return offset ^ (offset >> 7 & mask) << 4;
}

/* Every element of the box: (offset in the tile, address in global memory or 0 outside the tensor). */
template <class F> static void each(Thread *t, const TensorMap &map, i32 rank, const i32 *coords, u32 tile, F visit) {
  if ((i32)map.rank != rank) fail(t, "%d coordinates for a tensor map of %u dimensions", rank, map.rank);
  if (tile % (map.swizzle ? 8 * map.swizzle : 128)) fail(t, "the tile of a tensor map with a swizzle of %u bytes starts at offset %u of shared memory, no multiple of %u", map.swizzle, tile, map.swizzle ? 8 * map.swizzle : 128);
  u64 count = 1;
  for (i32 d = 0; d < rank; ++d) count *= map.box[d];
  for (u64 i = 0; i < count; ++i) {
    u64 rest = i, address = map.base;
    bool inside = true;
    for (i32 d = 0; d < rank; ++d) {
      i64 at = coords[d] + (i64)(rest % map.box[d]);
      rest /= map.box[d];
      inside = inside && at >= 0 && at < (i64)map.dims[d];
      address += at * (d ? map.strides[d - 1] : map.element);
    }
    u32 offset = swizzled(tile + (u32)(i * map.element), map.swizzle);
    visit(offset, inside ? address : 0);
  }
}

/* A piece of a copy: with the one before it, where both of its sides go on. */
static void add_piece(std::vector<Copy> &copies, u8 *dst, const u8 *src, i32 size, u32 at) {
  if (!copies.empty()) {
    Copy &last = copies.back();
    if (last.dst + last.size == dst && (src ? last.src && last.src + last.size == src : !last.src)) {
      last.size += size;
      last.valid += size;
      return;
    }
  }
  copies.push_back(Copy{dst, src, size, size, at});
}

static u32 box_bytes(const TensorMap &map) {
  u32 bytes = map.element;
  for (u32 d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

void tma_load(Thread *t, void *dst, const TensorMap &map, u64 *barrier, i32 rank, const i32 *coords, i32 multicast) {
  Block *block = t->state->block;
  u32 bytes = box_bytes(map), offset = shared_offset(t, dst, bytes, "copies"), at = shared_offset(t, barrier, 8, "copies to");
  Pending one{block, t, snapshot(t), block->epoch, t->at, {}, {}, at, (i32)bytes, false};
  for (Block *other : block->cluster->blocks)
    if (multicast < 0 ? other == block : multicast >> other->rank & 1) one.targets.push_back(other);
  for (Block *other : one.targets) {
    check_engine_barrier(t, other, at);
    claim(t, other, offset, bytes, "copies into");
  }
  each(t, map, rank, coords, offset, [&](u32 where, u64 address) {
    add_piece(one.copies, t->shared + where, (const u8 *)address, (i32)map.element, t->at);
  });
  for (Copy &copy : one.copies) if (copy.src) access_pieces(t, (u64)copy.src, copy.size, false);
  launch->pending.push_back(std::move(one));
  tick(t);
}

/* Stores read shared memory when they are waited for, or already at their issue, as the seed has it. */
static void store_now(Thread *t, Store &store) {
  Block *block = t->state->block;
  for (Copy &copy : store.copies) {
    engine_reads(block, (u32)(copy.src - t->shared), copy.size, store.clock, store.epoch, store.at, t, "the copy engine");
    u32 before = t->at;
    t->at = store.at;
    access_pieces(t, (u64)copy.dst, copy.size, true);
    t->at = before;
    memcpy(copy.dst, copy.src, copy.size);
  }
}

static void add_store(Thread *t, Store store) {
  if (random_below(2)) { store_now(t, store); store.copies.clear(); }
  t->state->stores.push_back(std::move(store));
  tick(t);
}

void bulk_store(Thread *t, void *dst, const void *src, i32 size) {
  if (size <= 0 || size % 16 || (u64)dst % 16) fail(t, "bulk_store() of %d bytes to %#llx: multiples of 16", size, (u64)dst);
  shared_offset(t, src, size, "copies");
  find(t, (u64)dst, size, "writes");
  add_store(t, Store{{Copy{(u8 *)dst, (const u8 *)src, size, size, t->at}}, snapshot(t), t->state->block->epoch, t->at});
}

void tma_store(Thread *t, const TensorMap &map, const void *src, i32 rank, const i32 *coords) {
  u32 offset = shared_offset(t, src, box_bytes(map), "copies");
  Store store{{}, snapshot(t), t->state->block->epoch, t->at};
  each(t, map, rank, coords, offset, [&](u32 where, u64 address) {
    if (address) add_piece(store.copies, (u8 *)address, t->shared + where, (i32)map.element, t->at);
  });
  add_store(t, std::move(store));
}

void bulk_commit(Thread *t) {
  t->state->store_groups.push_back(std::move(t->state->stores));
  t->state->stores.clear();
}

void finish_stores(Thread *t, size_t groups) {
  auto &all = t->state->store_groups;
  while (all.size() > groups) {
    for (Store &store : all.front()) store_now(t, store);
    all.erase(all.begin());
  }
}

void bulk_wait(Thread *t, i32 groups) { finish_stores(t, groups); }

}  /* namespace emulate */
