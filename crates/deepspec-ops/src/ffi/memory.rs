//! What libtorch's allocator for GPUs says, which tch does not ask.

use std::ffi::{c_char, c_int};

use tch::Device;

use super::c10d::check;

/// Bytes of a GPU's memory that this process has.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// In tensors.
    pub in_use: u64,
    /// In tensors at most, since the process began or the peak was restarted.
    pub peak: u64,
    /// Taken from the driver at most, with what is kept for later tensors.
    pub reserved_peak: u64,
}

unsafe extern "C" {
    fn ds_device_memory(index: c_int, found: *mut DeviceMemory) -> *mut c_char;
    fn ds_restart_device_peak(index: c_int) -> *mut c_char;
    fn ds_free_memory(index: c_int) -> i64;
    fn ds_has_bfloat16(index: c_int) -> bool;
}

/// What this process has of a GPU's memory; none of the CPU and of GPUs that libtorch has not used.
pub fn device_memory(device: Device) -> Option<DeviceMemory> {
    let Device::Cuda(index) = device else { return None };
    let mut found = DeviceMemory::default();
    // SAFETY: the shim writes one struct of this layout and catches every C++ exception.
    check(unsafe { ds_device_memory(c_int::try_from(index).ok()?, &mut found) }).ok()?;
    Some(found)
}

/// From now on the peak of a GPU is counted anew.
pub fn restart_device_peak(device: Device) {
    let Device::Cuda(index) = device else { return };
    if let Ok(index) = c_int::try_from(index) {
        // SAFETY: the shim takes a plain number and catches every C++ exception. A GPU that was not used has no peak to restart.
        let _ = check(unsafe { ds_restart_device_peak(index) });
    }
}

/// Whether the GPU of this index computes in bfloat16 by itself; true where the driver does not say.
pub fn has_bfloat16(index: usize) -> bool {
    // SAFETY: the shim takes a plain number and catches every C++ exception.
    c_int::try_from(index).map_or(true, |index| unsafe { ds_has_bfloat16(index) })
}

/// Bytes that can still be had on the GPU of this index, those that libtorch keeps for reuse among them; none where its allocator does
/// not say.
pub fn gpu_free_memory(index: usize) -> Option<u64> {
    let index = c_int::try_from(index).ok()?;
    // SAFETY: the shim asks libtorch's allocator and the driver, which lock for themselves, and catches every C++ exception.
    u64::try_from(unsafe { ds_free_memory(index) }).ok()
}
