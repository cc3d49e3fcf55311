//! Tests the hub client against a fake hub on loopback that injects faults.

mod bench;
mod dataset;
mod fetch;
mod offline;
mod python;
mod refusals;
