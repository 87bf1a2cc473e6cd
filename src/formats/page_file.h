// One page of a KV cache group's layers as a file: for disk, transfer and tests. Self-describing, checked, the same on
// every machine.
//
//   0   8  magic "KVANTAPG"
//   8   4  version, 1
//   12  4  header bytes, a multiple of 16
//   16  8  payload bytes
//   24  8  XXH64 (seed 0) of bytes 0..24, the header and the payload
//   32     header: JSON, padded with spaces
//   ...    payload: the record's canonical bytes, nothing after it
//
// All integers little endian; the payload starts at a multiple of 16.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/page_record.h"
#include "formats/scheme.h"

namespace kvanta::formats {

struct PageHeader {
  std::string model;  // identity of the model, as its owner defines it
  RecordKind record = RecordKind::kQuantized;
  CacheLayout layout;
  int group = 0;                    // KV cache group whose layers the page has
  std::vector<LayerScales> scales;  // per layer; empty if no side has a static scale or a mean
};

struct PageFile {
  PageHeader header;
  std::span<const uint8_t> payload;  // canonical bytes, inside the file that was read
};

// `payload`: RecordBytes(header.layout, header.group, header.record) canonical bytes, else InputError.
std::vector<uint8_t> WritePageFile(const PageHeader& header, std::span<const uint8_t> payload);

// Trusts nothing in `file`; throws InputError with the reason, naming `name`.
PageFile ReadPageFile(std::span<const uint8_t> file, std::string_view name);

// Throws InputError unless the page is of this model and its bytes mean the same in this cache.
void CheckPageFits(const PageHeader& page, const PageHeader& cache, std::string_view name);

}  // namespace kvanta::formats
