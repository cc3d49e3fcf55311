//! Statistics of libtorch's GPU allocator, which tch does not expose.

use std::ffi::{c_char, c_int};

use tch::Device;

use super::c10d::check;

/// Bytes of GPU memory of this process.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes of live tensors.
    pub in_use: u64,
    /// Peak of `in_use` since process start or the last [`reset_device_peak`].
    pub peak: u64,
    /// Peak of the bytes taken from the driver, including cached blocks.
    pub reserved_peak: u64,
}

unsafe extern "C" {
    fn ds_device_memory(index: c_int, found: *mut DeviceMemory) -> *mut c_char;
    fn ds_restart_device_peak(index: c_int) -> *mut c_char;
    fn ds_free_memory(index: c_int) -> i64;
    fn ds_has_bfloat16(index: c_int) -> bool;
}

/// GPU memory of this process. None for the CPU, and for GPUs that libtorch has not used.
pub fn device_memory(device: Device) -> Option<DeviceMemory> {
    let Device::Cuda(index) = device else { return None };
    let mut found = DeviceMemory::default();
    // SAFETY: the shim writes one struct of this layout and catches every C++ exception.
    check(unsafe { ds_device_memory(c_int::try_from(index).ok()?, &mut found) }).ok()?;
    Some(found)
}

/// Sets the peak memory counters of a GPU back to the present values.
pub fn reset_device_peak(device: Device) {
    let Device::Cuda(index) = device else { return };
    if let Ok(index) = c_int::try_from(index) {
        // SAFETY: the shim takes a plain number and catches every C++ exception. An unused GPU has no peak.
        let _ = check(unsafe { ds_restart_device_peak(index) });
    }
}

/// Whether a GPU supports bfloat16 in hardware; true if unknown.
pub fn has_bfloat16(index: usize) -> bool {
    // SAFETY: the shim takes a plain number and catches every C++ exception.
    c_int::try_from(index).map_or(true, |index| unsafe { ds_has_bfloat16(index) })
}

/// Bytes that can still be allocated on a GPU, including libtorch's cached blocks. None if unknown.
pub fn gpu_free_memory(index: usize) -> Option<u64> {
    let index = c_int::try_from(index).ok()?;
    // SAFETY: the shim asks libtorch's allocator and the driver, which lock themselves. It catches every C++
    // exception.
    u64::try_from(unsafe { ds_free_memory(index) }).ok()
}
