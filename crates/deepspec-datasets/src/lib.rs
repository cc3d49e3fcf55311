//! Datasets: [`rows`] reads them from files of several formats, and [`suites`] makes prompt suites
//! from them.

pub mod rows;
pub mod suites;
