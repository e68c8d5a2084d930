/* The emulator's own state, shared by its files. */
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <algorithm>

#include "emulate.h"

namespace emulate {

/* Vector clocks over the threads of a cluster, then one epoch per block, then one count per block of the copies that its engine has
 * landed. A block's epoch counts its full barriers: what happened in an earlier epoch is before everything in this one, so that a full
 * barrier costs nothing per thread. Only mbarriers carry the engine's counts: other barriers do not order its copies. */
typedef std::vector<u32> Clock;

enum State : u8 { UNWRITTEN, WRITTEN, IN_FLIGHT, MBARRIER, OUTSIDE };

/* Who touched a byte last. thread: of the cluster; from the number of its threads on: the engine of a block. */
struct Access { u32 epoch, clock, at; u16 thread; bool valid; };
struct Cell { Access write, read[2]; State state; bool generic, atomic; };

struct GlobalCell { Access write, read; u32 write_launch, write_block, read_launch, read_block; bool atomic; };

/* Bytes that are only touched as whole words of four have one cell for the word: cells that lie side by side, since what lies apart
 * costs the processor's caches, and the system pages to clear. A line of bytes that is touched otherwise is split. */
const u32 LINE = 128;
template <class C> struct Shadow {
  C *words = nullptr, *bytes = nullptr;
  u8 *split = nullptr;              /* of each line: a cell for each byte, otherwise for each word */
  u64 lines = 0;

  u64 size() const { return lines * (LINE / 4 + LINE) * sizeof(C) + lines; }
  void make(u64 num_bytes);         /* all zero; memory is taken when it is touched */
  void drop();
  /* Of the word or byte that begins here, `step` bytes a cell. */
  C &at(u64 offset, u32 step) { return step == 4 ? words[offset / 4] : bytes[offset]; }

  /* The bytes from one cell to the next in this range. */
  u32 grain(u64 offset, u64 size) {
    u64 first = offset / LINE, last = (offset + size - 1) / LINE;
    bool apart = (offset | size) & 3;
    for (u64 line = first; line <= last && !apart; ++line) apart = split[line];
    if (!apart) return 4;
    for (u64 line = first; line <= last; ++line) {
      if (split[line]) continue;
      split[line] = 1;
      for (u64 byte = line * LINE; byte < (line + 1) * LINE; ++byte) bytes[byte] = words[byte / 4];
    }
    return 1;
  }
};

struct Allocation {
  u64 address, size;
  std::string label;
  Shadow<GlobalCell> cells;         /* once a kernel may write here */
};

struct Barrier { i32 arrived = 0, expected = 0; std::vector<Thread *> waiting; Clock clock; };

struct MBarrierState {
  i32 expected, pending;
  i64 bytes;
  u32 phase;
  bool fenced;
  Clock arriving, done;
};

struct Copy { u8 *dst; const u8 *src; i32 size, valid; u32 at; };

/* A copy that the engine does some time after it was issued. */
struct Pending {
  Block *block;
  Thread *issuer;
  Clock clock;                      /* the issuer's, when it was issued */
  u32 epoch, at;
  std::vector<Copy> copies;         /* of a load: pieces of the destination with their source, src null: zeros */
  std::vector<Block *> targets;     /* blocks that receive it */
  u32 barrier;                      /* offset in shared memory */
  i32 bytes;
  bool arrives;                     /* copy_arrive: an arrival instead of bytes */
};

struct Store { std::vector<Copy> copies; Clock clock; u32 epoch, at; };

/* Threads that meet at one operation. */
struct Meeting {
  i32 count = 0;
  i32 kind = -1;
  u32 at = 0;
  std::vector<Thread *> members;
  std::vector<u64> values, results;
  std::vector<i32> arguments;
  std::vector<const void *> data;
};
struct Warp : Meeting {};

struct Accumulator { std::vector<std::vector<f32 *>> places; std::vector<std::vector<f32>> values; i32 users = 0; };
struct Product {
  std::shared_ptr<Accumulator> acc;
  i32 dtype, n;
  bool in_registers, accumulate, trans_a, trans_b;
  std::vector<u32> registers;
  u64 a, b;
  Clock clock;
  u32 epoch, at;
  Thread *leader;
};
struct Group : Meeting {            /* a warpgroup */
  bool fenced = false;
  std::vector<Product> open;
  std::deque<std::vector<Product>> closed;
  std::map<f32 *, std::shared_ptr<Accumulator>> accumulators;
};

struct Cluster { std::vector<Block *> blocks; i32 arrived = 0; std::vector<Thread *> waiting; };

struct Block {
  i64 linear;
  i32 rank;
  Cluster *cluster;
  std::vector<Thread> threads;
  std::vector<ThreadState> states;
  std::vector<u8> memory;           /* of `shared`, which is aligned to 1024 bytes in it; written when a line is first touched, as `cells` */
  u8 *shared;
  Shadow<Cell> cells;               /* of the bytes of `shared`; a line of them is made when it is first touched: see touch() */
  std::vector<u32> made;            /* of each line: of which use of this block */
  u32 use = 0;
  std::vector<Warp> warps;
  std::vector<Group> groups;
  Barrier whole, named[16];
  std::unordered_map<u32, MBarrierState> mbarriers;
  std::vector<bool> known;          /* blocks whose released writes this one has acquired */
  u32 epoch = 1, engine = 0;
  i32 alive;
  bool waited = false;              /* some thread has called grid_wait() */

  ~Block() { cells.drop(); }
};

enum Running : u8 { READY, BLOCKED, SPINNING, DONE };

/* What a switch and every access need is in the first 64 bytes. */
struct alignas(64) ThreadState {
  void *sp = nullptr;
  Block *block;
  u64 accesses = 0;
  Allocation *last = nullptr;
  Clock clock;
  i32 own;                          /* of the threads of the cluster */
  Running running;
  bool fenced = false, waited = false;
  const char *doing;                /* what it is blocked in */
  Thread *next = nullptr;           /* of those that were woken with it: it runs behind this one */
  void *stack = nullptr;
  u32 async_fence = 0;              /* its clock at the last fence_async() */
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;             /* a few, the oldest first */
  std::vector<Store> stores;
  std::vector<std::vector<Store>> store_groups;
};

struct SyncVariable { std::vector<bool> known; Clock clock; Block *block = nullptr; };

struct Launch {
  const Kernel *kernel;
  const u64 *args;
  i64 grid[3], blocks;
  u32 id;
  bool dependent;                   /* hold the kernel to the rule of PDL */
  bool initialised;                 /* and to reading only what was written */
  u32 complete;                     /* launches whose results may be read before grid_wait() */
  bool early = false;               /* some thread let the next kernel start before its own grid_wait() */
  u64 random;
  std::vector<Thread *> ready;      /* the first of threads that run one after another */
  std::deque<Pending> pending;
  std::unordered_map<u64, SyncVariable> variables;
  u64 spins = 0, picks = 0, runs = 0;
  bool failed = false;
  std::string message;
};

extern Launch *launch;
extern Thread *current;
extern "C" u64 zse_emulate_longest; /* accesses of a thread between two switches: more is a loop without an end */

inline u32 random_bits() {
  u64 &s = launch->random;
  s ^= s >> 12; s ^= s << 25; s ^= s >> 27;
  return (u32)(s * 2685821657736338717ull >> 32);
}
inline u32 scaled(u32 bits, u32 n) { return (u32)((u64)bits * n >> 32); }      /* below n */
inline u32 random_below(u32 n) { return scaled(random_bits(), n); }
[[noreturn]] void fail(Thread *, const char *format, ...) __attribute__((format(printf, 2, 3)));
void wait_here(Thread *, const char *doing);      /* until wake() */
void spin(Thread *, const char *doing);            /* let others run */
/* Threads that were woken at once, `t` left out. They run one behind the other, 32 at most, since their stacks and states lie side by side: in
 * any order of all threads each step waits for memory. What they may see of each other is told by clocks, not by who came first. */
inline void wake(const std::vector<Thread *> &threads, const Thread *t) {
  Thread *last = nullptr;
  u32 count = 0;
  for (Thread *one : threads) {
    if (one == t) continue;
    one->state->running = READY;
    if (count++ % 32) last->state->next = one;
    else launch->ready.push_back(one);
    last = one;
  }
}
const char *place(u32 at);
std::string who(const Access &);                  /* "thread 3", "a copy" */

/* Threads that take part in one operation come together: true in the one that comes last, which does the work and calls leave(). */
bool arrive(Thread *, Meeting &, i32 size, i32 kind, const char *doing);
void leave(Thread *, Meeting &);
i32 warp_size(Thread *);

Allocation *find_slowly(Thread *, u64 address, u64 size, const char *verb);
inline Allocation *find(Thread *t, u64 address, u64 size, const char *verb) {
  Allocation *a = t->state->last;
  return a && address >= a->address && address + size <= a->address + a->size ? a : find_slowly(t, address, size, verb);
}
void join(Clock &, const Clock &);
Clock snapshot(Thread *);                         /* what another thread learns from this one */
void join_thread(Clock &, Thread *);              /* its snapshot */
void tick(Thread *);
u32 shared_offset(Thread *, const void *, u32 size, const char *verb);
void global_access(Thread *, u64 address, u32 size, bool write, bool is_atomic);
void run_pending();
void finish_copies(Thread *, size_t groups);
void finish_stores(Thread *, size_t groups);

inline i32 cluster_thread(Thread *t) { return t->state->own; }

inline Access access_of(Thread *t) {
  const ThreadState *s = t->state;
  return Access{s->block->epoch, s->clock[s->own], t->at, (u16)s->own, true};
}

inline bool ordered_clock(Block *block, const Clock &clock, u32 own_epoch, const Access &access) {
  u32 threads = launch->kernel->threads, cluster = launch->kernel->cluster, all = threads * cluster;
  if (access.thread >= all) return access.clock <= clock[access.thread + cluster];
  u32 epoch = cluster == 1 || access.thread / threads == (u32)block->rank ? own_epoch : clock[all + access.thread / threads];
  return access.epoch < epoch || access.clock <= clock[access.thread];
}

/* Is that access before what this thread does now? */
inline bool ordered(Thread *t, const Access &access) {
  return ordered_clock(t->state->block, t->state->clock, t->state->block->epoch, access);
}

/* Before cells or bytes of a block are looked at: lines that this launch has not touched are made now, since most launches touch few.
 * grain(). */
void make_line(Block *, u32 line);
inline u32 touch(Block *block, u32 offset, u32 size) {
  for (u32 line = offset / LINE; line <= (offset + size - 1) / LINE; ++line)
    if (block->made[line] != block->use) make_line(block, line);
  return block->cells.grain(offset, size);
}

/* Bytes that the copy engine or a matrix unit reads, as of a clock. */
void engine_reads(Block *, u32 offset, u32 size, const Clock &, u32 epoch, u32 at, Thread *reader, const char *what);

}  /* namespace emulate */
