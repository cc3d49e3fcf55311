// Where time goes: libtorch's own profiler, whose file chrome://tracing and ui.perfetto.dev open.
#include "group.h"

#include <memory>
#include <set>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>

extern "C" {

// Records what this thread does from here on, and what runs on GPUs for it.
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

// Ends what this thread began, and writes it where there is a path.
char* ds_profile_stop(const char* path) {
  return caught([&] {
    const auto recorded = torch::autograd::profiler::disableProfiler();
    if (path) recorded->save(path);
  });
}

// A range on this thread's track, null where nothing is recorded.
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
