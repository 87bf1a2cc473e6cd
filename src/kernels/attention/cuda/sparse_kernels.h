// Choice of the top k tokens of a row, and copies of their cells. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/sparse_ops.h"
#include "kernels/cuda/row_kernels.h"

namespace kvanta::kernels::cuda {

// ---- choice: one block per row

inline constexpr int kDigitBits = 4;  // of a pass over the scores
inline constexpr int kDigits = 1 << kDigitBits;
inline constexpr int kDigitCountsAt = 0;                                          // uint16 [threads][kDigits]
inline constexpr int kPartCountsAt = kDigitCountsAt + 2 * kDigits * kRowThreads;  // int32 [parts][kDigits]
inline constexpr int kTotalsAt = kPartCountsAt + 4 * kRowThreads;                 // int32 [kDigits]
inline constexpr int kChoiceBytes = kTotalsAt + 4 * kDigits;

inline LaunchShape ShapeOf(const ChooseTokensOp& op) {
  return {op.wave.max_rows, kRowThreads, kChoiceBytes};
}

// Unsigned integers in the order of scores; zeros of both signs are equal, NaN is as -infinity.
KVANTA_DEVICE uint32_t ScoreOrder(float score) {
  if (score != score) return ~std::bit_cast<uint32_t>(-std::bit_cast<float>(0x7F800000U));
  const auto bits = std::bit_cast<uint32_t>(score + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

// The smallest score that is chosen, by its digits from the highest on, and how many of exactly that score are.
struct ChoiceThreshold {
  uint32_t order = 0;
  int32_t equal;

  KVANTA_DEVICE ChoiceThreshold(const float* scores, int32_t count, int32_t top_k) : equal(top_k) {
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) AddDigit(scores, count, shift);
  }

 private:
  // A thread has the scores i, i + kRowThreads, ...: fewer than 2^16.
  KVANTA_DEVICE void AddDigit(const float* scores, int32_t count, int shift) {
    constexpr int kWords = kDigits / 4;
    uint64_t counts[kWords] = {};  // 16 bits a digit
    for (int32_t i = ThreadIndex(); i < count; i += kRowThreads) {
      const uint32_t own = ScoreOrder(scores[i]);
      if (shift + kDigitBits < 32 && own >> static_cast<unsigned>(shift + kDigitBits) != order) continue;
      const uint32_t digit = own >> static_cast<unsigned>(shift) & (kDigits - 1);
      const uint64_t one = uint64_t{1} << (16 * (digit % 4));
      KVANTA_UNROLL
      for (uint32_t word = 0; word < kWords; ++word) counts[word] += digit / 4 == word ? one : 0;
    }
    KVANTA_UNROLL
    for (int word = 0; word < kWords; ++word) {
      StoreShared(kDigitCountsAt + 2 * kDigits * ThreadIndex() + 8 * word, counts[word]);
    }
    SyncBlock();
    const int digit_of_thread = ThreadIndex() % kDigits, part = ThreadIndex() / kDigits;
    int32_t sum = 0;
    for (int i = 0; i < kDigits; ++i) {  // a part has as many threads as there are digits
      sum += LoadShared<uint16_t>(kDigitCountsAt + 2 * (kDigits * (kDigits * part + i) + digit_of_thread));
    }
    StoreShared(kPartCountsAt + 4 * ThreadIndex(), sum);
    SyncBlock();
    if (ThreadIndex() < kDigits) {
      int32_t total = 0;
      for (int i = 0; i < kRowThreads / kDigits; ++i) {
        total += LoadShared<int32_t>(kPartCountsAt + 4 * (kDigits * i + ThreadIndex()));
      }
      StoreShared(kTotalsAt + 4 * ThreadIndex(), total);
    }
    SyncBlock();
    int digit = kDigits - 1;
    for (; digit > 0; --digit) {
      const auto total = LoadShared<int32_t>(kTotalsAt + 4 * digit);
      if (total >= equal) break;
      equal -= total;
    }
    order = order << static_cast<unsigned>(kDigitBits) | static_cast<uint32_t>(digit);
  }
};

KVANTA_DEVICE void RunBlock(const ChooseTokensOp& op) {
  const SparseStep& step = *op.wave.step;
  const int32_t index = op.wave.first_row + BlockIndex();
  if (index >= step.count) return;
  const int32_t count = step.rows[index].position + 1;
  const float* scores = step.scores + int64_t{BlockIndex()} * step.score_stride;
  const ChoiceThreshold threshold(scores, count, op.wave.top_k);
  // Each thread has a share of adjacent positions: a chosen one's place follows from what is chosen before it.
  const int32_t share = (count + kRowThreads - 1) / kRowThreads;
  const int32_t begin = ThreadIndex() * share;
  const int32_t end = begin + share < count ? begin + share : count;
  int32_t above = 0, equal = 0;
  for (int32_t i = begin; i < end; ++i) {
    const uint32_t order = ScoreOrder(scores[i]);
    above += order > threshold.order ? 1 : 0;
    equal += order == threshold.order ? 1 : 0;
  }
  StoreShared(8 * ThreadIndex(), Vec2{{static_cast<uint32_t>(above), static_cast<uint32_t>(equal)}});
  SyncBlock();
  if (ThreadIndex() == 0) {  // exclusive prefix sums
    Vec2 before = {};
    for (int i = 0; i < kRowThreads; ++i) {
      const auto own = LoadShared<Vec2>(8 * i);
      StoreShared(8 * i, before);
      before.word[0] += own.word[0];
      before.word[1] += own.word[1];
    }
  }
  SyncBlock();
  const auto before = LoadShared<Vec2>(8 * ThreadIndex());
  auto equal_before = static_cast<int32_t>(before.word[1]);
  int32_t* to = op.wave.step->positions + int64_t{index} * op.wave.top_k + before.word[0] +
                (equal_before < threshold.equal ? equal_before : threshold.equal);
  for (int32_t i = begin; i < end; ++i) {
    const uint32_t order = ScoreOrder(scores[i]);
    if (order < threshold.order || (order == threshold.order && equal_before++ >= threshold.equal)) continue;
    *to++ = i;
  }
}

// ---- copies: one block per page of a row's copies

inline constexpr int kMaxGatheredTokens = 128;  // of a page

inline LaunchShape ShapeOf(const GatherTokensOp& op) {
  return {int64_t{op.wave.max_rows} * op.pages, kRowThreads, 16 * kMaxGatheredTokens};
}

// Copies the tokens of a page of copies, whose cells and slots are in shared memory.
struct TokenCopier {
  int32_t page_size;
  int32_t tokens;
  uint8_t* to;  // cell of the copies

  static KVANTA_DEVICE const uint8_t* CellOf(int token) {
    return reinterpret_cast<const uint8_t*>(LoadShared<uint64_t>(16 * token));
  }
  static KVANTA_DEVICE int SlotOf(int token) { return LoadShared<int32_t>(16 * token + 8); }

  // Codes of `row_bytes` bytes a token in the order of keys, at an offset of the cell of the source and of the copy.
  KVANTA_DEVICE void CopyCodes(int64_t from_offset, int64_t to_offset, int row_bytes) const {
    const auto at = [&](int unit, int slot) { return slot / 16 * (16 * row_bytes) + unit * 64 + slot % 16 * 4; };
    for (int i = ThreadIndex(); i < row_bytes / 4 * page_size; i += kRowThreads) {
      const int token = i % page_size, unit = i / page_size;
      if (token >= tokens) continue;
      *reinterpret_cast<uint32_t*>(to + to_offset + at(unit, token)) =
          LoadWord(CellOf(token) + from_offset + at(unit, SlotOf(token)));
    }
  }
  // `sections` values of `bytes` bytes a token, each of all tokens of the page.
  KVANTA_DEVICE void CopyScales(int64_t from_offset, int64_t to_offset, int sections, int bytes) const {
    for (int i = ThreadIndex(); i < sections * page_size * bytes; i += kRowThreads) {
      const int byte = i % bytes, token = i / bytes % page_size, section = i / bytes / page_size;
      if (token >= tokens) continue;
      to[to_offset + i] = CellOf(token)[from_offset + (section * page_size + SlotOf(token)) * bytes + byte];
    }
  }
};

KVANTA_DEVICE void RunBlock(const GatherTokensOp& op) {
  const SparseStep& step = *op.wave.step;
  const AttentionParams& from = op.from;
  const int32_t of_wave = BlockIndex() / op.pages, page = BlockIndex() % op.pages;
  const int32_t index = op.wave.first_row + of_wave;
  if (index >= step.count) return;
  const SparseRow row = step.rows[index];
  const int32_t* positions = step.positions + int64_t{index} * op.wave.top_k;
  const auto gathered = cache::GatheredPages::Of(from.exact_pages, from.page_size, row.position >> from.page_shift,
                                                 positions, op.wave.top_k);
  const bool exact = gathered.IsExact(page) && from.exact.base != nullptr;
  const int32_t records = exact ? op.exact_pages : op.quantized_pages;
  const int32_t of_row = page < gathered.Pages() ? gathered.RecordOf(page) : 0;  // a page without tokens: any record
  const int32_t record = of_wave * records + of_row;
  if (ThreadIndex() == 0) {
    op.page_ids[BlockIndex()] = {.quantized = exact ? -1 : record, .exact = exact ? record : -1};
    if (page == 0) op.gathered[of_wave] = gathered;
  }
  const int tokens = gathered.TokensOf(page);
  const PagePool& pool = exact ? from.exact : from.quantized;
  const CellOffsets& source = exact ? from.exact_k : from.k;
  const CellOffsets& copy = exact ? op.to.exact_k : op.to.k;
  const PageIds* pages = from.metadata->pages + from.metadata->first_pages[row.sequence];
  if (ThreadIndex() < tokens) {
    const int32_t position = positions[gathered.FirstOf(page) + ThreadIndex()];
    const PageIds ids = pages[position >> from.page_shift];
    const uint8_t* cell = pool.Record(exact ? ids.exact : ids.quantized) + source.Cell(0);
    StoreShared(16 * ThreadIndex(), reinterpret_cast<uint64_t>(cell));
    StoreShared(16 * ThreadIndex() + 8, position & (from.page_size - 1));
  }
  SyncBlock();
  const PagePool& copies = exact ? op.to.exact : op.to.quantized;
  const TokenCopier copier{.page_size = from.page_size, .tokens = tokens, .to = copies.Record(record) + copy.Cell(0)};
  const formats::Scaling scaling = exact ? formats::Scaling{} : from.k_type.scaling;
  const int bits = exact ? 16 : from.k_type.low_bits + from.k_type.high_bits;
  copier.CopyCodes(source.codes, copy.codes, from.head_dim * bits / 8);
  if (const int bytes = formats::Bytes(scaling.block); bytes != 0) {
    const int blocks = from.head_dim / formats::BlockChannels(scaling, from.head_dim);
    copier.CopyScales(source.block_scales, copy.block_scales, blocks, bytes);
  }
  if (const int bytes = formats::Bytes(scaling.token); bytes != 0) {
    copier.CopyScales(source.token_scales, copy.token_scales, 1, bytes);
  }
  const CellOffsets& rotated = exact ? from.exact_unquantized : from.unquantized;
  const CellOffsets& rotated_copy = exact ? op.to.exact_unquantized : op.to.unquantized;
  const int64_t apart = rotated.Cell(0) - source.Cell(0), apart_copy = rotated_copy.Cell(0) - copy.Cell(0);
  const int rotated_bytes = from.unquantized_decode == DecodeKind::kF32 ? 4 : 2;
  copier.CopyCodes(apart + rotated.codes, apart_copy + rotated_copy.codes, from.unquantized_dim * rotated_bytes);
}

}  // namespace kvanta::kernels::cuda
