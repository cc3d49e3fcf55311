//! Drafter checkpoints in the layouts of several tools, as their kinds read and write them.

mod common;
mod convert;
mod engines;
mod foreign;
mod fuzz;
mod gguf;
mod serving;
