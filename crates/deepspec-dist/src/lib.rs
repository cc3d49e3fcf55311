//! Devices behind a safe interface; the home of foreign code.

mod device;
mod ffi;

pub use device::{DeviceError, default_kind, device};
