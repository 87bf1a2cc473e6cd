#include "store/record_file.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>
#include <new>

#include "formats/bytes.h"

namespace kvanta::store {
namespace {

using formats::LoadBytes;
using formats::StoreBytes;

constexpr std::array<char, 8> kMagic = {'K', 'V', 'A', 'N', 'T', 'A', 'P', 'C'};
constexpr uint32_t kVersion = 1;
constexpr size_t kChecksumAt = 24;
constexpr size_t kIdentityAt = 32;
constexpr size_t kKeyAt = 64;
constexpr size_t kGroupAt = 96;
constexpr size_t kKindAt = 100;

// `head` ends where `payload` begins.
uint64_t Checksum(std::span<const uint8_t> head, std::span<const uint8_t> payload) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  if (state == nullptr) throw std::bad_alloc();
  XXH3_64bits_reset(state.get());
  XXH3_64bits_update(state.get(), head.data(), kChecksumAt);
  XXH3_64bits_update(state.get(), head.data() + kIdentityAt, head.size() - kIdentityAt);
  XXH3_64bits_update(state.get(), payload.data(), payload.size());
  return XXH3_64bits_digest(state.get());
}

uint32_t StoredKind(cache::PageKind kind) {
  return kind == cache::PageKind::kExact ? 1 : 0;
}

bool Holds(std::span<const uint8_t> file, size_t at, const PageKey& key) {
  return std::ranges::equal(file.subspan(at, key.size()), key);
}

}  // namespace

std::string FileName(const RecordId& id) {
  return fmt::format("{}-{}{}", Hex(id.key), id.group, id.kind == cache::PageKind::kExact ? 'x' : 'q');
}

bool ParseFileName(std::string_view name, RecordId& id) {
  const size_t digits = 2 * id.key.size();
  if (name.size() < digits + 3 || name[digits] != '-') return false;
  for (size_t i = 0; i < id.key.size(); ++i) {
    const char* at = name.data() + 2 * i;
    const auto [end, error] = std::from_chars(at, at + 2, id.key[i], 16);
    if (error != std::errc() || end != at + 2) return false;
  }
  const char* last = name.data() + name.size() - 1;
  const auto [end, error] = std::from_chars(name.data() + digits + 1, last, id.group);
  if (error != std::errc() || end != last || (*last != 'q' && *last != 'x')) return false;
  id.kind = *last == 'x' ? cache::PageKind::kExact : cache::PageKind::kQuantized;
  return name == FileName(id);  // one spelling only
}

std::vector<uint8_t> EncodeRecordHeader(const PageKey& identity, const RecordId& id, std::span<const int32_t> tokens,
                                        std::span<const uint8_t> payload) {
  std::vector<uint8_t> head(kRecordHeaderBytes + tokens.size_bytes());
  std::copy(kMagic.begin(), kMagic.end(), head.begin());
  StoreBytes(head.data() + 8, kVersion);
  StoreBytes(head.data() + 12, static_cast<uint32_t>(tokens.size()));
  StoreBytes(head.data() + 16, uint64_t{payload.size()});
  std::ranges::copy(identity, head.begin() + kIdentityAt);
  std::ranges::copy(id.key, head.begin() + kKeyAt);
  StoreBytes(head.data() + kGroupAt, static_cast<uint32_t>(id.group));
  StoreBytes(head.data() + kKindAt, StoredKind(id.kind));
  if (!tokens.empty()) std::memcpy(head.data() + kRecordHeaderBytes, tokens.data(), tokens.size_bytes());
  StoreBytes(head.data() + kChecksumAt, Checksum(head, payload));
  return head;
}

RecordView ReadRecord(std::span<const uint8_t> file, const PageKey& identity, const RecordId& id) {
  RecordView view;
  const auto refuse = [&view](std::string fault) {
    view.fault = std::move(fault);
    return view;
  };
  if (file.size() < kRecordHeaderBytes) return refuse(fmt::format("{} bytes are too few", file.size()));
  if (!std::equal(kMagic.begin(), kMagic.end(), file.begin())) return refuse("it does not begin with KVANTAPC");
  const auto version = LoadBytes<uint32_t>(file.data() + 8);
  if (version != kVersion) return refuse(fmt::format("version {} is not {}", version, kVersion));
  const size_t token_bytes = sizeof(int32_t) * size_t{LoadBytes<uint32_t>(file.data() + 12)};
  const auto payload_bytes = LoadBytes<uint64_t>(file.data() + 16);
  const size_t rest = file.size() - kRecordHeaderBytes;
  if (token_bytes > rest || payload_bytes != rest - token_bytes) {
    return refuse(fmt::format("{} bytes of token ids and a payload of {} bytes do not make a file of {}", token_bytes,
                              payload_bytes, file.size()));
  }
  const auto head = file.first(kRecordHeaderBytes + token_bytes);
  view.payload = file.subspan(head.size());
  if (Checksum(head, view.payload) != LoadBytes<uint64_t>(file.data() + kChecksumAt)) {
    return refuse("its checksum is wrong");
  }
  if (!Holds(file, kIdentityAt, identity)) return refuse("it belongs to another model or cache format");
  if (!Holds(file, kKeyAt, id.key) || LoadBytes<uint32_t>(file.data() + kGroupAt) != static_cast<uint32_t>(id.group) ||
      LoadBytes<uint32_t>(file.data() + kKindAt) != StoredKind(id.kind)) {
    return refuse("it is the record of another page");
  }
  view.tokens = head.subspan(kRecordHeaderBytes);
  return view;
}

RecordView ReadRecord(std::span<const uint8_t> file, const PageKey& identity, const RecordId& id,
                      std::span<const int32_t> tokens, size_t payload_bytes) {
  RecordView view = ReadRecord(file, identity, id);
  if (!view.fault.empty()) return view;
  if (view.payload.size() != payload_bytes) {
    view.fault = fmt::format("a payload of {} bytes, the record has {}", view.payload.size(), payload_bytes);
  } else if (view.tokens.size() != tokens.size_bytes() ||
             std::memcmp(view.tokens.data(), tokens.data(), tokens.size_bytes()) != 0) {
    view.fault = "it has other token ids";
  }
  return view;
}

}  // namespace kvanta::store
