// MKL selects routines by the processor's vendor before it looks at the processor's features. AMD processors with
// AVX-512 get routines for AVX2. On a Zen 5, float32 matmuls took 2.3 times as long as with AVX-512 routines, and
// decoding took 1.7 times as long. AMD processors with AVX2 alone keep MKL's choice: with its AVX2 routines a row's
// bits would depend on the other rows (deepspec-models/tests/neighbours.rs).
//
// The linker prefers an executable's own functions to those of its libraries. This function answers MKL's question by
// the processor's features.
#if defined(__x86_64__) && defined(__GNUC__)
#include <cstdlib>
#include <cstring>

extern "C" __attribute__((visibility("default"))) int mkl_serv_intel_cpu_true() {
  static const bool whole = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_is("intel")) return true;
    const char* by_maker = std::getenv("DEEPSPEC_MKL_BY_MAKER");
    const bool wanted = by_maker == nullptr || std::strcmp(by_maker, "1") != 0;
    return wanted && __builtin_cpu_supports("avx512f");
  }();
  return whole ? 1 : 0;
}
#endif
