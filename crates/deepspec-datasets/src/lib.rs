//! Datasets: their [`rows`] in files of several formats, and the prompt [`suites`] that are made of them.

pub mod rows;
pub mod suites;
