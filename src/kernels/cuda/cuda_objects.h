// Owners of objects of the CUDA runtime, for sources that nvcc compiles.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>

#include "kvanta/error.h"

namespace kvanta::kernels {

// Throws with the name of the action that failed, and clears the runtime's error.
inline void Require(cudaError_t error, const std::string& action) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw ResourceError(action + ": " + cudaGetErrorString(error));
}

struct DestroyStream {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
struct FreeHost {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, DestroyStream>;
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;
struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
};
struct DestroyGraphExec {
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, DestroyGraph>;
using GraphExec = std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, DestroyGraphExec>;
using HostMemory = std::unique_ptr<void, FreeHost>;

inline Stream MakeStream() {
  cudaStream_t stream = nullptr;
  Require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  return Stream(stream);
}
inline Event MakeEvent(unsigned flags) {
  cudaEvent_t event = nullptr;
  Require(cudaEventCreateWithFlags(&event, flags), "creating an event");
  return Event(event);
}
inline HostMemory MakeHostMemory(size_t bytes) {
  void* memory = nullptr;
  Require(cudaMallocHost(&memory, std::max<size_t>(bytes, 1)),
          "allocating " + std::to_string(bytes) + " bytes of page-locked memory");
  return HostMemory(memory);
}

}  // namespace kvanta::kernels
