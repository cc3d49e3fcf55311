//! The built binary from the outside, on the tiny target.

mod broken_model;
mod chaos;
mod faults;
mod gemma4;
mod http;
mod hub;
mod hub_rows;
mod inspect;
mod kills;
mod peers;
mod process;
mod regenerate;
mod serve;
mod serve_draft;
mod serve_fire;
mod serve_limits;
mod soak;
mod split;
mod split_filters;
mod split_inputs;
mod split_mutations;
mod standin;
mod strength;
mod suites;
mod suites_hub;
mod thoughts;
