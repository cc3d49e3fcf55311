// Shared by the files of the shim: turns exceptions into text before they could cross into Rust.
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

// Runs `work`. Returns null on success, else the error message, which the caller frees with `free`.
template <typename Work>
char* caught(Work work) {
  try {
    work();
    return nullptr;
  } catch (const c10::Error& error) {
    // Without the C++ backtrace.
    return strdup(error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return strdup("no memory for a buffer");  // begins like libtorch's own message
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
