#include "emulated/cuda_grid.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <ucontext.h>

#include <csetjmp>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#define KVANTA_FIBERS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVANTA_FIBERS_ASAN 1
#endif
#endif
#ifdef KVANTA_FIBERS_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace kvanta::emulated {
namespace {

constexpr size_t kStackBytes = size_t{128} << 10;

enum class State : uint8_t { kRuns, kMultiplies, kAtBarrier, kDone };

struct Copy {
  int64_t offset;
  const uint8_t* from;
  int count;
  int group;
};

struct Fiber {
  int thread = 0;
  std::vector<Copy> copies;  // under way
  int group = 0;             // of those that are begun now
  State state = State::kRuns;
  const char* what = nullptr;  // of a meeting
  void* operands = nullptr;
  void (*act)(void* const*) = nullptr;
  ucontext_t context{};
  bool started = false;
  jmp_buf place;              // after its start: swapcontext would call the system twice
  void* sanitizer = nullptr;  // what asan keeps for it
  uint8_t* stack = nullptr;
};

// When and by whom a byte was touched: two touches by different threads are ordered by a barrier of the block between
// them, or, within a warp, by one of the warp.
struct Touch {
  int thread = -1;
  int block_time = 0;
  int warp_time = 0;
};
struct ByteHistory {
  Touch written;
  Touch read;
  bool many_lanes = false;  // of the reader's warp, since warp_time of `read`
  bool many_warps = false;  // since block_time of `read`
  bool copied_to = false;   // by a copy that nobody has waited for
};

class Block {
 public:
  Block(const GridShape& shape, const std::function<void()>& kernel);
  void Run(int index);

  const GridShape& shape;
  const std::function<void()>& kernel;
  int index = 0;
  Fiber* current = nullptr;
  std::string error;

  void Yield();
  uint8_t* Shared(int64_t offset, int64_t count, int alignment, Access access);
  void BeginCopy(int64_t offset, const uint8_t* from, int count);
  void WaitForCopies(int groups);

 private:
  void Resume(Fiber& fiber);
  void RunWarp(int warp);
  bool ReleaseBarrier();
  bool Ordered(const Touch& before) const;
  Fiber* Lane(int warp, int lane) { return fibers_.data() + warp * kWarp + lane; }
  int Warps() const { return shape.threads / kWarp; }

  std::vector<Fiber> fibers_;
  jmp_buf scheduler_place_;
  void* scheduler_sanitizer_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
  std::unique_ptr<uint8_t[]> shared_memory_;  // of exactly its size: what reads past the end is found by asan, too
  uint8_t* shared_ = nullptr;
  std::vector<ByteHistory> history_;
  int block_time_ = 1;
  std::vector<int> warp_time_;

  friend void FiberMain();
};

thread_local Block* running = nullptr;

// Stacks are kept: most of a short block's time would go into fresh ones.
uint8_t* Stack(size_t fiber) {
  thread_local std::vector<std::unique_ptr<uint8_t[]>> stacks;
  while (stacks.size() <= fiber) stacks.emplace_back(new uint8_t[kStackBytes]);
  return stacks[fiber].get();
}

void FiberMain() {
  Block& block = *running;
#ifdef KVANTA_FIBERS_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack_, &block.scheduler_stack_bytes_);
#endif
  for (;;) {  // once a block
    block.kernel();
    block.current->state = State::kDone;
    block.Yield();
  }
}

Block::Block(const GridShape& grid, const std::function<void()>& code) : shape(grid), kernel(code) {
  fibers_.resize(static_cast<size_t>(shape.threads));
  for (size_t i = 0; i < fibers_.size(); ++i) {
    fibers_[i].thread = static_cast<int>(i);
    fibers_[i].stack = Stack(i);
#ifdef KVANTA_FIBERS_ASAN
    __asan_unpoison_memory_region(fibers_[i].stack, kStackBytes);  // frames that were left in an earlier grid
#endif
    getcontext(&fibers_[i].context);
    fibers_[i].context.uc_stack.ss_sp = fibers_[i].stack;
    fibers_[i].context.uc_stack.ss_size = kStackBytes;
    fibers_[i].context.uc_link = nullptr;
    makecontext(&fibers_[i].context, FiberMain, 0);
  }
}

void Block::Run(int block) {
  index = block;
  shared_memory_.reset(new uint8_t[static_cast<size_t>(shape.shared_bytes) + 16]);
  shared_ = shared_memory_.get() + (16 - reinterpret_cast<uintptr_t>(shared_memory_.get()) % 16) % 16;
  history_.assign(static_cast<size_t>(shape.shared_bytes), {});
  warp_time_.assign(static_cast<size_t>(Warps()), 1);
  for (Fiber& fiber : fibers_) {
    fiber.state = State::kRuns;
    fiber.copies.clear();
  }
  do {
    for (int warp = 0; warp < Warps() && error.empty(); ++warp) RunWarp(warp);
  } while (error.empty() && ReleaseBarrier());
  if (!error.empty()) throw EmulationError(error);
}

// Until all of the warp's lanes are done or at the block's barrier.
void Block::RunWarp(int warp) {
  for (;;) {
    int states[4] = {};
    for (int lane = 0; lane < kWarp; ++lane) {
      Fiber& fiber = *Lane(warp, lane);
      if (fiber.state == State::kRuns) Resume(fiber);
      if (!error.empty()) return;
      ++states[static_cast<int>(fiber.state)];
    }
    const Fiber& first = *Lane(warp, 0);
    if (states[static_cast<int>(first.state)] != kWarp) {
      error = fmt::format("block {}: lanes of warp {} part: {} meet, {} are at a barrier of the block, {} have ended",
                          index, warp, states[1], states[2], states[3]);
      return;
    }
    if (first.state != State::kMultiplies) return;
    void* operands[kWarp];
    for (int lane = 0; lane < kWarp; ++lane) {
      const Fiber& fiber = *Lane(warp, lane);
      operands[lane] = fiber.operands;
      if (fiber.act != first.act || std::strcmp(fiber.what, first.what) != 0) {
        error = fmt::format("block {}: warp {} meets at different places: lane 0 at {}, lane {} at {}", index, warp,
                            first.what, lane, fiber.what);
        return;
      }
    }
    if (first.act != nullptr) {
      first.act(operands);
    } else {
      ++warp_time_[static_cast<size_t>(warp)];
    }
    for (int lane = 0; lane < kWarp; ++lane) Lane(warp, lane)->state = State::kRuns;
  }
}

// Whether there was one that all threads had come to.
bool Block::ReleaseBarrier() {
  int waiting = 0;
  for (const Fiber& fiber : fibers_) waiting += fiber.state == State::kAtBarrier ? 1 : 0;
  if (waiting == 0) return false;
  if (waiting != shape.threads) {
    error = fmt::format("block {}: {} of {} threads wait at a barrier, the others have ended", index, waiting,
                        shape.threads);
    throw EmulationError(error);
  }
  ++block_time_;
  for (Fiber& fiber : fibers_) fiber.state = State::kRuns;
  return true;
}

void GoOn(jmp_buf& place) {
#ifdef KVANTA_FIBERS_ASAN
  // asan's own would forget what it knows of the stack that is left, and take most of a grid's time for it.
  static const auto jump = reinterpret_cast<void (*)(jmp_buf, int)>(dlsym(dlopen("libc.so.6", RTLD_LAZY), "_longjmp"));
  jump(place, 1);
#else
  _longjmp(place, 1);
#endif
}

void Block::Resume(Fiber& fiber) {
  current = &fiber;
#ifdef KVANTA_FIBERS_ASAN
  __sanitizer_start_switch_fiber(&scheduler_sanitizer_, fiber.stack, kStackBytes);
#endif
  if (_setjmp(scheduler_place_) == 0) {
    if (fiber.started) GoOn(fiber.place);
    fiber.started = true;
    setcontext(&fiber.context);
  }
#ifdef KVANTA_FIBERS_ASAN
  __sanitizer_finish_switch_fiber(scheduler_sanitizer_, nullptr, nullptr);
#endif
}

void Block::Yield() {
#ifdef KVANTA_FIBERS_ASAN
  __sanitizer_start_switch_fiber(&current->sanitizer, scheduler_stack_, scheduler_stack_bytes_);
#endif
  if (_setjmp(current->place) == 0) GoOn(scheduler_place_);
#ifdef KVANTA_FIBERS_ASAN
  __sanitizer_finish_switch_fiber(current->sanitizer, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
}

bool Block::Ordered(const Touch& before) const {
  if (before.thread < 0 || before.thread == current->thread || before.block_time < block_time_) return true;
  const int warp = current->thread / kWarp;
  return before.thread / kWarp == warp && before.warp_time < warp_time_[static_cast<size_t>(warp)];
}

uint8_t* Block::Shared(int64_t offset, int64_t count, int alignment, Access access) {
  if (offset < 0 || count < 0 || offset + count > shape.shared_bytes) {
    Stop("shared memory [{}, {}) of {} bytes", offset, offset + count, shape.shared_bytes);
  }
  if (offset % alignment != 0) Stop("shared memory at {}, not a multiple of {}", offset, alignment);
  const int warp = current->thread / kWarp;
  const Touch now{
      .thread = current->thread, .block_time = block_time_, .warp_time = warp_time_[static_cast<size_t>(warp)]};
  for (int64_t i = offset; i < offset + count; ++i) {
    ByteHistory& byte = history_[static_cast<size_t>(i)];
    if (byte.copied_to) Stop("shared byte {}: a copy to it has not been waited for", i);
    if (!Ordered(byte.written)) {
      Stop("shared byte {}: thread {} wrote it, and no barrier is between", i, byte.written.thread);
    }
    if (access == Access::kRead) {
      if (byte.written.thread < 0) Stop("shared byte {}: read before it was written", i);
      const bool same_time = byte.read.thread >= 0 && byte.read.block_time == now.block_time;
      const bool same_warp = same_time && byte.read.thread / kWarp == warp;
      byte.many_warps = same_time && (byte.many_warps || !same_warp);
      byte.many_lanes =
          same_warp && byte.read.warp_time == now.warp_time && (byte.many_lanes || byte.read.thread != now.thread);
      byte.read = now;
      continue;
    }
    const bool same_time = byte.read.thread >= 0 && byte.read.block_time == now.block_time;
    const bool many_lanes = byte.many_lanes && byte.read.warp_time == now.warp_time;
    if (!Ordered(byte.read) || (same_time && (byte.many_warps || many_lanes))) {
      Stop("shared byte {}: thread {} read it, and no barrier is between", i, byte.read.thread);
    }
    byte.written = now;
  }
  return shared_ + offset;
}

void Block::BeginCopy(int64_t offset, const uint8_t* from, int count) {
  Shared(offset, count, count, Access::kWrite);
  CheckAlignment(from, static_cast<size_t>(count));
  for (int64_t i = offset; i < offset + count; ++i) history_[static_cast<size_t>(i)].copied_to = true;
  current->copies.push_back({.offset = offset, .from = from, .count = count, .group = current->group});
}

void Block::WaitForCopies(int groups) {
  std::vector<Copy>& copies = current->copies;
  size_t done = 0;
  while (done < copies.size() && copies[done].group < current->group - groups) {
    const Copy& copy = copies[done++];
    for (int64_t i = copy.offset; i < copy.offset + copy.count; ++i) {
      history_[static_cast<size_t>(i)].copied_to = false;
    }
    std::memcpy(Shared(copy.offset, copy.count, copy.count, Access::kWrite), copy.from,
                static_cast<size_t>(copy.count));
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<int64_t>(done));
}

}  // namespace

void RunGrid(const GridShape& shape, const std::function<void()>& kernel) {
  if (shape.threads <= 0 || shape.threads % kWarp != 0) throw EmulationError("threads: not a multiple of 32");
  Block block(shape, kernel);
  Block* const before = running;
  running = &block;
  try {
    for (int i = 0; i < shape.blocks; ++i) block.Run(i);
  } catch (...) {
    running = before;
    throw;
  }
  running = before;
}

int ThreadIndex() noexcept {
  return running->current->thread;
}
int BlockIndex() noexcept {
  return running->index;
}
int Blocks() noexcept {
  return running->shape.blocks;
}

void Multiply(const char* what, void* operands, void (*act)(void* const* operands)) {
  Fiber& fiber = *running->current;
  fiber.what = what;
  fiber.operands = operands;
  fiber.act = act;
  fiber.state = State::kMultiplies;
  running->Yield();
}

void SyncWarp() {
  Multiply("SyncWarp", nullptr, nullptr);
}

void SyncBlock() {
  running->current->state = State::kAtBarrier;
  running->Yield();
}

uint8_t* Shared(int64_t offset, int64_t count, int alignment, Access access) {
  return running->Shared(offset, count, alignment, access);
}

void BeginCopy(int64_t offset, const uint8_t* from, int count) {
  running->BeginCopy(offset, from, count);
}
void CommitCopies() {
  ++running->current->group;
}
void WaitForCopies(int groups) {
  running->WaitForCopies(groups);
}

void StopWith(fmt::string_view format, fmt::format_args values) {
  running->error =
      fmt::format("block {}, thread {}: {}", running->index, running->current->thread, fmt::vformat(format, values));
  for (;;) running->Yield();
}

void CheckAlignment(const void* pointer, size_t alignment) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
    Stop("global memory at {}, not a multiple of {}", pointer, alignment);
  }
}

}  // namespace kvanta::emulated
