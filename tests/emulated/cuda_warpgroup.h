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
  float (*value)(uint16_t) = nullptr;
  Vec4 a;
  CoreMatrices b;
  std::vector<float> before = {};   // d's values, where this is its first product in flight
  std::vector<uint16_t> rows = {};  // the lane's rows of b, of 8 values each: every 32nd of all tiles' 16
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
  WarpgroupProduct product{.d = d, .tiles = kTiles, .value = kBf16 ? &Bf16Value : &F16Value, .a = a, .b = b};
  if (std::ranges::none_of(products.in_flight, [d](const WarpgroupProduct& other) { return other.d == d; })) {
    product.before.assign(d[0], d[0] + 4 * kTiles);
    std::fill_n(d[0], 4 * kTiles, std::numeric_limits<float>::quiet_NaN());
  }
  products.in_flight.push_back(std::move(product));
}

inline void CommitProducts() {
  Products().committed = Products().in_flight.size();
}

// A row of b: 8 k of a column.
inline int RowAt(const CoreMatrices& b, int row) {
  return b.offset + row / 16 * b.n_stride + row / 8 % 2 * b.k_stride + row % 8 * 16;
}
inline void ComputeProduct(void* const* lanes) {
  const auto product = [&](int lane) -> const WarpgroupProduct& {
    return *static_cast<const WarpgroupProduct*>(lanes[lane]);
  };
  const auto value = product(0).value;
  const auto half = [&](uint32_t word, int which) {
    return double{value(static_cast<uint16_t>(word >> static_cast<unsigned>(16 * which)))};
  };
  double a[16][16];  // [row][k]
  for (int lane = 0; lane < kWarp; ++lane) {
    if (!product(lane).before.empty()) std::ranges::copy(product(lane).before, product(lane).d[0]);
    for (int i = 0; i < 8; ++i) {
      a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] = half(product(lane).a.word[i / 2], i % 2);
    }
  }
  for (int tile = 0; tile < product(0).tiles; ++tile) {
    double b[8][16];  // [column][k]
    for (int i = 0; i < 128; ++i) {
      const int row = 16 * tile + i / 8;
      const auto at = static_cast<size_t>(row / kWarp * 8 + i % 8);
      b[i / 8 % 8][i / 64 * 8 + i % 8] = double{value(product(row % kWarp).rows[at])};
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < 4; ++i) {
        float& d = product(lane).d[tile][i];
        double sum = double{d};
        for (int k = 0; k < 16; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[lane % 4 * 2 + i % 2][k];
        d = static_cast<float>(sum);
      }
    }
  }
}

inline void WaitForProducts() {
  WarpgroupProducts& products = Products();
  if (products.committed != products.in_flight.size()) {
    Stop("{} of {} products were committed", products.committed, products.in_flight.size());
  }
  for (WarpgroupProduct& product : products.in_flight) {
    for (int row = ThreadIndex() % kWarp; row < 16 * product.tiles; row += kWarp) {
      uint16_t values[8];
      std::memcpy(values, Shared(RowAt(product.b, row), sizeof(values), 16, Access::kAsyncRead), sizeof(values));
      product.rows.insert(product.rows.end(), values, values + 8);
    }
    WarpOperation("WarpgroupMma", &product, &ComputeProduct);
  }
  products = {};
}

}  // namespace kvanta::emulated
