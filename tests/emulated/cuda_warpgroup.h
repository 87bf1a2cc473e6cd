// Products of a warpgroup (src/kernels/cuda/warpgroup_nvcc.h) on the emulated grid. A warp computes its own rows when
// it waits; until then its results are NaN.
#pragma once

#include <algorithm>
#include <any>
#include <limits>
#include <vector>

#include "emulated/cuda_primitives.h"

namespace kvanta::emulated {

using kernels::cuda::CoreMatrices;

inline constexpr bool kHasWarpgroupMma = true;

template <class T>
void HoldRegisters(T& /*registers*/) {}

inline void StoreMatrices(int offset, const Vec4& words) {
  struct Operand {
    uint32_t rows[4];  // of the lane's row, where it has stored
    Vec4 words;
  } operand{.rows = {}, .words = words};
  WarpOperation("StoreMatrices", &operand, [](void* const* lanes) {
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int t = 0; t < 4; ++t) {
        static_cast<Operand*>(lanes[lane])->rows[t] =
            static_cast<const Operand*>(lanes[lane % 8 * 4 + t])->words.word[lane / 8];
      }
    }
  });
  std::memcpy(Shared(offset, 16, 16, Access::kWrite), operand.rows, 16);
}

struct WarpgroupProduct {
  float (*d)[4];
  int tiles;
  void (*multiply)(float (&d)[4], const Vec4& a, uint32_t b0, uint32_t b1) = nullptr;
  Vec4 a;
  CoreMatrices b;
  std::vector<float> before = {};  // d's values, where this is its first product in flight
};
struct WarpgroupProducts {
  bool fenced = false;
  size_t committed = 0;
  std::vector<WarpgroupProduct> in_flight;
};
// This thread's.
inline WarpgroupProducts& Products() {
  std::any& state = ThreadState();
  if (!state.has_value()) state = WarpgroupProducts{};
  return std::any_cast<WarpgroupProducts&>(state);
}

inline void FenceProducts() {
  if (!Products().in_flight.empty()) Stop("{} products were not waited for", Products().in_flight.size());
  Products().fenced = true;
}

template <bool kBf16, int kTiles>
void WarpgroupMma(float (*d)[4], const Vec4& a, const CoreMatrices& b) {
  WarpgroupProducts& products = Products();
  if (!products.fenced) Stop("a warpgroup's product without FenceProducts before");
  if ((b.offset | b.k_stride | b.n_stride) % 16 != 0) {
    Stop("core matrices at {} + {} k + {} n, not multiples of 16", b.offset, b.k_stride, b.n_stride);
  }
  WarpgroupProduct product{.d = d, .tiles = kTiles, .multiply = kBf16 ? &MmaBf16 : &MmaF16, .a = a, .b = b};
  if (std::ranges::none_of(products.in_flight, [d](const WarpgroupProduct& other) { return other.d == d; })) {
    float* const values = d[0];
    product.before.assign(values, values + 4 * kTiles);
    std::fill_n(values, 4 * kTiles, std::numeric_limits<float>::quiet_NaN());
  }
  products.in_flight.push_back(std::move(product));
}

inline void CommitProducts() {
  Products().committed = Products().in_flight.size();
}

inline void WaitForProducts() {
  WarpgroupProducts& products = Products();
  if (products.committed != products.in_flight.size()) {
    Stop("{} of {} products were committed", products.committed, products.in_flight.size());
  }
  const int lane = ThreadIndex() % kWarp;
  for (const WarpgroupProduct& product : products.in_flight) {
    if (!product.before.empty()) std::ranges::copy(product.before, product.d[0]);
    for (int tile = 0; tile < product.tiles; ++tile) {
      const auto pair = [&](int half) {  // of column lane / 4
        const int at = product.b.offset + tile * product.b.n_stride + half * product.b.k_stride + 4 * lane;
        uint32_t word = 0;
        std::memcpy(&word, Shared(at, sizeof(word), sizeof(word), Access::kAsyncRead), sizeof(word));
        return word;
      };
      product.multiply(product.d[tile], product.a, pair(0), pair(1));
    }
  }
  products = {};
}

}  // namespace kvanta::emulated
