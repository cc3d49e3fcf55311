//! Foreign code behind a safe interface: kernels and allocator for the CPU, devices, signals, and the shim over libtorch's c10d.

mod device;
mod error;
mod ffi;
mod free_memory;
mod step_trace;
mod unused;

pub use device::{LocalRank, default_kind, device, device_name, gpus, is_one_gpu, kind_name, rank_device};
pub use error::DeviceError;
pub use ffi::{
    AdamWSettings, AdamWTensors, AttentionPart, CudaEvent, CudaStream, DeviceMemory, FEW_ROWS, HistoryChunk,
    KeyValues, KvRows, KvWindow, LogitRows, LogitsMeasured, PackedWeight, ProjectedHeads, Range,
    RmsNormParams, RowsMeasured, SequenceBlocks, StreamGuard, TargetProbs, TiledAttention, TiledBlocks,
    UninitTensor, adamw, add_to_rows, argmax, attend_by_block, attends_by_block, attends_in_tiles,
    block_attention, c10d, device_memory, die_with_parent, distributions, draw, few_rows_attention,
    few_rows_gated_product, few_rows_product, gated_product, has_few_rows, has_history_attention,
    history_attention, leave_at_exit, measure_rows, multiply, packed_gated_product, packed_product, pinned,
    projection, range, restart_device_peak, rms_norm, rotate, signal, silu_times, slope_rows,
    softmax_targets, square_sum, sum_rows, take_gradient,
};
pub use free_memory::free_memory;
pub use step_trace::StepTrace;

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
