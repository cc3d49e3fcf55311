//! Memory that a GPU has left.

unsafe extern "C" {
    fn ds_free_memory(index: libc::c_int) -> i64;
}

/// Bytes that can still be had on the GPU of this index; none where its allocator does not say.
pub fn gpu_free_memory(index: usize) -> Option<u64> {
    let index = libc::c_int::try_from(index).ok()?;
    // SAFETY: the shim reads counters behind libtorch's own locks and catches every C++ exception.
    u64::try_from(unsafe { ds_free_memory(index) }).ok()
}
