// Which of its routines MKL takes, it decides by the maker of the processor before it looks at what the processor can do. AMD's with AVX-512 get
// routines for AVX2: on a Zen 5 float32 products took 2.3 times as long as with those for AVX-512, and decoding 1.7 times.
// Where there is AVX2 alone AMD's keep what MKL gives them: a row's bits would depend on the other rows with those for AVX2
// (deepspec-models/tests/neighbours.rs).
//
// An executable's own functions come before those of its libraries. This one answers MKL's question by what the processor can do.
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
