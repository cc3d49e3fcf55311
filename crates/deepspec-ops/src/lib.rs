//! Operators on tensors, named by what they compute. Each has a reference in libtorch's operators, and kernels for CPUs and GPUs. Each
//! operator chooses its kernel from its arguments.
//!
//! The crate also has devices, uploads, the allocator and a C API over libtorch's c10d.
//!
//! Shapes: N rows (tokens), T context tokens, d hidden size, V vocabulary, H query heads, G key/value heads, D head dim.

mod adamw;
mod attention;
mod block_attention;
mod cuda_diagnostics;
mod decoder_layer;
mod device;
pub mod distill_loss;
mod draft_tree;
mod error;
mod ffi;
mod free_memory;
mod gated_delta_net;
mod gated_mlp;
mod grad;
pub mod kv_attention;
mod linear;
mod mixture_of_experts;
mod rms_norm;
mod rope;
mod sample;
mod saved_tensors;
mod scatter;
mod step_trace;
mod upload;
mod verify;
mod whole_vectors;

pub use adamw::{AdamWSettings, AdamWTensors, adamw, square_sum};
pub use attention::{AttentionSpec, Heads, Qkv};
pub use block_attention::{BlockAttention, BlockShape, SequenceAnchors};
pub use decoder_layer::{Attend, LayerWeights, RepeatedRows, decoder_layer};
pub use device::{
    LocalRank, default_dtype, device_name, dtype_name, names_one_gpu, parse_device, rank_device,
    shareable_gpu_count,
};
pub use draft_tree::{AcceptedPath, DraftTree, tree_attention_mask};
pub use error::DeviceError;
pub use ffi::{
    CpuTensorBuilder, CudaEvent, CudaStream, DeviceMemory, Range, StreamGuard, c10d, device_memory,
    die_with_parent, empty_pinned, init_runtime, range, reset_device_peak, send_signal, skip_exit_cleanup,
    take_gradient,
};
pub use free_memory::free_memory;
pub use gated_delta_net::{
    GatedDeltaCache, GatedDeltaInputs, GatedDeltaSpec, GatedDeltaWeights, MAX_ROLLBACK_TOKENS,
};
pub use gated_mlp::{Activation, GatedMlp, gated_mlp};
pub use grad::{EmbeddingGrad, EmbeddingGradSlices, GradSum, grad_or_zeros};
pub use linear::{PackedWeight, Weight, linear, linear_in_float32};
pub use mixture_of_experts::{
    Expert, MixtureOfExperts, Router, RouterScores, combine_experts, mixture_of_experts,
};
pub use rms_norm::{RmsNormParams, rms_norm};
pub use rope::{Rope, RopeSpec, Rotation, Scaling, Yarn, rope};
pub use sample::{argmax, sample, temperature_softmax};
pub use saved_tensors::SavedTensorSizes;
pub use scatter::add_rows;
pub use step_trace::StepTrace;
pub use upload::{
    DeviceArange, FloatSlice, Upload, UploadSlice, Uploaded, cat_row_runs, cat_to_device, copy_row_runs,
};
pub use verify::{Verification, verify, verify_block, verify_greedy};
pub use whole_vectors::in_whole_vectors;

/// Kernels one by one, for the tests of this crate on a GPU. Other crates call the operators.
#[doc(hidden)]
pub mod kernels {
    pub use crate::decoder_layer::ProjectedHeads;
    pub use crate::ffi::{
        KvChunk, KvWindow, LogitRows, decode_attention, decode_gated_product, decode_product,
        has_decode_kernels, rotate, silu_times,
    };
}

/// The host, whose tensors files are written from.
pub const HOST: tch::Device = tch::Device::Cpu;

/// The reason why this build has no NCCL; empty if it has NCCL.
pub const NCCL_MISSING_REASON: &str = env!("DEEPSPEC_NCCL_MISSING");

/// The version of libtorch whose headers this was built with.
pub const LIBTORCH_VERSION: &str = env!("DEEPSPEC_LIBTORCH");
