// AMX: the AVX-512 loops, with the dots that attention and bf16 linear layers compute by tiles.
#include "bench/roofline_table.h"
#include "kernels/cpu/x86/tiles_amx.h"

namespace kvanta::kernels {
namespace {

// Tile products with one first operand and a second operand each, which is loaded from L1. kProducts: per element of
// the sums.
template <class Product, int kProducts>
float TileLoop(int64_t rounds, double* operations) noexcept {
  alignas(64) uint8_t operands[kTilesUnroll * kTileBytes] = {};
  Tiles::Configure();
  ForTiles<kTilesUnroll>([](auto tile) __attribute__((always_inline)) { Tiles::Zero<decltype(tile)::kValue>(); });
  Tiles::Zero<kFirstOperand>();
  for (int64_t round = 0; round < rounds; ++round) {
    ForTiles<kTilesUnroll>([&](auto tile) __attribute__((always_inline)) {
      constexpr int kTile = decltype(tile)::kValue, kOfColumns = kSecondOperand + kTile % 2;
      Tiles::Load<kOfColumns>(operands + kTile * kTileBytes, 64);
      Product::template Add<kTile, kFirstOperand, kOfColumns>();
    });
  }
  Tiles::Store<0>(operands, 64);
  Tiles::Release();
  *operations = 2.0 * kTileRows * 16 * kProducts * kTilesUnroll * static_cast<double>(rounds);
  return static_cast<float>(operands[0]);
}

struct Bf16Product {
  template <int kSum, int kRows, int kColumns>
  static KVANTA_INLINE void Add() {
    Tiles::DotBf16<kSum, kRows, kColumns>();
  }
};
struct ByteProduct {
  template <int kSum, int kRows, int kColumns>
  static KVANTA_INLINE void Add() {
    Tiles::DotSignedSigned<kSum, kRows, kColumns>();
  }
};

}  // namespace

const RooflineTable& AmxRooflineTable() {
  static const RooflineTable table = [] {
    RooflineTable result = Avx512RooflineTable();
    result.bf16_dot = TileLoop<Bf16Product, 32>;
    result.bf16_terms_dot = TileLoop<Bf16Product, 16>;  // f32 operands are two bf16 terms
    result.wide_dot = TileLoop<ByteProduct, 64>;
    result.operand_terms = 2;
    result.subbyte_dot = TileLoop<ByteProduct, 64>;
    return result;
  }();
  return table;
}

}  // namespace kvanta::kernels
