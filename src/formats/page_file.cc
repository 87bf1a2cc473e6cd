#include "formats/page_file.h"
#include "base/quote.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <memory>

#include "base/math.h"
#include "formats/bytes.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

constexpr std::array<char, 8> kMagic = {'K', 'V', 'A', 'N', 'T', 'A', 'P', 'G'};
constexpr uint32_t kVersion = 1;
constexpr size_t kPrefixBytes = 32;
constexpr size_t kChecksumAt = 24;
constexpr size_t kAlignment = 16;
constexpr size_t kMaxHeaderBytes = size_t{16} << 20U;

// Checksum of everything except its own bytes.
uint64_t Checksum(std::span<const uint8_t> file) {
  const std::unique_ptr<XXH64_state_t, decltype(&XXH64_freeState)> state(XXH64_createState(), &XXH64_freeState);
  if (state == nullptr) throw std::bad_alloc();
  XXH64_reset(state.get(), 0);
  XXH64_update(state.get(), file.data(), kChecksumAt);
  XXH64_update(state.get(), file.data() + kPrefixBytes, file.size() - kPrefixBytes);
  return XXH64_digest(state.get());
}

PageFile ReadChecked(std::span<const uint8_t> file) {
  if (file.size() < kPrefixBytes) throw InputError(fmt::format("{} bytes are too few", file.size()));
  if (!std::equal(kMagic.begin(), kMagic.end(), file.begin())) throw InputError("it does not begin with KVANTAPG");
  const auto version = LoadBytes<uint32_t>(file.data() + 8);
  if (version != kVersion) throw InputError(fmt::format("version {} is not {}", version, kVersion));
  const size_t header_bytes = LoadBytes<uint32_t>(file.data() + 12);
  const auto payload_bytes = LoadBytes<uint64_t>(file.data() + 16);
  const size_t rest = file.size() - kPrefixBytes;
  if (header_bytes % kAlignment != 0 || header_bytes > kMaxHeaderBytes || header_bytes > rest ||
      payload_bytes != rest - header_bytes) {
    throw InputError(fmt::format("a header of {} and a payload of {} bytes do not make a file of {}", header_bytes,
                                 payload_bytes, file.size()));
  }
  if (Checksum(file) != LoadBytes<uint64_t>(file.data() + kChecksumAt)) throw InputError("its checksum is wrong");

  const auto header = file.subspan(kPrefixBytes, header_bytes);
  PageFile page;
  page.header = PageHeaderFromJson({reinterpret_cast<const char*>(header.data()), header.size()});
  page.payload = file.subspan(kPrefixBytes + header_bytes);
  const int64_t expected = RecordBytes(page.header.layout, page.header.group, page.header.record);
  if (page.payload.size() != static_cast<size_t>(expected)) {
    throw InputError(fmt::format("a payload of {} bytes, its header describes {}", page.payload.size(), expected));
  }
  return page;
}

}  // namespace

std::vector<uint8_t> WritePageFile(const PageHeader& header, std::span<const uint8_t> payload) {
  if (payload.size() != static_cast<size_t>(RecordBytes(header.layout, header.group, header.record))) {
    throw InputError(fmt::format("a page payload of {} bytes for a cache whose pages have {}", payload.size(),
                                 RecordBytes(header.layout, header.group, header.record)));
  }
  if (!header.scales.empty() && header.scales.size() != header.layout.layers.size()) {
    throw InputError(
        fmt::format("scales of {} layers for a page of {}", header.scales.size(), header.layout.layers.size()));
  }
  std::string json = PageHeaderToJson(header);
  json.resize(static_cast<size_t>(RoundUp(std::ssize(json), kAlignment)), ' ');
  if (json.size() > kMaxHeaderBytes)
    throw InputError(fmt::format("a page header of {} bytes is too long", json.size()));

  std::vector<uint8_t> file(kPrefixBytes + json.size() + payload.size());
  std::copy(kMagic.begin(), kMagic.end(), file.begin());
  StoreBytes(file.data() + 8, kVersion);
  StoreBytes(file.data() + 12, static_cast<uint32_t>(json.size()));
  StoreBytes(file.data() + 16, uint64_t{payload.size()});
  std::copy(json.begin(), json.end(), file.begin() + kPrefixBytes);
  std::copy(payload.begin(), payload.end(), file.begin() + static_cast<std::ptrdiff_t>(kPrefixBytes + json.size()));
  StoreBytes(file.data() + kChecksumAt, Checksum(file));
  return file;
}

PageFile ReadPageFile(std::span<const uint8_t> file, std::string_view name) {
  try {
    return ReadChecked(file);
  } catch (const InputError& error) {
    throw InputError(fmt::format("page file {}: {}", Sanitize(name), error.what()));
  }
}

void CheckPageFits(const PageHeader& page, const PageHeader& cache, std::string_view name) {
  const auto refuse = [&](std::string_view what, const std::string& theirs, const std::string& ours) {
    throw InputError(fmt::format("page file {}: {} '{}' is not this cache's '{}'", Sanitize(name), what, theirs, ours));
  };
  if (page.model != cache.model) refuse("model", Sanitize(page.model), Sanitize(cache.model));
  if (page.layout.Identity() != cache.layout.Identity()) {
    refuse("layout", page.layout.Identity(), cache.layout.Identity());
  }
  // All that remains of the header are the scales.
  PageHeader same_record = cache;
  same_record.record = page.record;
  same_record.group = page.group;
  if (PageHeaderToJson(page) != PageHeaderToJson(same_record)) {
    throw InputError(fmt::format(
        "page file {}: its static scales, means, matrices of +query or outlier channels are not this cache's",
        Sanitize(name)));
  }
}

}  // namespace kvanta::formats
