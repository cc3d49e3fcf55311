//! Helpers for tests: golden cases and tolerances.
//!
//! Meant as a dev-dependency; a broken fixture panics with its name.

pub mod golden;
