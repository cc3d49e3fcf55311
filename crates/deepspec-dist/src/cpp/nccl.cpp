// NCCL's process group; compiled where its headers are.
#define USE_C10D_NCCL
#include "group.h"

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

Backend open_nccl(const Store& store, int rank, int world_size, Milliseconds timeout, int device) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, world_size, options);
  group->setBoundDeviceId(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
  return group;
}
