//! Downloads models and datasets by hub id into the cache that the Python tools share.
//!
//! Names, URLs and cache layout come from the `hf-hub` crate; this crate makes the requests and
//! transfers. It checks size and SHA-256 of every file before the file appears, resumes interrupted
//! transfers, and reports refusals by cause.

mod cache;
mod client;
mod dataset;
mod download;
mod error;
mod glob;
mod hub;
mod layout;
mod model;
mod outer_tensors;
mod parse;
mod repo;
mod settings;
mod tls;

pub use error::HubError;
pub use glob::Glob;
pub use hub::Hub;
pub use model::{ModelFiles, model_dir, model_files};
pub use repo::{Repo, RepoType, is_hub_id};
pub use settings::{HubOptions, RetryPolicy};
pub use tls::prepare_tls;
