// NCCL's process group; compiled only if NCCL's headers are installed.
#define USE_C10D_NCCL
#include "group.h"

#include <c10/cuda/CUDAFunctions.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

// The device is set first: later allocations that name no device would otherwise land on GPU 0, once for every process.
Backend open_nccl(const Store& store, int rank, int world_size, Milliseconds timeout, int device) {
  const at::Device own(at::kCUDA, static_cast<c10::DeviceIndex>(device));
  c10::cuda::set_device(own.index());
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, world_size, options);
  group->setBoundDeviceId(own);
  // Connects now instead of at the first collective, because a thread of its own waits here.
  group->eagerConnectSingleDevice(own);
  return group;
}
