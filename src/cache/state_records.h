// States of a recurrent group that are rounded at positions of a grid (formats/state_codec.h): a working state is an
// exact record, its code a quantized one.
#pragma once

#include "base/thread_pool.h"
#include "cache/page_pool.h"

namespace kvanta::cache {

// Rounds or restores the state of all layers of `change.record`'s group, a change of the kind kRoundState or
// kRestoreState, in parallel where there are threads. A rounded state is stored in `change.coded`, unless that is
// kNoPage.
void ChangeState(PagePool& pool, const RecordChange& change, ThreadPool* threads) noexcept;

}  // namespace kvanta::cache
