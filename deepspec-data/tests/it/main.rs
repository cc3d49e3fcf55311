//! The built binary from the outside, on the tiny target.

mod faults;
mod http;
mod kills;
mod peers;
mod process;
mod regenerate;
mod serve;
mod serve_limits;
mod split;
