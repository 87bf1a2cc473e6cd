#include "emulated/cuda_grid.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <csetjmp>
#include <cstring>

#include "emulated/cuda_shared_memory.h"

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

enum class State : uint8_t { kRunning, kInWarpOperation, kAtBarrier, kDone };

struct Copy {
  int64_t offset;
  const uint8_t* from;
  int count;
  int group;
};

struct Fiber {
  int thread = 0;
  std::vector<Copy> copies;  // in flight
  int group = 0;             // group of copies that begin now
  std::any kept;             // ThreadState
  State state = State::kRunning;
  bool vote = false;                // at a barrier: AnyThread's
  const char* operation = nullptr;  // warp operation's name
  void* operand = nullptr;
  void (*execute)(void* const*) = nullptr;
  ucontext_t context{};
  bool started = false;
  jmp_buf resume_point;       // once started; swapcontext would take two system calls
  void* sanitizer = nullptr;  // asan's fake stack
  uint8_t* stack = nullptr;
};

class Block {
 public:
  Block(const GridShape& shape, const std::function<void()>& kernel);
  void Run(int index);

  const GridShape& shape;
  const std::function<void()>& kernel;
  int index = 0;
  Fiber* current = nullptr;
  bool any_vote = false;  // of the last barrier
  std::string error;

  void Yield();
  uint8_t* Shared(int64_t offset, int64_t count, int alignment, Access access);
  void BeginCopy(int64_t offset, const uint8_t* from, int count);
  void WaitForCopies(int groups);
  void FenceStores() { shared_.FenceStores(current->thread); }

 private:
  void Resume(Fiber& fiber);
  void RunWarp(int warp);
  bool ReleaseBarrier();
  Fiber* Lane(int warp, int lane) { return fibers_.data() + warp * kWarp + lane; }
  int Warps() const { return shape.threads / kWarp; }

  std::vector<Fiber> fibers_;
  jmp_buf scheduler_resume_point_;
  void* scheduler_sanitizer_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
  SharedMemory shared_;
  int block_time_ = 1;
  std::vector<int> warp_time_;

  friend void FiberMain();
};

thread_local Block* running = nullptr;

// Stacks are reused: allocation would dominate short blocks.
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
  for (;;) {  // one iteration per block
    block.kernel();
    block.current->state = State::kDone;
    block.Yield();
  }
}

Block::Block(const GridShape& grid, const std::function<void()>& code)
    : shape(grid), kernel(code), shared_(grid.shared_bytes, grid.threads) {
  fibers_.resize(static_cast<size_t>(shape.threads));
  for (size_t i = 0; i < fibers_.size(); ++i) {
    fibers_[i].thread = static_cast<int>(i);
    fibers_[i].stack = Stack(i);
#ifdef KVANTA_FIBERS_ASAN
    __asan_unpoison_memory_region(fibers_[i].stack, kStackBytes);  // stale frames of an earlier grid
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
  shared_.Reset();
  warp_time_.assign(static_cast<size_t>(Warps()), 1);
  for (Fiber& fiber : fibers_) {
    fiber.state = State::kRunning;
    fiber.copies.clear();
    fiber.kept.reset();
  }
  do {
    for (int warp = 0; warp < Warps() && error.empty(); ++warp) RunWarp(warp);
  } while (error.empty() && ReleaseBarrier());
  if (!error.empty()) throw EmulationError(error);
}

// Runs a warp until all its lanes are done or at a block barrier.
void Block::RunWarp(int warp) {
  for (;;) {
    int states[4] = {};
    for (int lane = 0; lane < kWarp; ++lane) {
      Fiber& fiber = *Lane(warp, lane);
      if (fiber.state == State::kRunning) Resume(fiber);
      if (!error.empty()) return;
      ++states[static_cast<int>(fiber.state)];
    }
    const Fiber& first = *Lane(warp, 0);
    if (states[static_cast<int>(first.state)] != kWarp) {
      error = fmt::format("block {}: lanes of warp {} diverge: {} in a warp operation, {} at a block barrier, {} done",
                          index, warp, states[1], states[2], states[3]);
      return;
    }
    if (first.state != State::kInWarpOperation) return;
    void* operands[kWarp];
    for (int lane = 0; lane < kWarp; ++lane) {
      const Fiber& fiber = *Lane(warp, lane);
      operands[lane] = fiber.operand;
      if (fiber.execute != first.execute ||
          (fiber.operation != first.operation && std::strcmp(fiber.operation, first.operation) != 0)) {
        error = fmt::format("block {}: warp {} diverges: lane 0 in {}, lane {} in {}", index, warp, first.operation,
                            lane, fiber.operation);
        return;
      }
    }
    if (first.execute != nullptr) {
      first.execute(operands);
    } else {
      ++warp_time_[static_cast<size_t>(warp)];
    }
    for (int lane = 0; lane < kWarp; ++lane) Lane(warp, lane)->state = State::kRunning;
  }
}

// Releases a block barrier that all threads have reached. Returns false if no thread is at one.
bool Block::ReleaseBarrier() {
  int waiting = 0;
  for (const Fiber& fiber : fibers_) waiting += fiber.state == State::kAtBarrier ? 1 : 0;
  if (waiting == 0) return false;
  if (waiting != shape.threads) {
    error =
        fmt::format("block {}: {} of {} threads wait at a barrier, the others are done", index, waiting, shape.threads);
    throw EmulationError(error);
  }
  ++block_time_;
  any_vote = std::ranges::any_of(fibers_, &Fiber::vote);
  for (Fiber& fiber : fibers_) fiber.state = State::kRunning;
  return true;
}

void JumpTo(jmp_buf& point) {
#ifdef KVANTA_FIBERS_ASAN
  // asan's longjmp would unpoison the stack that is left, which takes most of a grid's time.
  static const auto jump = reinterpret_cast<void (*)(jmp_buf, int)>(dlsym(dlopen("libc.so.6", RTLD_LAZY), "_longjmp"));
  jump(point, 1);
#else
  _longjmp(point, 1);
#endif
}

void Block::Resume(Fiber& fiber) {
  current = &fiber;
#ifdef KVANTA_FIBERS_ASAN
  __sanitizer_start_switch_fiber(&scheduler_sanitizer_, fiber.stack, kStackBytes);
#endif
  if (_setjmp(scheduler_resume_point_) == 0) {
    if (fiber.started) JumpTo(fiber.resume_point);
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
  if (_setjmp(current->resume_point) == 0) JumpTo(scheduler_resume_point_);
#ifdef KVANTA_FIBERS_ASAN
  __sanitizer_finish_switch_fiber(current->sanitizer, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
}

uint8_t* Block::Shared(int64_t offset, int64_t count, int alignment, Access access) {
  const auto warp = static_cast<size_t>(current->thread / kWarp);
  return shared_.At(offset, count, alignment, access,
                    {.thread = current->thread, .block_time = block_time_, .warp_time = warp_time_[warp]});
}

void Block::BeginCopy(int64_t offset, const uint8_t* from, int count) {
  Shared(offset, count, count, Access::kWrite);
  CheckAlignment(from, static_cast<size_t>(count));
  shared_.SetCopyPending(offset, count, true);
  current->copies.push_back({.offset = offset, .from = from, .count = count, .group = current->group});
}

void Block::WaitForCopies(int groups) {
  std::vector<Copy>& copies = current->copies;
  size_t done = 0;
  while (done < copies.size() && copies[done].group < current->group - groups) {
    const Copy& copy = copies[done++];
    shared_.SetCopyPending(copy.offset, copy.count, false);
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
    static std::atomic<unsigned> grids = 0;
    const unsigned order = grids++ % 3;
    for (int i = 0; i < shape.blocks; ++i) {
      block.Run(order == 0 ? i : order == 1 ? shape.blocks - 1 - i : (i + shape.blocks / 2) % shape.blocks);
    }
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

void WarpOperation(const char* name, void* operand, void (*execute)(void* const* operands)) {
  Fiber& fiber = *running->current;
  fiber.operation = name;
  fiber.operand = operand;
  fiber.execute = execute;
  fiber.state = State::kInWarpOperation;
  running->Yield();
}

void SyncWarp() {
  WarpOperation("SyncWarp", nullptr, nullptr);
}

void SyncBlock() {
  AnyThread(false);
}

bool AnyThread(bool value) {
  running->current->vote = value;
  running->current->state = State::kAtBarrier;
  running->Yield();
  return running->any_vote;
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
std::any& ThreadState() noexcept {
  return running->current->kept;
}
void FenceStoresForProducts() {
  running->FenceStores();
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
