// The attention kernels of one ISA unit. QK and PV are chosen per *side*, by its code, and called once per page and
// tile of query rows, so formats never multiply. Cells are in the cache's layout (src/formats/cell_layout.h).
//
// Arithmetic of one row (the same in decode and prefill, for any tile of rows):
//   score[t] = row_scale * (token_scale[t] * sum_b (block_scale[b][t] * <query_b, code[t]_b> + block_offset[b][t] *
//              sum(query_b)) + token_offset[t] * sum(query))                                       (KeyKernel)
//   p[t]     = 2^(score[t] - m), exactly 0 where masked or below 2^-127                         (softmax)
//   out[c]   = out[c] * rescale + sum_t p[t] * (scale[t, b(c)] * code[t][c] + zero[t, b(c)])     (ValueKernel)
// Keys with scales per channel meet queries that were multiplied with these first, tile by tile.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "formats/scale_type.h"

namespace kvanta::kernels {

inline constexpr int kMaxPageTokens = 128;
inline constexpr int kMaxHeadDim = 512;  // the rank of latents; other heads have up to 256
inline constexpr int kPassRows = 16;     // most rows of one call of a kernel

// Scores are logits in powers of 2: row_scale and bias have this factor in them.
inline constexpr float kLog2E = 0x1.715476p0f;

// Element types whose queries and probabilities are quantized to 8 bits (codes_subbyte.h); other integers: to 16.
using formats::IsSubbyte;

// The multiply-adds that attention over a code is made of: what its kernels cannot be faster than (machine_limits.h).
//
//   dot       codes                           amx                        avx512                     avx2 and portable
//   kF32      fp32, fp16                      f32 multiply-add           the same                   the same
//   kBf16     bf16, fp8, e3m2                 bf16, two per product      f32 multiply-add           the same
//   kWide     8 bits, Lloyd-Max levels        bytes, two per product     vpdpbusd, two per product  vpmaddwd of 16 bits
//   kSubbyte   integers up to 6 bits, e2m1     bytes                      vpdpbusd                   vpmaddubsw (avx2)
enum class Dot : uint8_t { kF32, kBf16, kWide, kSubbyte };
inline constexpr int kDots = static_cast<int>(Dot::kSubbyte) + 1;

constexpr Dot DotOf(formats::ElementType code) noexcept {
  if (!formats::IsInteger(code))
    return formats::CodeBits(code) <= 8 || code == formats::ElementType::kBf16 ? Dot::kBf16 : Dot::kF32;
  return IsSubbyte(code) ? Dot::kSubbyte : Dot::kWide;
}

struct ScaleSection {
  const uint8_t* data = nullptr;  // null: there is none
  formats::ScaleType type = formats::ScaleType::kNone;

  explicit operator bool() const noexcept { return data != nullptr; }
};

// One cell as a kernel reads it. Zeros and channel scales are fp16.
struct CellView {
  const uint8_t* codes = nullptr;
  ScaleSection block_scales = {};             // [blocks][page_tokens]
  ScaleSection token_scales = {};             // [page_tokens]
  const uint16_t* block_offsets = nullptr;    // [blocks][page_tokens], or null
  const uint16_t* token_offsets = nullptr;    // [page_tokens], or null
  const uint16_t* channel_scales = nullptr;   // [page_tokens / tile][head_dim], or null
  const uint16_t* channel_offsets = nullptr;  // the same
  int page_tokens = 0;                        // 16, 32, 64 or 128
  int head_dim = 0;                           // multiple of 8, at most kMaxHeadDim
  int block = 0;                              // channels per block scale; 0 without
  int tile = 0;                               // tokens per channel scale; 0 without
};

inline constexpr int64_t kWeightBytes = int64_t{4} * kMaxPageTokens * (kMaxHeadDim / 16) + 256;  // of one row

// Scratch of kernels: for one call, and, of each side, for what a cell's codes become, which later passes over the same
// slots may find again.
inline constexpr int64_t kCallWorkspaceBytes = kPassRows * kWeightBytes;
inline constexpr int64_t kKeptCodeBytes = int64_t{2} * kMaxPageTokens * kMaxHeadDim;
inline constexpr int64_t kKeptScaleBytes = 96 << 10;  // of values
inline constexpr int64_t kKeptKeyScaleBytes = 32 << 10;
inline constexpr int64_t kWorkspaceBytes =
    kCallWorkspaceBytes + 2 * kKeptCodeBytes + kKeptScaleBytes + kKeptKeyScaleBytes;

// Passes over the same slots of a cell, one after the other and with the same room; later ones of no more rows than the
// first.
enum class WorkspaceUse : uint8_t { kNone, kFill, kReuse };

// What a later call will read: touched line by line while this call computes, in two streams, from the start and from
// the middle. One stream keeps too few reads in flight.
struct Prefetch {
  const uint8_t* next = nullptr;
  const uint8_t* end = nullptr;  // of the first stream
  int64_t second = 0;            // bytes from the first stream to the second, which is as long
};

struct KeyPass {
  CellView cell;
  int groups = 0;                  // groups of 16 tokens to score, from token 0
  int rows = 0;                    // 1..kPassRows
  const uint8_t* query = nullptr;  // prepared rows, `query_stride` bytes apart
  int64_t query_stride = 0;
  const float* row_scale = nullptr;  // [rows]
  float* scores = nullptr;           // [rows][kMaxPageTokens]
  uint8_t* workspace = nullptr;  // scratch of kWorkspaceBytes, 64-byte aligned; a kernel of values may have the same
  WorkspaceUse workspace_use = WorkspaceUse::kNone;
  Prefetch prefetch;
};

struct KeyKernel {
  // Bytes of one prepared query row, a multiple of 64.
  int64_t (*query_bytes)(int head_dim);
  // Prepares a transformed query row (rounds it to 16 bits for integer codes, one run of `block` channels knows its
  // own sum); returns the factor that its dots must be multiplied with.
  float (*prepare)(const float* query, int head_dim, int block, uint8_t* out);
  void (*score)(const KeyPass& pass);
};

struct ValuePass {
  CellView cell;
  int begin = 0;  // visible tokens [begin, end) of the page, the same for all rows
  int end = 0;
  int rows = 0;                    // 1..kPassRows
  const float* p = nullptr;        // [rows][kMaxPageTokens], 0 outside [begin, end)
  float scale = 1;                 // static scale of the side
  const float* rescale = nullptr;  // [rows], factor of what `out` holds
  float* out = nullptr;            // [rows], `out_stride` floats apart: [head_dim]
  int64_t out_stride = 0;
  uint8_t* workspace = nullptr;  // scratch of kWorkspaceBytes, 64-byte aligned
  WorkspaceUse workspace_use = WorkspaceUse::kNone;
  Prefetch prefetch;
};

struct ValueKernel {
  void (*accumulate)(const ValuePass& pass);
};

// One row's online softmax over the pages seen so far.
struct SoftmaxState {
  float max;  // -infinity before the first page
  float sum;
};

struct SoftmaxPass {
  int begin = 0;  // visible tokens [begin, end), at least one, the same for all rows
  int end = 0;
  int page_tokens = 0;
  int rows = 0;                   // 1..kPassRows
  float softcap = 0;              // 0: none
  const float* bias = nullptr;    // [rows] added to the scores before the softcap, or null; without one it cancels
  float* scores = nullptr;        // in: scores, out: p; [rows][kMaxPageTokens]
  SoftmaxState* state = nullptr;  // [rows]
  float* rescale = nullptr;       // out: [rows]
  Prefetch prefetch = {};
};

// Codes of latents, which lie in K's order (src/formats/cell_layout.h), in V's.
struct TransposePass {
  const uint8_t* keys = nullptr;
  int64_t row_bytes = 0;  // of a token
  int element_bytes = 0;  // 4, 2 or 1: what stays together in V's order
  int groups = 0;         // of 16 tokens, from token 0
  uint8_t* values = nullptr;
};

struct AttentionKernels {
  // What a thread calls before and after it calls the others, where they need a state of the CPU's; null else.
  void (*enter)() = nullptr;
  void (*leave)() = nullptr;
  int pass_rows = 8;                       // rows of a call that the unit is fastest with, where there are as many
  KeyKernel keys[formats::kElementTypes];  // by formats::ElementType
  KeyKernel tiled_keys[formats::kElementTypes];  // of keys with scales per channel; uint4 and uint2 only
  ValueKernel values[formats::kElementTypes];
  // out = formats::Hadamard of x, the same bits, f32 [head_dim]; out may be x.
  void (*transform)(const float* x, int head_dim, float* out);
  void (*transpose)(const TransposePass& pass);
  void (*softmax)(const SoftmaxPass& pass);
  // (state, out) := merge of itself and `other` by log-sum-exp; an empty state (max -infinity) is the identity.
  void (*combine)(SoftmaxState& state, float* out, const SoftmaxState& other, const float* other_out, int head_dim);
  // result = out / sum, f32 [head_dim].
  void (*normalize)(const SoftmaxState& state, const float* out, int head_dim, float* result);
};

// Of a thread that calls kernels as long as this lives. Scopes do not nest.
class KernelScope {
 public:
  explicit KernelScope(const AttentionKernels& kernels) noexcept : leave_(kernels.leave) {
    if (kernels.enter != nullptr) kernels.enter();
  }
  ~KernelScope() {
    if (leave_ != nullptr) leave_();
  }
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
  void (*leave_)();
};

}  // namespace kvanta::kernels
