// What the shim's files share: exceptions become text before they could cross into Rust.
#pragma once

#include <chrono>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

using Milliseconds = std::chrono::milliseconds;
using Backend = c10::intrusive_ptr<c10d::Backend>;
using Store = c10::intrusive_ptr<c10d::Store>;

// Runs `work`; null on success, else what went wrong, to be freed with `free`.
template <typename Work>
char* caught(Work work) {
  try {
    work();
    return nullptr;
  } catch (const c10::Error& error) {
    // Without the C++ backtrace.
    return strdup(error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return strdup("no memory for a buffer");  // as libtorch's own words begin
  } catch (const std::exception& error) {
    return strdup(error.what());
  } catch (...) {
    return strdup("an unknown C++ exception");
  }
}

#ifdef DEEPSPEC_NCCL
Backend open_nccl(const Store& store, int rank, int world_size, Milliseconds timeout, int device);
#else
inline Backend open_nccl(const Store&, int, int, Milliseconds, int) { TORCH_CHECK(false, "built without NCCL"); }
#endif
