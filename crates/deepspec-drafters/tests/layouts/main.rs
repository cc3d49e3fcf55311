//! Drafter checkpoints in the layouts of several tools, as each kind of drafter reads and writes
//! them.

mod block_options;
mod common;
mod convert;
mod domino;
mod draft_vocab;
mod dspark_v4;
mod engines;
mod foreign;
mod fuzz;
mod gguf;
mod mtp;
mod peagle;
mod serving;
mod windows;
mod xpress;
