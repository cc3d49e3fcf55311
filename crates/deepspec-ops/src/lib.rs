//! Operators on tensors: a few functions named by their mathematics, each with a reference in libtorch's operators and kernels
//! for CPUs and GPUs. Each operator chooses its kernel from its arguments.
//!
//! Beside them stand devices, uploads, the allocator and the shim over libtorch's c10d.
//!
//! Shapes: N rows (tokens), T context tokens, d hidden size, V vocabulary, H query heads, G key/value heads, D head dim.

mod attention;
mod autograd_memory;
mod block_attention;
mod decoder_layer;
mod device;
pub mod distill_loss;
mod error;
mod ffi;
mod free_memory;
mod gated_mlp;
pub mod kv_attention;
mod linear;
mod rms_norm;
mod rope;
mod scatter;
mod step_trace;
mod unused;
mod upload;

pub use attention::{AttentionSpec, Heads, Qkv};
pub use autograd_memory::{AutogradMemory, NORMED, code_bytes};
pub use block_attention::{BlockAttention, BlockSizes, SequenceSpan};
pub use decoder_layer::{Attend, LayerWeights, RepeatedRows, decoder_layer};
pub use device::{LocalRank, default_kind, device, device_name, gpus, is_one_gpu, kind_name, rank_device};
pub use error::DeviceError;
pub use ffi::{
    AdamWSettings, AdamWTensors, CudaEvent, CudaStream, DeviceMemory, Range, StreamGuard, UninitTensor,
    adamw, argmax, c10d, device_memory, die_with_parent, distributions, draw, leave_at_exit, pinned, range,
    restart_device_peak, signal, square_sum, take_gradient,
};
pub use free_memory::free_memory;
pub use gated_mlp::{Activation, GatedMlp, gated_mlp};
pub use linear::{PackedWeight, Weight, linear};
pub use rms_norm::{RmsNormParams, rms_norm};
pub use rope::{Rope, RopeSpec, Rotation, Scaling, Yarn, rope};
pub use scatter::add_rows;
pub use step_trace::StepTrace;
pub use upload::{DeviceArange, Floats, Upload, UploadSlice, Uploaded, copied_runs, runs};

/// Kernels one by one, for the tests of this crate on a GPU. Other crates call the operators.
#[doc(hidden)]
pub mod kernels {
    pub use crate::decoder_layer::ProjectedHeads;
    pub use crate::ffi::{
        HistoryChunk, KvWindow, LogitRows, few_rows_attention, few_rows_gated_product, few_rows_product,
        has_few_rows, rotate, silu_times,
    };
}

/// The host, whose tensors files are written from.
pub const HOST: tch::Device = tch::Device::Cpu;

/// Why this build has no NCCL; nothing where it has.
pub const NCCL_MISSING: &str = env!("DEEPSPEC_NCCL_MISSING");

/// The version of libtorch whose headers this was built with.
pub const LIBTORCH: &str = env!("DEEPSPEC_LIBTORCH");

/// Settings of the whole process that libtorch profits from; to be called first in `main`.
///
/// Every operator allocates its result. glibc tends to hand large blocks back at once and to take every new one page by page
/// from the system, which can cost more than the arithmetic. A training pass of the tiny recipe took 97.7 ms so and 89.2 ms with
/// the memory kept (`cargo bench -p deepspec-drafters`, one thread).
///
/// Kept large blocks would leave gaps in its heap, though: a DSpark step with 0.66 GB of tensors at most took 1.09 GB. Those come
/// from a pool that keeps them as well, but holds at most 4 MB more than was needed at once: 0.83 GB, with more states held ready. It
/// costs time: a step of `cargo bench --bench step` took 768 ms with it and 641 ms without. Since then blocks are taken again without
/// being cut to size, and the system is asked less often: 2,900 times instead of 10,400 while the engine decoded the same 5,600 tokens
/// six times.
pub fn prepare_process() {
    ffi::wait_asleep();
    ffi::keep_freed_memory();
    ffi::pool_large_blocks();
}
