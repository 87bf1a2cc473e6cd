// Reads of records from a folder, as the prefix cache on disk does it: by one thread, by several, and by io_uring with
// as many reads in flight. Cold files have left the system's file cache; warm ones are in it.
//
//   page_reads_bench --dir DIR [--bytes 65536 443000 1048576] [--depths 1 4 16] [--megabytes 64] [--turns 5]
//                    [--json FILE]
//
// Files are those of store/file_system.h; every way opens, reads and closes each. Bytes are compared before anything is
// timed. Times are medians of turns.
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "bench/option_parser.h"
#include "store/file_system.h"

namespace {

using namespace kvanta;         // NOLINT(google-build-using-namespace): this program is about it
using namespace kvanta::store;  // NOLINT(google-build-using-namespace)

struct Options {
  std::string dir, json;
  std::vector<int64_t> bytes = {65536, 443000, 1 << 20}, depths = {1, 4, 16};
  int64_t megabytes = 64, turns = 5;
};

Options ParseArguments(int argc, char** argv) {
  Options options;
  OptionParser parser;
  parser.Option("--dir", options.dir);
  parser.Option("--bytes", options.bytes);
  parser.Option("--depths", options.depths);
  parser.Option("--megabytes", options.megabytes);
  parser.Option("--turns", options.turns);
  parser.Option("--json", options.json);
  parser.Parse(argc, argv);
  if (options.dir.empty()) throw InputError("--dir is missing");
  return options;
}

// Files of equal size in a separate folder, removed in the end.
class Files {
 public:
  Files(const std::string& dir, int64_t count, int64_t bytes) : folder_(fmt::format("{}/reads-{}", dir, getpid())) {
    content.resize(static_cast<size_t>(bytes));
    std::minstd_rand random(1);
    std::ranges::generate(content, [&] { return static_cast<uint8_t>(random()); });
    if (const FileError error = MakeFolder(folder_)) throw InputError(std::strerror(error));
    for (int64_t i = 0; i < count; ++i) {
      paths.push_back(fmt::format("{}/{}", folder_, i));
      const std::span<const uint8_t> parts[] = {content};
      if (const FileError error = WriteFile(paths.back(), parts, WallClockNs())) throw InputError(std::strerror(error));
    }
  }
  ~Files() {
    for (const std::string& path : paths) RemoveFile(path);
    rmdir(folder_.c_str());
  }
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  // Removes them from the system's file cache.
  void Cool() const {
    for (const std::string& path : paths) {
      const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
      fdatasync(file);
      posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
      close(file);
    }
  }

  std::vector<uint8_t> content;  // of each
  std::vector<std::string> paths;

 private:
  std::string folder_;
};

// Called with the bytes of each file.
using Check = std::function<void(const std::vector<uint8_t>&)>;

void ReadByThreads(const Files& files, int64_t bytes, int64_t depth, const Check& check) {
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    std::vector<uint8_t> content;
    for (size_t i = next++; i < files.paths.size(); i = next++) {
      content.clear();
      if (ReadFile(files.paths[i], static_cast<size_t>(bytes), content) != 0) throw InputError("a read failed");
      check(content);
    }
  };
  std::vector<std::jthread> threads;
  for (int64_t i = 1; i < depth; ++i) threads.emplace_back(work);
  work();
}

// A ring for reads, without liburing: the kernel's interface is three system calls.
class Ring {
 public:
  explicit Ring(unsigned entries) {
    io_uring_params parameters = {};
    ring_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &parameters));
    if (ring_ < 0) throw InputError(fmt::format("io_uring: {}", std::strerror(errno)));
    sq_bytes_ = parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned);
    cq_bytes_ = parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe);
    entry_bytes_ = parameters.sq_entries * sizeof(io_uring_sqe);
    sq_ = Map(sq_bytes_, IORING_OFF_SQ_RING);
    cq_ = Map(cq_bytes_, IORING_OFF_CQ_RING);
    entries_ = reinterpret_cast<io_uring_sqe*>(Map(entry_bytes_, IORING_OFF_SQES));
    sq_tail_ = reinterpret_cast<unsigned*>(sq_ + parameters.sq_off.tail);
    sq_mask_ = *reinterpret_cast<unsigned*>(sq_ + parameters.sq_off.ring_mask);
    sq_array_ = reinterpret_cast<unsigned*>(sq_ + parameters.sq_off.array);
    cq_head_ = reinterpret_cast<unsigned*>(cq_ + parameters.cq_off.head);
    cq_tail_ = reinterpret_cast<unsigned*>(cq_ + parameters.cq_off.tail);
    cq_mask_ = *reinterpret_cast<unsigned*>(cq_ + parameters.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(cq_ + parameters.cq_off.cqes);
  }
  ~Ring() {
    munmap(sq_, sq_bytes_);
    munmap(cq_, cq_bytes_);
    munmap(entries_, entry_bytes_);
    close(ring_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void Read(int file, std::vector<uint8_t>& content, uint64_t tag) {
    const unsigned tail = *sq_tail_;
    io_uring_sqe& entry = entries_[tail & sq_mask_];
    entry = {};
    entry.opcode = IORING_OP_READ;
    entry.fd = file;
    entry.addr = reinterpret_cast<uint64_t>(content.data());
    entry.len = static_cast<unsigned>(content.size());
    entry.user_data = tag;
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
    ++queued_;
  }

  // Submits what is queued and waits for one read: its tag and result.
  std::pair<uint64_t, int> Wait() {
    const unsigned head = *cq_head_;
    const bool ready = head != std::atomic_ref(*cq_tail_).load(std::memory_order_acquire);
    if (queued_ > 0 || !ready) {
      const auto done = syscall(__NR_io_uring_enter, ring_, queued_, ready ? 0 : 1, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (done < 0) throw InputError(fmt::format("io_uring: {}", std::strerror(errno)));
      queued_ -= static_cast<unsigned>(done);
    }
    const io_uring_cqe& completion = completions_[head & cq_mask_];
    const std::pair<uint64_t, int> result = {completion.user_data, completion.res};
    std::atomic_ref(*cq_head_).store(head + 1, std::memory_order_release);
    return result;
  }

 private:
  uint8_t* Map(size_t bytes, uint64_t at) const {
    void* mapped =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, static_cast<off_t>(at));
    if (mapped == MAP_FAILED) throw InputError(std::strerror(errno));
    return static_cast<uint8_t*>(mapped);
  }

  int ring_ = -1;
  unsigned queued_ = 0, sq_mask_ = 0, cq_mask_ = 0;
  size_t sq_bytes_ = 0, cq_bytes_ = 0, entry_bytes_ = 0;
  uint8_t *sq_ = nullptr, *cq_ = nullptr;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  io_uring_cqe* completions_ = nullptr;
};

void ReadByRing(const Files& files, int64_t bytes, int64_t depth, const Check& check) {
  Ring ring(static_cast<unsigned>(depth));
  struct Slot {
    int file = -1;
    std::vector<uint8_t> content;
  };
  std::vector<Slot> slots(std::min(static_cast<size_t>(depth), files.paths.size()));
  size_t next = 0;
  const auto begin = [&](size_t slot) {
    slots[slot].file = open(files.paths[next++].c_str(), O_RDONLY | O_CLOEXEC);
    slots[slot].content.clear();
    slots[slot].content.resize(static_cast<size_t>(bytes));
    ring.Read(slots[slot].file, slots[slot].content, slot);
  };
  for (size_t slot = 0; slot < slots.size(); ++slot) begin(slot);
  for (size_t done = 0; done < files.paths.size(); ++done) {
    const auto [slot, result] = ring.Wait();
    close(slots[slot].file);
    if (result != bytes) throw InputError(fmt::format("a read returned {} of {} bytes", result, bytes));
    check(slots[slot].content);
    if (next < files.paths.size()) begin(slot);
  }
}

double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

using Way = std::function<void(const Files&, int64_t bytes, int64_t depth, const Check&)>;

nlohmann::json Measure(const Options& options, const Files& files, int64_t bytes, int64_t depth, bool cold) {
  const std::pair<const char*, Way> ways[] = {{"threads", ReadByThreads}, {"io_uring", ReadByRing}};
  for (const auto& [name, way] : ways) {
    std::atomic<size_t> same = 0;
    way(files, bytes, depth, [&](const std::vector<uint8_t>& content) { same += content == files.content ? 1 : 0; });
    if (same != files.paths.size()) {
      throw InputError(fmt::format("{}: {} of {} files have their bytes", name, same.load(), files.paths.size()));
    }
  }
  std::map<std::string, std::vector<double>> seconds, cpu;
  for (int64_t turn = 0; turn < options.turns; ++turn) {
    for (const auto& [name, way] : ways) {
      if (cold) files.Cool();
      const double start = Now(), cpu_start = CpuSeconds();
      way(files, bytes, depth, [](const std::vector<uint8_t>&) {});
      seconds[name].push_back(Now() - start);
      cpu[name].push_back(CpuSeconds() - cpu_start);
    }
  }
  nlohmann::json row = {{"cold", cold}, {"bytes", bytes}, {"files", files.paths.size()}, {"depth", depth}};
  for (const auto& [name, way] : ways) {
    const double total = static_cast<double>(bytes) * static_cast<double>(files.paths.size());
    row[name] = {{"ms", 1e3 * Median(seconds[name])},
                 {"gb_s", total / Median(seconds[name]) / 1e9},
                 {"cpu_ms", 1e3 * Median(cpu[name])}};
  }
  return row;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = ParseArguments(argc, argv);
    nlohmann::json rows = nlohmann::json::array();
    for (const int64_t bytes : options.bytes) {
      const Files files(options.dir, std::max<int64_t>(1, (options.megabytes << 20) / bytes), bytes);
      for (const bool cold : {false, true}) {
        for (const int64_t depth : options.depths) {
          rows.push_back(Measure(options, files, bytes, depth, cold));
          fmt::print("{}\n", rows.back().dump());
        }
      }
    }
    if (!options.json.empty()) std::ofstream(options.json) << nlohmann::json{{"rows", rows}}.dump(1) << "\n";
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
  }
  return 0;
}
