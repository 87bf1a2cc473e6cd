// Kernels of weights in blocks of the AMX unit: those of the AVX-512 unit, with tiles for many rows.
#include "kernels/linear/cpu/x86/blocks_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/x86/block_tiles.h"

namespace kvanta::kernels {

const BlockKernels& AmxBlockKernels() {
  static const BlockKernels kernels = [] {
    BlockKernels tiled = Avx512BlockKernels();
    SetBlockTiles(tiled);
    return tiled;
  }();
  return kernels;
}

}  // namespace kvanta::kernels
