// Functions of fake_nccl.cc for tests, which find them by dlsym.
#pragma once

#include <cstdint>

// Calls since the last FakeNcclTakeCalls, by all ranks, and arguments of the last gather.
struct FakeNcclCalls {
  int ids = 0, inits = 0, gathers = 0, aborts = 0;
  int64_t bytes = 0;
  int in_place = 0;  // gathers whose own part is in its place
  int data_type = -1;
  void* stream = nullptr;
};

extern "C" {
using FakeNcclTakeCallsFunction = void (*)(FakeNcclCalls* taken);
// The named function, or "a gather" that has begun, gives this result from now on; 0: none does.
using FakeNcclFailFunction = void (*)(const char* function, int result);
}
