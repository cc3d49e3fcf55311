// All of the shim in one unit: libtorch's headers take most of a compiler's time, and are read once here instead of in every file.
#include "attention.cpp"
#include "group.cpp"
#include "memory.cpp"
#include "mkl.cpp"
#include "matrices.cpp"
#include "profile.cpp"
#include "gpu.cpp"
#include "gpu_rows.cpp"
// Behind matrices.cpp, whose products it takes, and what GPUs have.
#include "rows.cpp"
#include "stream.cpp"
// Behind rows.cpp, of which they use what computes with lanes, and blocks.cpp behind matrices.cpp.
#include "blocks.cpp"
#include "history.cpp"
#include "losses.cpp"
#include "products.cpp"
// Behind losses.cpp, whose sums they take.
#include "adamw.cpp"
#include "draws.cpp"
#include "gpu_attention.cpp"
#include "gpu_decode.cpp"
#include "gpu_losses.cpp"

#ifdef __linux__
#include "pool.cpp"
#include "waiting.cpp"
#endif

#ifdef DEEPSPEC_NCCL
#include "nccl.cpp"
#endif
