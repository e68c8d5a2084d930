/* Clocks, shared memory, barriers, atomics, warp exchange. */
#include <algorithm>

#include "emulate_state.h"

namespace emulate {

#if defined(__x86_64__)
__attribute__((target_clones("avx2", "sse4.1", "default")))     /* the first two have a maximum of eight and four clocks */
#endif
void join(Clock &into, const Clock &from) {
  if (into.size() < from.size()) into.resize(from.size());
  u32 *__restrict__ known = into.data();
  const u32 *__restrict__ told = from.data();
  for (size_t i = 0, n = from.size(); i < n; ++i) known[i] = known[i] > told[i] ? known[i] : told[i];
}

void join_thread(Clock &into, Thread *t) {
  join(into, t->state->clock);
  u32 &epoch = into[launch->kernel->threads * launch->kernel->cluster + t->rank];
  epoch = std::max(epoch, t->state->block->epoch);
}

Clock snapshot(Thread *t) {
  Clock clock = t->state->clock;
  clock[launch->kernel->threads * launch->kernel->cluster + t->rank] = t->state->block->epoch;
  return clock;
}

void tick(Thread *t) { ++t->state->clock[cluster_thread(t)]; }

std::string who(const Access &access) {
  i32 threads = launch->kernel->threads;
  return access.thread >= threads * launch->kernel->cluster ? "a copy" : "thread " + std::to_string(access.thread % threads);
}

/* shared memory --------------------------------------------------------------------------------------------------- */

u32 shared_offset(Thread *t, const void *p, u32 size, const char *verb) {
  i64 offset = (const u8 *)p - t->shared;
  i64 total = (i64)launch->kernel->shared_bytes;
  if (offset < 0 || offset + size > total)
    fail(t, "%s %u bytes at offset %lld of shared memory, which has %lld bytes", verb, size, offset, total);
  u32 align = size < 16 ? size : 16;
  if (align && offset % align) fail(t, "%s %u bytes of shared memory at offset %lld, no multiple of %u", verb, size, offset, align);
  return (u32)offset;
}

static void shared_access(Thread *t, const void *p, u32 size, bool write, bool is_atomic) {
  const char *verb = is_atomic ? "atomically changes" : write ? "writes" : "reads";
  if (++t->state->accesses > zse_emulate_longest) fail(t, "runs on and on: a loop without an end?");
  u32 offset = shared_offset(t, p, size, verb);
  Block *block = t->state->block;
  Access now = access_of(t);
  u32 step = touch(block, offset, size);
  for (u32 k = 0; k < size; k += step) {
    Cell &c = block->cells.at(offset + k, step);
    if (c.state == OUTSIDE) fail(t, "%s shared memory outside of the arrays (offset %u)", verb, offset + k);
    if (c.state == MBARRIER) fail(t, "%s an mbarrier (offset %u of shared memory)", verb, offset + k);
    if (c.state == IN_FLIGHT) fail(t, "%s shared memory while the copy of %s into it has not been waited for (offset %u)", verb, place(c.write.at), offset + k);
    if (c.state == UNWRITTEN && launch->initialised && (!write || is_atomic)) fail(t, "%s shared memory that nothing has written (offset %u)", verb, offset + k);
    if (c.write.valid && !(is_atomic && c.atomic) && !ordered(t, c.write))
      fail(t, "race: %s what %s wrote at %s, no barrier between (offset %u of shared memory)", verb, who(c.write).c_str(),
           place(c.write.at), offset + k);
    if (write) {
      if (!is_atomic || !c.atomic)
        for (Access &read : c.read)
          if (read.valid && !ordered(t, read))
            fail(t, "race: %s what %s reads at %s, no barrier between (offset %u of shared memory)", verb, who(read).c_str(),
                 place(read.at), offset + k);
      c.write = now;
      c.read[0].valid = c.read[1].valid = false;
      c.state = WRITTEN;
      c.generic = true;
      c.atomic = is_atomic;
    } else {
      Access &first = c.read[0], &second = c.read[1];
      if (!first.valid || first.thread == now.thread || ordered(t, first)) first = now;
      else second = now;
    }
  }
}

void check_shared_read(Thread *t, const void *p, u32 size) { shared_access(t, p, size, false, false); }
void check_shared_write(Thread *t, void *p, u32 size) { shared_access(t, p, size, true, false); }

void engine_reads(Block *block, u32 offset, u32 size, const Clock &clock, u32 epoch, u32 at, Thread *reader, const char *what) {
  i32 threads = launch->kernel->threads;
  u32 total = (u32)launch->kernel->shared_bytes;
  u32 before = reader->at;
  reader->at = at;
  if (offset + size > total) fail(reader, "%s reads %u bytes at offset %u of shared memory, which has %u bytes", what, size, offset, total);
  i32 own = cluster_thread(reader);
  u32 step = touch(block, offset, size);
  for (u32 k = offset; k < offset + size; k += step) {
    Cell &c = block->cells.at(k, step);
    if (c.state == OUTSIDE) fail(reader, "%s reads shared memory outside of the arrays (offset %u)", what, k);
    if (c.state == IN_FLIGHT) fail(reader, "%s reads shared memory while the copy of %s into it is in flight (offset %u)", what, place(c.write.at), k);
    if (c.write.valid) {
      if (!ordered_clock(block, clock, epoch, c.write))
        fail(reader, "race: %s reads what %s wrote at %s, no barrier between (offset %u of shared memory)", what,
             who(c.write).c_str(), place(c.write.at), k);
      if (c.generic) {
        Block *writer = block->cluster->blocks[c.write.thread / threads];
        if (writer->states[c.write.thread % threads].async_fence < c.write.clock)
          fail(reader, "%s reads what was written at %s without fence_async() after it (offset %u of shared memory)", what, place(c.write.at), k);
      }
    }
    Access now{epoch, clock[own], at, (u16)own, true};
    if (!c.read[0].valid || c.read[0].thread == now.thread || ordered_clock(block, clock, epoch, c.read[0])) c.read[0] = now;
    else c.read[1] = now;
  }
  reader->at = before;
}

/* barriers -------------------------------------------------------------------------------------------------------- */

static void merge(std::vector<Thread *> &threads) {
  Clock all;
  for (Thread *t : threads) join_thread(all, t);
  for (Thread *t : threads) { t->state->clock = all; tick(t); }
}

void barrier(Thread *t) {
  Block *block = t->state->block;
  Barrier &b = block->whole;
  b.waiting.push_back(t);
  if ((i32)b.waiting.size() < launch->kernel->threads) { wait_here(t, "barrier()"); return; }
  if (launch->kernel->cluster > 1) merge(b.waiting);
  ++block->epoch;
  wake(b.waiting, t);
  b.waiting.clear();
}

void cluster_barrier(Thread *t) {
  Cluster *cluster = t->state->block->cluster;
  cluster->waiting.push_back(t);
  if ((i32)cluster->waiting.size() < launch->kernel->threads * launch->kernel->cluster) { wait_here(t, "cluster_barrier()"); return; }
  for (Block *block : cluster->blocks) ++block->epoch;
  i32 first = launch->kernel->threads * launch->kernel->cluster;
  for (Thread *other : cluster->waiting)
    for (Block *block : cluster->blocks) other->state->clock[first + block->rank] = block->epoch;
  wake(cluster->waiting, t);
  cluster->waiting.clear();
}

void named_barrier(Thread *t, i32 which, i32 threads, bool wait) {
  if (which < 0 || which > 15) fail(t, "barrier %d: there are 0 to 15", which);
  if (threads % launch->kernel->warp || threads > launch->kernel->threads) fail(t, "a named barrier of %d threads, in a block of %d", threads, launch->kernel->threads);
  Barrier &b = t->state->block->named[which];
  if (b.arrived && b.expected != threads) fail(t, "barrier %d is waited for with %d threads and with %d", which, threads, b.expected);
  b.expected = threads;
  join_thread(b.clock, t);
  tick(t);
  ++b.arrived;
  if (wait) b.waiting.push_back(t);
  if (b.arrived < threads) {
    if (wait) wait_here(t, "named_barrier()");
    return;
  }
  for (Thread *other : b.waiting) join(other->state->clock, b.clock);
  wake(b.waiting, t);
  b = Barrier();
}

void fence(Thread *t) { t->state->fenced = true; }
void fence_async(Thread *t) {
  t->state->async_fence = t->state->clock[cluster_thread(t)];
  tick(t);
}
void grid_wait(Thread *t) { t->state->waited = t->state->block->waited = true; }
void grid_launch_dependents(Thread *t) { if (!t->state->waited) launch->early = true; }

/* atomics --------------------------------------------------------------------------------------------------------- */

static void meet_at(Thread *t, void *p, bool publish) {
  SyncVariable &v = launch->variables[(u64)p];
  Block *block = t->state->block;
  if (v.known.empty()) v.known.assign(launch->blocks, false);
  for (size_t i = 0; i < v.known.size(); ++i) if (v.known[i]) block->known[i] = true;
  if (v.block == block) join(t->state->clock, v.clock);
  if (!publish) return;
  for (size_t i = 0; i < v.known.size(); ++i) if (block->known[i]) v.known[i] = true;
  v.known[block->linear] = true;
  if (v.block != block) { v.block = block; v.clock.clear(); }
  join(v.clock, t->state->clock);
  tick(t);
}

template <class V> static u64 change(void *p, i32 kind, u64 value, u64 expected) {
  V old, v, e, result;
  memcpy(&old, p, sizeof old); memcpy(&v, &value, sizeof v); memcpy(&e, &expected, sizeof e);
  switch (kind) {
    case ADD: result = (V)(old + v); break;
    case MAX: result = old > v ? old : v; break;
    case MIN: result = old < v ? old : v; break;
    default: result = old == e ? v : old;
  }
  memcpy(p, &result, sizeof result);
  u64 r = 0;
  memcpy(&r, &old, sizeof old);
  return r;
}

u64 atomic(Thread *t, void *p, bool shared, i32 kind, i32 type, u64 value, u64 expected) {
  u32 size = type == 2 || type == 3 ? 8 : 4;
  if (shared) shared_access(t, p, size, true, true);
  else global_access(t, (u64)p, size, true, true);
  meet_at(t, p, shared || t->state->fenced);
  u64 old;
  switch (type) {
    case 0: old = change<i32>(p, kind, value, expected); break;
    case 1: old = change<u32>(p, kind, value, expected); break;
    case 2: old = change<i64>(p, kind, value, expected); break;
    case 3: old = change<u64>(p, kind, value, expected); break;
    default: old = change<f32>(p, kind, value, expected);
  }
  if (kind == CAS || random_below(8) == 0) spin(t, "a loop around an atomic");
  return old;
}

u64 acquire(Thread *t, const void *p, bool shared, u32 size) {
  spin(t, "a loop around load_acquire()");
  u64 value = 0;
  if (shared) touch(t->state->block, shared_offset(t, p, size, "reads"), size);
  else find(t, (u64)p, size, "reads");
  memcpy(&value, p, size);
  meet_at(t, (void *)p, false);
  return value;
}

void release(Thread *t, void *p, bool shared, u32 size, u64 value) {
  if (shared) shared_access(t, p, size, true, true);
  else global_access(t, (u64)p, size, true, true);
  t->state->fenced = true;
  meet_at(t, p, true);
  memcpy(p, &value, size);
}

void relaxed_load(Thread *t, const void *p, bool shared, u32 size, void *value) {
  spin(t, "a loop around load_relaxed()");
  if (shared) touch(t->state->block, shared_offset(t, p, size, "reads"), size);
  else find(t, (u64)p, size, "reads");
  memcpy(value, p, size);
}

void relaxed_store(Thread *t, void *p, bool shared, u32 size, const void *value) {
  if (shared) shared_access(t, p, size, true, true);
  else global_access(t, (u64)p, size, true, true);
  memcpy(p, value, size);
  if (random_below(4) == 0) spin(t, "a store_relaxed()");
}

/* warps ----------------------------------------------------------------------------------------------------------- */

static const char *const KINDS[] = {"shuffle()", "shuffle_xor()", "shuffle_up()", "shuffle_down()", "ballot()", "any_thread()",
                                    "all_threads()", "warp_barrier()", "warp_top()", "warp_total()"};

bool arrive(Thread *t, Meeting &m, i32 size, i32 kind, const char *doing) {
  if (m.count == 0) {
    m.kind = kind;
    m.at = t->at;
    if ((i32)m.members.size() != size) { /* all of them are written by who comes */
      m.members.resize(size);
      m.values.resize(size);
      m.arguments.resize(size);
      m.data.resize(size);
      if ((i32)m.results.size() < size) m.results.resize(size);
    }
  }
  if (m.kind != kind || m.at != t->at) {
    u32 other = m.at;
    fail(t, "the threads that %s takes together are not together: others are at %s", doing, place(other));
  }
  m.members[t->index % size] = t;
  return ++m.count == size;
}

void leave(Thread *t, Meeting &m) {
  m.count = 0;
  wake(m.members, t);
}

i32 warp_size(Thread *t) {
  i32 first = t->warp * launch->kernel->warp;
  return std::min(launch->kernel->warp, launch->kernel->threads - first);
}

u64 exchange(Thread *t, i32 kind, u64 value, i32 argument) {
  Warp &w = t->state->block->warps[t->warp];
  i32 size = launch->kernel->warp;
  if (warp_size(t) != size) fail(t, "%s in a warp of %d threads", KINDS[kind], warp_size(t));
  bool last = arrive(t, w, size, kind, KINDS[kind]);
  w.values[t->lane] = value;
  w.arguments[t->lane] = argument;
  if (!last) wait_here(t, KINDS[kind]);
  else {
    u64 bits = 0, top = 0, total = 0;
    for (i32 lane = 0; lane < size; ++lane) top = std::max(top, w.values[lane]), total += w.values[lane];
    for (i32 lane = 0; lane < size; ++lane) bits |= (u64)(w.values[lane] != 0) << lane;
    for (i32 lane = 0; lane < size; ++lane) {
      i32 from = lane, n = w.arguments[lane];
      if (kind == SHUFFLE) from = n & (size - 1);
      if (kind == SHUFFLE_XOR) from = (lane ^ n) < size && (lane ^ n) >= 0 ? lane ^ n : lane;
      if (kind == SHUFFLE_UP) from = lane - n >= 0 ? lane - n : lane;
      if (kind == SHUFFLE_DOWN) from = lane + n < size ? lane + n : lane;
      w.results[lane] = kind < BALLOT ? w.values[from] : kind == BALLOT ? bits : kind == ANY ? bits != 0 : kind == WARP_TOP ? top : kind == WARP_TOTAL ? total
                        : bits == (size == 64 ? ~0ull : (1ull << size) - 1);
    }
    leave(t, w);
  }
  return w.results[t->lane];
}

void warp_barrier(Thread *t) {
  Warp &w = t->state->block->warps[t->warp];
  if (!arrive(t, w, warp_size(t), 7, KINDS[7])) { wait_here(t, KINDS[7]); return; }
  merge(w.members);
  leave(t, w);
}

}  /* namespace emulate */
