//! Kernels for CPUs and GPUs: the `kernels` feature.

mod adamw;
mod attention;
mod few_rows;
mod in_place_attention;
mod losses;
mod matrices;
mod products;
mod rows;

pub use adamw::{adamw, square_sum};
pub use attention::{
    TiledAttention, attend_by_block, block_attention, has_block_attention, has_tiled_attention,
};
pub use few_rows::{decode_attention, decode_gated_product, decode_product, has_decode_kernels};
pub use in_place_attention::{has_in_place_attention, in_place_attention};
pub use losses::{add_to_rows, logits_grad, measure_rows, softmax_targets, sum_rows};
pub use matrices::{matmul_into, projection};
pub use products::{PackedWeight, packed_gated_product, packed_product};
pub use rows::{argmax, draw, gated_product, rms_norm, rotate, silu_times, temperature_softmax};
