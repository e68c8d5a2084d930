/* Fibers, the scheduler of one launch, and what Python calls. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>

#include "emulate_state.h"

namespace emulate {

Launch *launch;
Thread *current;
u64 zse_emulate_longest = 400u << 20;

namespace {

const size_t STACK = 256 << 10;     /* virtual; a kernel's variables take a few KiB of it */
/* Their tops begin at as many offsets: at one, the frames of all fibers would share a few sets of the processor's caches. */
const u32 TOPS = 61, TOP = 320;
const size_t KEPT = 8;              /* blocks whose memory is used again */
void *scheduler_sp;
std::vector<void *> stacks;
std::vector<Block *> idle;
u32 num_fibers;
u32 num_launches, complete_launches;   /* complete: when the next launch starts */

}  /* namespace */

extern "C" void zse_switch(void **save, void *to);

#if defined(__x86_64__)
__asm__(".text\n.globl zse_switch\n.type zse_switch, @function\nzse_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n.size zse_switch, .-zse_switch\n");
static void *first_frame(u8 *top, void (*entry)()) {
  void **sp = (void **)top;
  *--sp = nullptr;                  /* the entry's own return address: it never returns */
  *--sp = (void *)entry;
  for (int k = 0; k < 6; ++k) *--sp = nullptr;
  return sp;
}
#elif defined(__aarch64__)
__asm__(".text\n.globl zse_switch\n.type zse_switch, %function\nzse_switch:\n"
        "  sub sp, sp, #160\n  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
        "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
        "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
        "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
        "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
        "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n  add sp, sp, #160\n  ret\n.size zse_switch, .-zse_switch\n");
static void *first_frame(u8 *top, void (*entry)()) {
  u64 *sp = (u64 *)(top - 160);
  memset(sp, 0, 160);
  sp[11] = (u64)entry;
  return sp;
}
#else
#error "the emulator switches fibers on x86-64 and arm64"
#endif

const char *place(u32 at) { return (i32)at < launch->kernel->num_places ? launch->kernel->places[at] : "?"; }

static void to_scheduler(Thread *t) { zse_switch(&t->state->sp, scheduler_sp); }

void fail(Thread *t, const char *format, ...) {
  char text[1500];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  char line[2000];
  snprintf(line, sizeof line, "%s: %s: %s (block %d, %d, %d, thread %d)", place(t->at), launch->kernel->symbol, text, t->block_index[0],
           t->block_index[1], t->block_index[2], t->index);
  launch->message = line;
  launch->failed = true;
  to_scheduler(t);
  abort();
}

void wait_here(Thread *t, const char *doing) {
  t->state->running = BLOCKED;
  t->state->doing = doing;
  to_scheduler(t);
}

void spin(Thread *t, const char *doing) {
  t->state->running = SPINNING;
  t->state->doing = doing;
  to_scheduler(t);
}

static void fiber_main() {
  Thread *t = current;
  launch->kernel->run(t, launch->args);
  if (!t->state->stores.empty()) bulk_commit(t);
  finish_stores(t, 0);
  t->state->running = DONE;
  to_scheduler(t);
  abort();
}

static void *take_stack() {
  if (!stacks.empty()) {
    void *stack = stacks.back();
    stacks.pop_back();
    return stack;
  }
  void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) { perror("emulator: stack of a fiber"); abort(); }
  mprotect(stack, 4096, PROT_NONE);
  return stack;
}

template <class C> void Shadow<C>::make(u64 num_bytes) {
  drop();
  lines = (num_bytes + LINE - 1) / LINE;
  void *all = mmap(nullptr, size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) { perror("emulator: shadow memory"); abort(); }
  words = (C *)all;
  bytes = words + lines * (LINE / 4);
  split = (u8 *)(bytes + lines * LINE);
}

template <class C> void Shadow<C>::drop() {
  if (words) munmap(words, size());
  words = nullptr;
}

static Block *make_block(Cluster *cluster, i64 linear, i32 rank) {
  const Kernel *kernel = launch->kernel;
  Block *block = idle.empty() ? new Block() : idle.back();
  if (!idle.empty()) idle.pop_back();
  block->linear = linear;
  block->rank = rank;
  block->cluster = cluster;
  block->threads.resize(kernel->threads);
  if ((i32)block->states.size() < kernel->threads) block->states.resize(kernel->threads);
  if (block->memory.size() < kernel->shared_bytes + 2048) block->memory.resize(kernel->shared_bytes + 2048);
  block->shared = (u8 *)(((u64)block->memory.data() + 1023) / 1024 * 1024);
  if (!launch->initialised) memset(block->shared, 0xff, kernel->shared_bytes);    /* stores may come unseen before a line is touched */
  u64 lines = (kernel->shared_bytes + LINE - 1) / LINE;
  if (block->made.size() < lines) {
    block->cells.make(lines * LINE);
    block->made.assign(lines, 0);
  }
  ++block->use;
  size_t warps = (kernel->threads + kernel->warp - 1) / kernel->warp;
  if (block->warps.size() < warps) block->warps.resize(warps);
  for (Warp &warp : block->warps) warp.count = 0;
  block->groups.clear();
  block->groups.resize((kernel->threads + 127) / 128);
  block->known.assign(launch->blocks, false);
  block->mbarriers.clear();
  block->whole.waiting.clear();
  for (Barrier &one : block->named) one = Barrier();
  block->epoch = 1;
  block->engine = 0;
  block->waited = false;
  block->alive = kernel->threads;
  i32 size = kernel->threads * kernel->cluster + 2 * kernel->cluster;
  for (i32 i = 0; i < kernel->threads; ++i) {
    Thread &t = block->threads[i];
    ThreadState &state = block->states[i];
    memset((void *)&t, 0, sizeof t);
    t.index = i; t.lane = i % kernel->warp; t.warp = i / kernel->warp;
    i64 rest = linear;
    for (int d = 0; d < 3; ++d) {
      t.num_blocks[d] = (i32)launch->grid[d];
      t.block_index[d] = (i32)(rest % launch->grid[d]);
      rest /= launch->grid[d];
    }
    t.rank = rank;
    t.shared = block->shared;
    t.state = &state;
    state.block = block;
    state.own = rank * kernel->threads + i;
    state.doing = nullptr;
    state.clock.assign(size, 0);
    state.clock[state.own] = 1;
    state.async_fence = 0;
    state.fenced = state.waited = false;
    state.open.clear();
    state.groups.clear();
    state.stores.clear();
    state.store_groups.clear();
    state.last = nullptr;
    state.stack = take_stack();
    state.sp = first_frame((u8 *)state.stack + STACK - num_fibers++ % TOPS * TOP, fiber_main);
    state.running = READY;
    state.next = i + 1 < kernel->threads && (i + 1) % kernel->warp ? &t + 1 : nullptr;
    if (!t.lane) launch->ready.push_back(&t);
  }
  return block;
}

void make_line(Block *block, u32 line) {
  const Kernel *kernel = launch->kernel;
  u32 start = line * LINE, end = start + LINE, step = 4;
  for (i32 k = 0; k < kernel->num_arrays; ++k) {
    u32 from = std::max(start, kernel->arrays[k][0]), to = std::min(end, kernel->arrays[k][0] + kernel->arrays[k][1]);
    if (from < to && ((from | to) & 3)) step = 1;
  }
  if (launch->initialised) memset(block->shared + start, 0xff, LINE);    /* NaN in every float */
  block->cells.split[line] = step == 1;
  for (u32 k = start; k < end; k += step) block->cells.at(k, step) = Cell{{}, {}, OUTSIDE, false, false};
  for (i32 k = 0; k < kernel->num_arrays; ++k) {
    u32 from = std::max(start, kernel->arrays[k][0]), to = std::min(end, kernel->arrays[k][0] + kernel->arrays[k][1]);
    for (u32 at = from; at < to; at += step) block->cells.at(at, step).state = UNWRITTEN;
  }
  block->made[line] = block->use;
}

static Cluster *make_cluster(i64 first) {
  Cluster *cluster = new Cluster();
  for (i32 rank = 0; rank < launch->kernel->cluster; ++rank) cluster->blocks.push_back(make_block(cluster, first + rank, rank));
  return cluster;
}

static bool cluster_done(Cluster *cluster) {
  for (Block *block : cluster->blocks) if (block->alive) return false;
  return true;
}

static void drop_cluster(Cluster *cluster) {
  for (Block *block : cluster->blocks) {
    for (Thread &t : block->threads) stacks.push_back(t.state->stack);
    if (idle.size() < KEPT) idle.push_back(block);
    else delete block;
  }
  delete cluster;
}

static void end_of_block(Thread *t) {
  Block *block = t->state->block;
  for (Pending &one : launch->pending)
    if (std::find(one.targets.begin(), one.targets.end(), block) != one.targets.end()) {
      launch->failed = true;
      launch->message = std::string(place(one.at)) + ": " + launch->kernel->symbol + ": the block ends while this copy into its shared "
                        "memory is in flight";
      return;
    }
  if (launch->dependent && !block->waited) {
    launch->failed = true;
    launch->message = std::string(place(0)) + ": " + launch->kernel->symbol + ": no thread of the block calls grid_wait(): the kernels "
                      "after this one would not wait for those before it";
  }
}

static void deadlock(const std::vector<Cluster *> &clusters) {
  std::map<std::pair<std::string, u32>, std::pair<i32, Thread *>> where;
  i32 ended = 0;
  for (Cluster *cluster : clusters)
    for (Block *block : cluster->blocks)
      for (Thread &t : block->threads) {
        if (t.state->running == DONE) { ++ended; continue; }
        auto &entry = where[{t.state->doing ? t.state->doing : "?", t.at}];
        if (!entry.first++) entry.second = &t;
      }
  std::string text;
  u32 first = 0;
  for (auto &item : where) {
    char line[300];
    Thread *t = item.second.second;
    if (text.empty()) first = item.first.second;
    snprintf(line, sizeof line, "%s%d threads wait in %s at %s (block %d, %d, %d, thread %d first)", text.empty() ? "" : "; ",
             item.second.first, item.first.first.c_str(), place(item.first.second), t->block_index[0], t->block_index[1],
             t->block_index[2], t->index);
    text += line;
  }
  launch->failed = true;
  launch->message = std::string(place(first)) + ": " + launch->kernel->symbol + ": deadlock: " + text + "; " + std::to_string(ended) + " threads have ended";
}

static void fetch_ahead(Thread *t) {
  __builtin_prefetch(t);
  const u8 *sp = (const u8 *)t->state->sp;
  for (int line = 0; line < 4; ++line) __builtin_prefetch(sp + line * 64);
}

/* Run a thread until it waits. */
static void step(Launch &one, Thread *t, std::vector<Cluster *> &clusters) {
  current = t;
  t->state->running = READY;
  t->state->accesses = 0;
  zse_switch(&scheduler_sp, t->state->sp);
  if (one.failed) return;
  if (t->state->running == SPINNING) { ++one.spins; one.ready.push_back(t); return; }
  one.spins = 0;
  if (t->state->running == READY) one.ready.push_back(t);
  if (t->state->running == DONE && --t->state->block->alive == 0) {
    end_of_block(t);
    Cluster *cluster = t->state->block->cluster;
    if (!one.failed && cluster_done(cluster)) {
      clusters.erase(std::find(clusters.begin(), clusters.end(), cluster));
      drop_cluster(cluster);
    }
  }
}

static void run(Launch &one) {
  const Kernel *kernel = one.kernel;
  i64 total = one.blocks / kernel->cluster;
  std::vector<i64> order(total);
  for (i64 i = 0; i < total; ++i) order[i] = i * kernel->cluster;
  for (i64 i = total - 1; i > 0; --i) std::swap(order[i], order[random_below((u32)i + 1)]);
  size_t width = 1 + random_below(3);
  i64 slow = -1;
  i64 next = 0;
  u32 bits = random_bits();                /* of the next pick */
  std::vector<Cluster *> clusters;
  while (!one.failed) {
    while (clusters.size() < width && next < total) clusters.push_back(make_cluster(order[next++]));
    if (clusters.empty()) break;
    bool stuck = one.ready.empty() ? one.pending.empty() : one.spins > 100000 + 200 * one.ready.size() && one.pending.empty();
    if (stuck && next < total) { ++width; one.spins = 0; continue; }      /* they may wait for blocks that have not started */
    if (stuck) { deadlock(clusters); break; }
    if (!one.pending.empty() && (one.ready.empty() || random_below(4) == 0 || one.spins > 1000)) { run_pending(); one.spins = 0; continue; }
    /* A block that is slow for a while: what others should have waited for happens late. */
    if (!(one.picks++ & 1023)) slow = random_below((u32)one.blocks * 2);
    u32 pick = scaled(bits, (u32)one.ready.size());
    for (int tries = 0; tries < 16 && slow < one.blocks && one.blocks > 1 && one.ready[pick]->state->block->linear == slow; ++tries)
      pick = random_below((u32)one.ready.size());
    Thread *t = one.ready[pick];
    one.ready[pick] = one.ready.back();
    one.ready.pop_back();
    bits = random_bits();
    while (t && !one.failed) {
      Thread *next = t->state->next;
      t->state->next = nullptr;
      /* Now and then the others of a warp come later. */
      if (next && !(++one.runs % 64)) { one.ready.push_back(next); next = nullptr; }
      /* The next one, as far as can be told now, is on its way to the caches while this one runs. */
      if (next) fetch_ahead(next);
      else if (!one.ready.empty()) fetch_ahead(one.ready[scaled(bits, (u32)one.ready.size())]);
      step(one, t, clusters);
      t = next;
    }
  }
  for (Cluster *cluster : clusters) drop_cluster(cluster);
}

/* memory that kernels may touch ----------------------------------------------------------------------------------- */

static std::map<u64, Allocation> allocations;      /* by address */

static Allocation *allocation_of(u64 address) {
  auto after = allocations.upper_bound(address);
  return after == allocations.begin() ? nullptr : &std::prev(after)->second;
}

Allocation *find_slowly(Thread *t, u64 address, u64 size, const char *verb) {
  Allocation *a = allocation_of(address);
  if (a && address >= a->address && address + size <= a->address + a->size) return t->state->last = a;
  Allocation *near = a;
  auto after = allocations.upper_bound(address);
  if (after != allocations.end() && (!near || after->first - address < address - (near->address + near->size))) near = &after->second;
  if (!near) fail(t, "%s %llu bytes at %#llx: there is no device memory", verb, size, address);
  if (address < near->address)
    fail(t, "%s %llu bytes, %llu bytes before '%s'", verb, size, near->address - address, near->label.c_str());
  fail(t, "%s %llu bytes at offset %llu of '%s', which has %llu bytes", verb, size, address - near->address, near->label.c_str(), near->size);
}

static void track(Allocation &a) {
  if (!a.cells.words && a.size) a.cells.make(a.size);
}

static const char *block_name(i64 linear, char *text) {
  i64 x = linear % launch->grid[0], y = linear / launch->grid[0] % launch->grid[1], z = linear / launch->grid[0] / launch->grid[1];
  sprintf(text, "block %lld, %lld, %lld", x, y, z);
  return text;
}

void global_access(Thread *t, u64 address, u32 size, bool write, bool is_atomic) {
  const char *verb = is_atomic ? "atomically changes" : write ? "writes" : "reads";
  ThreadState *state = t->state;
  if (++state->accesses > zse_emulate_longest) fail(t, "runs on and on: a loop without an end?");
  Allocation *a = find(t, address, size, verb);
  u32 align = size < 16 ? size : 16;
  if (address % align) fail(t, "%s %u bytes at an address that is no multiple of %u (offset %llu of '%s')", verb, size, align, address - a->address, a->label.c_str());
  if (launch->dependent && write && !state->waited) fail(t, "writes to '%s' before grid_wait()", a->label.c_str());
  if (!a->cells.words) { if (!write) return; track(*a); }
  Block *block = state->block;
  char name[80];
  Access now = access_of(t);
  u32 step = a->cells.grain(address - a->address, size);
  for (u32 k = 0; k < size; k += step) {
    GlobalCell &c = a->cells.at(address - a->address + k, step);
    if (c.write.valid && !(is_atomic && c.atomic)) {
      if (c.write_launch != launch->id) {
        if (launch->dependent && !state->waited && c.write_launch > launch->complete)
          fail(t, "reads of '%s' what an earlier kernel wrote, before grid_wait()", a->label.c_str());
      } else if (c.write_block == (u32)block->linear) {
        if (!ordered(t, c.write)) fail(t, "race: %s what %s wrote at %s, no barrier between (offset %llu of '%s')", verb,
                                       who(c.write).c_str(), place(c.write.at), address - a->address + k, a->label.c_str());
      } else if (!block->known[c.write_block])
        fail(t, "race: %s what %s wrote at %s (offset %llu of '%s')", verb, block_name(c.write_block, name), place(c.write.at),
             address - a->address + k, a->label.c_str());
    }
    if (write && c.read.valid && c.read_launch == launch->id) {
      if (c.read_block == (u32)block->linear) {
        if (!ordered(t, c.read)) fail(t, "race: %s what %s reads at %s, no barrier between (offset %llu of '%s')", verb,
                                      who(c.read).c_str(), place(c.read.at), address - a->address + k, a->label.c_str());
      } else if (!block->known[c.read_block])
        fail(t, "race: %s what %s reads at %s (offset %llu of '%s')", verb, block_name(c.read_block, name), place(c.read.at),
             address - a->address + k, a->label.c_str());
    }
    if (write) {
      c.write = now; c.write_launch = launch->id; c.write_block = (u32)block->linear; c.atomic = is_atomic;
      if (!is_atomic) c.read.valid = false;
    } else {
      c.read = now; c.read_launch = launch->id; c.read_block = (u32)block->linear;
    }
  }
}

void check_read(Thread *t, const void *p, u32 size) { global_access(t, (u64)p, size, false, false); }
void check_write(Thread *t, void *p, u32 size) { global_access(t, (u64)p, size, true, false); }

}  /* namespace emulate */

using namespace emulate;

extern "C" {

/* Memory that kernels may touch. */
void zse_emulate_allocate(u64 address, u64 size, const char *label) { allocations[address] = Allocation{address, size, label}; }

void zse_emulate_release(u64 address) {
  auto found = allocations.find(address);
  if (found == allocations.end()) return;
  found->second.cells.drop();
  allocations.erase(found);
}

/* What was launched so far is done: kernels to come may read its results at once. */
void zse_emulate_synchronize(void) { complete_launches = num_launches; }

/* Run one launch. rules: 1 dependent launches, 2 initialised memory. 0, or 1 with the first error's line in `message`. */
int zse_emulate_launch(const Kernel *kernel, const u64 *args, const i64 *grid, u64 seed, i32 rules, char *message, i32 size) {
  Launch one;
  one.kernel = kernel;
  one.args = args;
  for (int d = 0; d < 3; ++d) one.grid[d] = grid[d];
  one.blocks = grid[0] * grid[1] * grid[2];
  one.id = ++num_launches;
  one.dependent = rules & 1;
  one.initialised = rules & 2;
  one.complete = complete_launches;
  one.random = seed * 2654435769u + 88172645463325252ull;
  launch = &one;
  if (one.blocks % kernel->cluster || (kernel->cluster > 1 && grid[0] % kernel->cluster)) {
    snprintf(message, size, "%s: a grid of %lld blocks is no multiple of clusters of %d", kernel->symbol, grid[0], kernel->cluster);
    return 1;
  }
  for (i32 i = 0; i < kernel->num_params; ++i)
    if (kernel->params[i] == 2) {
      Allocation *a = allocation_of(args[i]);
      if (a && args[i] < a->address + a->size) track(*a);
    }
  run(one);
  launch = nullptr;
  /* The next kernel starts when all blocks of this one have let it. If they did so after their grid_wait(), everything before this
   * launch is complete by then; otherwise only what was complete when this one started. */
  if (!one.early) complete_launches = one.id - 1;
  if (one.failed) snprintf(message, size, "%s", one.message.c_str());
  return one.failed;
}

}
