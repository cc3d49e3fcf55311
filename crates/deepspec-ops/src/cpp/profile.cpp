// Profiles with libtorch's own profiler, whose file chrome://tracing and ui.perfetto.dev open.
#include "group.h"

#include <memory>
#include <set>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>

extern "C" {

// Starts to record what this thread does and, with `with_gpu`, what it runs on GPUs.
char* ds_profile_start(bool with_gpu) {
  return caught([&] {
    using namespace torch::autograd::profiler;
    using torch::profiler::impl::ActivityType;
    const ProfilerConfig config(ProfilerState::KINETO);
    std::set<ActivityType> activities{ActivityType::CPU};
    if (with_gpu) activities.insert(ActivityType::CUDA);
    prepareProfiler(config, activities);
    enableProfiler(config, activities);
  });
}

// Stops the recording that this thread started, and writes it to `path` if given.
char* ds_profile_stop(const char* path) {
  return caught([&] {
    const auto recorded = torch::autograd::profiler::disableProfiler();
    if (path) recorded->save(path);
  });
}

// Begins a range on this thread's track; null if nothing is recorded.
at::RecordFunction* ds_range_begin(const char* name) {
  try {
    auto range = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    if (!range->isActive()) return nullptr;
    range->before(name);
    return range.release();
  } catch (...) {
    return nullptr;
  }
}

void ds_range_end(at::RecordFunction* range) { delete range; }
}
