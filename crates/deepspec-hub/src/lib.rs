//! Models and datasets by their hub id, in the cache that the Python tools use too.
//!
//! Names, addresses and cache layout are those of the `hf-hub` crate; requests and transfers are this crate's own, because
//! whatever arrives here is checked against the announced size and SHA-256 before it appears, breaks are continued where
//! they happened, and every refusal is told by its cause.

mod cache;
mod client;
mod dataset;
mod download;
mod error;
mod glob;
mod hub;
mod layout;
mod model;
mod parse;
mod repo;
mod settings;
mod tls;

pub use error::HubError;
pub use glob::Glob;
pub use hub::Hub;
pub use model::model_dir;
pub use repo::{Kind, Repo, is_id};
pub use settings::{HubOptions, RetryPolicy};
pub use tls::prepare_tls;
