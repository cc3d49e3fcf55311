// The shim is one translation unit: libtorch's headers take most of the compile time and are read once.
#include "gpu.cpp"
#include "gradient.cpp"
#include "group.cpp"
#include "memory.cpp"
#include "mkl.cpp"
#include "profile.cpp"
#include "stream.cpp"

#ifdef __linux__
#include "pool.cpp"
#include "waiting.cpp"
#endif

#ifdef DEEPSPEC_NCCL
#include "nccl.cpp"
#endif

// The Cargo feature `kernels`. Each file follows the files whose functions it calls.
#ifdef DEEPSPEC_KERNELS
#include "attention.cpp"
#include "matrices.cpp"
#include "gpu_rows.cpp"
#include "rows.cpp"
#include "blocks.cpp"
#include "in_place_attention.cpp"
#include "losses.cpp"
#include "products.cpp"
#include "adamw.cpp"
#include "draws.cpp"
#include "gpu_attention.cpp"
#include "gpu_decode.cpp"
#include "gpu_losses.cpp"
#endif
