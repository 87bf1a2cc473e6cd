// Storage scheme of a KV cache: a side is K or V, a scheme is a pair of sides, and every layer may have its own scheme.
// Specification: docs/formats.md, section "Schemes".
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvanta {

// Pages that a query reads in bf16 instead of quantized, by position alone (docs/formats.md, "The page rule").
enum class ExactPages {
  kNone,  // every page is read quantized, the query's own included
  kOpen,  // the page that holds the query's own position is read in bf16
  kTwo,   // that page and the one before it
};

// One side: a number format by its canonical name, and modifiers.
struct KvSide {
  std::string format;     // canonical format name, e.g. "int8"; a name of kvanta::FormatNames()
  bool hadamard = false;  // orthonormal Walsh-Hadamard over head_dim before encoding
  bool mean = false;      // K only: a calibrated mean per (head, channel) is subtracted first
  bool query = false;     // K only, with hadamard: a calibrated matrix that knows the queries in place of the rotation
  int outliers = 0;       // K only: calibrated channels per head stored in bf16 in addition to the codes; even

  bool operator==(const KvSide&) const = default;
};

// Age of a page, and the formats in which queries read it from then on: pages that lie at least `tokens` before the
// query's own page; or, with kFloor, pages that stepped down for want of memory (docs/pressure.md).
struct KvAge {
  static constexpr int64_t kFloor = -1;

  int64_t tokens = 0;  // a multiple of the page size, or kFloor
  KvSide k;            // transformed as in the first level
  KvSide v;
  int sink_pages = 0;  // first pages of a sequence, which never reach the level; 0 to KvScheme::kMaxSinkPages

  bool operator==(const KvAge&) const = default;
};

struct KvScheme {
  KvSide k;
  KvSide v;
  ExactPages exact = ExactPages::kNone;
  int sink_pages = 0;       // attention-sink pages at the start of a sequence, kept exact; 0 to kMaxSinkPages
  int boundary_layers = 0;  // first and last layers of a model that stay in bf16; 0 in the scheme of a single layer

  // Precision by age or by pressure, not both: ascending ages, each in fewer bits than before; at most kMaxAges.
  std::vector<KvAge> ages = {};

  static constexpr int kMaxAges = 2;
  static constexpr int kMaxSinkPages = 64;
  static constexpr int kMaxBoundaryLayers = 1024;
  static constexpr int kMaxOutliers = 64;

  bool operator==(const KvScheme&) const = default;
  // True if the later levels are those of pages that stepped down for want of memory.
  bool HasFloor() const noexcept { return !ages.empty() && ages.front().tokens == KvAge::kFloor; }

  // Parses a preset name or alias ("int4", "fp8"), the explicit syntax "k=int8,v=int4+exact=none", precision by age
  // (docs/ages.md): "0=int8,8192=int4,32768=t3", whose parts are schemes by the distance of a page in tokens, or by
  // pressure (docs/pressure.md): "0=int8,floor=t3".
  // Modifiers: +hadamard -hadamard +mean -mean +query -query +outliers=N +exact=none|open|2 +sink=N +edges=N.
  // mla: for a layer whose K and V are one latent (MLA), where a name stands for the latent's form of its code: int4
  // for mla_int4, fp8 for mla_fp8. Throws InputError that names the value and lists the alternatives. "auto" is
  // resolved by the engine, not here.
  static KvScheme Parse(std::string_view text, bool mla = false);

  // The shortest text that Parse() turns back into this scheme.
  std::string ToString() const;
};

// Level event of a sequence (docs/pressure.md): queries from `position` on read pages [first_page, end_page) from a
// later level, where they do not read them exactly. No page of them is ever read from an earlier level again.
struct KvCacheEvent {
  int64_t position = 0;  // tokens
  int64_t first_page = 0;
  int64_t end_page = 0;
  int level = 0;  // 1 or 2

  bool operator==(const KvCacheEvent&) const = default;
};

// Levels that a sequence was computed with: with the same tokens, replaying its events gives the same bits.
struct KvCacheRecord {
  std::vector<int64_t> pages;        // by level, of those that its next query would see
  std::vector<KvCacheEvent> events;  // by position, not descending
  bool is_replayable = true;         // false: it was computed again, after a preemption, with other events than before
};

// Canonical names of all number formats, in the order of src/formats/all.h.
std::vector<std::string> FormatNames();

// Applies base.boundary_layers (those layers become bf16), then per-layer overrides: "0,1,-1=bf16;2-5=int8" (indices,
// negative from the end, ranges). attention_layers: those that have K and V, ascending, among which boundary layers are
// counted; empty: all. mla: as for KvScheme::Parse. Returns one scheme per layer. Throws InputError on an index out of
// range or a layer named twice.
std::vector<KvScheme> ParseLayerSchemes(const KvScheme& base, std::string_view per_layer, int num_layers,
                                        const std::vector<int>& attention_layers = {}, bool mla = false);
// The same overrides of `schemes`, which has one for each layer.
std::vector<KvScheme> OverrideLayerSchemes(std::vector<KvScheme> schemes, std::string_view per_layer, bool mla = false);

}  // namespace kvanta
