//! The hub client against a hub on loopback, with faults.

mod bench;
mod dataset;
mod fetch;
mod offline;
mod python;
mod refusals;
