// The kernels of linear layers, by the work that they do: calls launcher.Launch<Kernel>(work) with the one for it,
// which has its grid (Shape) and what a block runs (Run). nvcc and the emulation launch by this.
#pragma once

#include "kernels/linear/cuda/linear_kernel.h"

namespace kvanta::kernels::cuda {

template <class Panel, class Launcher>
void LaunchTiles(const LinearWork& work, Launcher launcher) {
  switch (work.tile) {
    case ProductTile::k1x1:
      return launcher.template Launch<LinearBlock<Panel, ProductTile::k1x1>>(work);
    case ProductTile::k2x4:
      return launcher.template Launch<LinearBlock<Panel, ProductTile::k2x4>>(work);
    case ProductTile::k4x8:
      return launcher.template Launch<LinearBlock<Panel, ProductTile::k4x8>>(work);
  }
}

template <class Launcher>
void LaunchBy(const LinearWork& work, Launcher launcher) {
  if (!work.weight.panels) return launcher.template Launch<PlainLinear>(work);
  switch (work.weight.kind) {
    case PanelKind::kBf16:
      return LaunchTiles<ElementPanel<PanelKind::kBf16>>(work, launcher);
    case PanelKind::kF16:
      return LaunchTiles<ElementPanel<PanelKind::kF16>>(work, launcher);
    case PanelKind::kInt8:
      return LaunchTiles<Int8Panel>(work, launcher);
    case PanelKind::kInt4:
      return LaunchTiles<Int4Panel>(work, launcher);
  }
}

}  // namespace kvanta::kernels::cuda
