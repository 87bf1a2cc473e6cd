// Attention kernels of one ISA unit. QK and PV kernels are chosen separately, by the element type of their side, and
// called once per page and block of query rows, so the number of kernels is the sum over formats, not the product.
// Cells are in the cache's layout (src/formats/cell_layout.h).
//
// Arithmetic of one row, the same in decode and prefill and for any number of rows in a call:
//   score[t] = row_scale * (token_scale[t] * sum_b (block_scale[b][t] * <query_b, code[t]_b> + block_offset[b][t] *
//              sum(query_b)) + token_offset[t] * sum(query))                                       (KeyKernel)
//   p[t]     = 2^(score[t] - max), exactly 0 where masked or below 2^-127                        (softmax)
//   out[c]   = out[c] * rescale + sum_t p[t] * (scale[t, b(c)] * code[t][c] + offset[t, b(c)])     (ValueKernel)
// For keys with scales per channel, the query is multiplied by the scales first, once per token group.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "formats/element_type.h"
#include "formats/klt.h"
#include "formats/scale_type.h"
#include "formats/trellis.h"

namespace kvanta::kernels {

inline constexpr int kMaxPageTokens = 128;
inline constexpr int kMaxHeadDim = 512;  // and the largest rank of latents
inline constexpr int kPassRows = 16;     // maximum rows of one kernel call

// Scores are logits to base 2: row_scale and bias include this factor.
inline constexpr float kLog2E = 0x1.715476p0f;

using formats::IsSubbyte;
// Element types whose queries and scaled probabilities are quantized to 8 bits; other integers: to 16.
constexpr bool HasByteOperands(formats::ElementType type) noexcept {
  return IsSubbyte(type) || formats::IsTrellis(type);
}
// fp8, and what is expanded to it.
constexpr bool IsFp8(formats::ElementType type) noexcept {
  return !formats::IsInteger(type) && formats::CodeBits(type) <= 8;
}
// False for element types that no format scales by blocks of channels.
constexpr bool HasBlockScales(formats::ElementType type) noexcept {
  return formats::IsInteger(type) || IsFp8(type);
}
inline constexpr float kMaxByteQuery = 127;  // a signed byte
inline constexpr float kMaxByteProb = 255;   // an unsigned byte

struct ScaleSection {
  const uint8_t* data = nullptr;  // null: none
  formats::ScaleType type = formats::ScaleType::kNone;

  explicit operator bool() const noexcept { return data != nullptr; }
};

// One cell as a kernel reads it. Offsets and channel scales are fp16.
struct CellView {
  const uint8_t* codes = nullptr;
  ScaleSection block_scales = {};             // [blocks][page_tokens]
  ScaleSection token_scales = {};             // [page_tokens]
  const uint16_t* block_offsets = nullptr;    // [blocks][page_tokens], or null
  const uint16_t* token_offsets = nullptr;    // [page_tokens], or null
  const uint16_t* channel_scales = nullptr;   // [page_tokens / token_group][head_dim], or as klt_group.h has them
  const uint16_t* channel_offsets = nullptr;  // likewise
  int page_tokens = 0;                        // 16, 32, 64 or 128
  int head_dim = 0;                           // multiple of 8, at most kMaxHeadDim
  int block = 0;                              // channels per block scale; 0: none
  int token_group = 0;                        // tokens per channel scale; 0: none
};

// Distance between the scaled probabilities of consecutive rows, for one block: constant, so that one register
// addresses all rows.
template <int kOperandBytes>
inline constexpr int64_t kProbRowBytes = int64_t{kMaxPageTokens} * kOperandBytes;
inline constexpr int64_t kScaledProbBytes = int64_t{4} * kMaxPageTokens * (kMaxHeadDim / 16) + 256;  // per query row

// Kernel workspace: scratch of one call, then for each side the decoded codes and scales of a cell, which later calls
// over the same slots may reuse.
inline constexpr int64_t kCallWorkspaceBytes = kPassRows * kScaledProbBytes;
inline constexpr int64_t kReusedCodeBytes = int64_t{2} * kMaxPageTokens * kMaxHeadDim;
inline constexpr int64_t kReusedValueScaleBytes = 96 << 10;
inline constexpr int64_t kReusedKeyScaleBytes = 32 << 10;
inline constexpr int64_t kWorkspaceBytes =
    kCallWorkspaceBytes + 2 * kReusedCodeBytes + kReusedValueScaleBytes + kReusedKeyScaleBytes;

// Reuse of a cell's decoded codes and scales: a call stores them in the workspace (kFill) or reads them from it
// (kReuse). Consecutive calls over the same slots of a cell share a workspace; later calls have no more rows than the
// first.
enum class WorkspaceUse : uint8_t { kNone, kFill, kReuse };

// Memory that a later call will read, prefetched line by line while this call computes, in two streams (from the start
// and from the middle): one stream keeps too few reads in flight.
struct Prefetch {
  const uint8_t* next = nullptr;
  const uint8_t* end = nullptr;  // end of the first stream
  int64_t second = 0;            // offset in bytes of the second stream, of the same length
  int64_t later = 0;             // offset in bytes of the memory read after this one, for the second-level cache; or 0
};

struct KeyPass {
  CellView cell;
  int groups = 0;                  // groups of 16 tokens to score, from token 0
  int rows = 0;                    // 1..kPassRows
  const uint8_t* query = nullptr;  // prepared rows, `query_stride` bytes apart
  int64_t query_stride = 0;
  const float* row_scale = nullptr;  // [rows]
  float* scores = nullptr;           // [rows][kMaxPageTokens]
  uint8_t* workspace = nullptr;      // kWorkspaceBytes, 64-byte aligned; may be shared with the value kernel
  WorkspaceUse workspace_use = WorkspaceUse::kNone;
  const formats::BitAllocation* allocation = nullptr;  // only for element types with IsAllocated()
  Prefetch prefetch = {};
};

struct KeyKernel {
  // Bytes of one prepared query row, a multiple of 64.
  int64_t (*query_bytes)(int head_dim);
  // Prepares a transformed query row: quantizes it to 8 or 16 bits for integer codes, may round it to bf16
  // or fp16 (AttentionKernels::OperandsOf), and stores the sum of each block of `block` channels. Returns the factor
  // for its dots.
  float (*prepare)(const float* query, int head_dim, int block, uint8_t* out);
  void (*score)(const KeyPass& pass);
};

struct ValuePass {
  CellView cell;
  int begin = 0;  // visible tokens [begin, end) of the page, the same for all rows
  int end = 0;
  int rows = 0;                    // 1..kPassRows
  const float* p = nullptr;        // [rows][kMaxPageTokens], 0 outside [begin, end); or null: ValueKernel::softmax
  float scale = 1;                 // static scale of the side
  const float* rescale = nullptr;  // [rows], factor for the previous contents of `out`
  float* out = nullptr;            // [rows], `out_stride` floats apart: [head_dim]
  int64_t out_stride = 0;
  uint8_t* workspace = nullptr;  // kWorkspaceBytes, 64-byte aligned
  WorkspaceUse workspace_use = WorkspaceUse::kNone;
  Prefetch prefetch = {};
};

// Online-softmax state of one row over the pages so far.
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
  const float* bias = nullptr;    // [rows] added to the scores before the softcap, or null
  float* scores = nullptr;        // in: scores, out: p; [rows][kMaxPageTokens]
  uint8_t* operands = nullptr;    // ValueKernel::softmax: ValuePass::workspace
  float value_scale = 1;          // ValueKernel::softmax: ValuePass::scale
  SoftmaxState* state = nullptr;  // [rows]
  float* rescale = nullptr;       // out: [rows]
  Prefetch prefetch = {};
};

struct ValueKernel {
  // After load(), with the same cell, tokens and workspace.
  void (*accumulate)(const ValuePass& pass);
  // AttentionKernels::softmax that leaves p as accumulate()'s operands in its workspace, not in `scores`; or null. For
  // cells without scales per token or block. The workspace must not be written in between.
  void (*softmax)(const SoftmaxPass& pass) = nullptr;
  // Loads the scales of a cell into the workspace. Called before the softmax, whose latency it fills; or null.
  void (*load)(const ValuePass& pass) = nullptr;
};

// Transposes codes of latents, which are stored in K's order (src/formats/cell_layout.h), to V's order.
struct TransposePass {
  const uint8_t* keys = nullptr;
  int64_t row_bytes = 0;  // bytes of a token
  int element_bytes = 0;  // 4, 2 or 1
  int groups = 0;         // groups of 16 tokens, from token 0
  uint8_t* values = nullptr;
};

struct AttentionKernels {
  // A thread calls these before and after it calls the other kernels, where they need CPU state (AMX tiles); else null.
  void (*enter)() = nullptr;
  void (*leave)() = nullptr;
  // Type that queries and scaled probabilities are rounded to, by the code that they are multiplied by.
  DType bf16_operands = DType::kF32;
  DType fp8_operands = DType::kF32;  // IsFp8(): exact in bf16 and fp16
  // A page of a head up to this size is prefetched in two parts: keys and the start of the values one page ahead, the
  // rest while the page's own keys are scored. Larger pages: whole, one page ahead.
  int64_t two_part_prefetch_bytes = 0;
  // kF32 for integers, whose operands are integers, too.
  DType OperandsOf(formats::ElementType type) const noexcept {
    if (IsFp8(type)) return fp8_operands;
    return type == formats::ElementType::kBf16 ? bf16_operands : DType::kF32;
  }
  KeyKernel keys[formats::kElementTypes];                 // by formats::ElementType
  KeyKernel channel_scaled_keys[formats::kElementTypes];  // scales per channel: IsUnsigned() and IsAllocated() types
  ValueKernel values[formats::kElementTypes];
  // bf16 of exact pages and of unquantized channels (outliers, the rotary part of latents). Operands have 16 bits or
  // more on every unit.
  KeyKernel exact_keys;
  ValueKernel exact_values;
  formats::TrellisSearch search_trellis;
  formats::KltSearch search_klt;
  // out = formats::Hadamard(x), bit-identical; f32 [head_dim]; out may be x.
  void (*transform)(const float* x, int head_dim, float* out);
  // formats::MultiplyRow, bit-identical but for NaN payloads.
  void (*multiply)(const float* x, const float* matrix, int head_dim, float* out);
  void (*transpose)(const TransposePass& pass);
  void (*softmax)(const SoftmaxPass& pass);
  // (state, out) = combination of itself and `other` by log-sum-exp; an empty state (max -infinity) is the identity.
  void (*combine)(SoftmaxState& state, float* out, const SoftmaxState& other, const float* other_out, int head_dim);
  // result = out / sum, f32 [head_dim].
  void (*normalize)(const SoftmaxState& state, const float* out, int head_dim, float* result);
  // out[t] += weights[row] * max(scores[row][t], 0), row after row, for tokens t in [0, 16 * groups) of rows
  // kMaxPageTokens apart: one chain per token. NaN counts as 0.
  void (*add_weighted_scores)(const float* scores, const float* weights, int rows, int groups, float* out);
};

// Calls enter() and leave() for the current thread. Scopes do not nest.
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
