// A page of a prefix cache as Engine::ExportPage gives it, read back.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "formats/page_header.h"
#include "formats/page_record.h"
#include "kvanta/engine.h"
#include "store/page_file.h"

namespace kvanta::engine {

struct ExportedPage {
  std::vector<uint8_t> file;
  store::PageFile page;  // views of the file
  formats::PageHeader header;
  formats::RecordKind kind = formats::RecordKind::kQuantized;

  std::vector<uint8_t> Canonical() const {
    return formats::RecordToCanonical(header.layout, page.id.group, kind, page.payload);
  }
};

inline ExportedPage Export(Engine& engine, std::span<const int32_t> tokens, int index) {
  ExportedPage exported{.file = engine.ExportPage(tokens, index), .page = {}, .header = {}};
  exported.page = store::ReadPageFile(exported.file);
  EXPECT_EQ(exported.page.fault, "");
  EXPECT_EQ(exported.page.version, 2U);
  const auto identity = nlohmann::ordered_json::parse(exported.page.identity_text);
  exported.header = formats::PageHeaderFromJson(identity["pages"].dump());
  if (exported.page.id.kind == cache::PageKind::kExact) exported.kind = formats::RecordKind::kExact;
  return exported;
}

}  // namespace kvanta::engine
