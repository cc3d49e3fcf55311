//! libtorch's profiler. It records operators, GPU work and named ranges, and writes a trace for chrome://tracing and
//! ui.perfetto.dev.

use std::ffi::{CStr, CString, c_char, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr;

use super::c10d::check;

unsafe extern "C" {
    fn ds_profile_start(with_gpu: bool) -> *mut c_char;
    fn ds_profile_stop(path: *const c_char) -> *mut c_char;
    fn ds_range_begin(name: *const c_char) -> *mut c_void;
    fn ds_range_end(range: *mut c_void);
}

/// A recording of this thread, until it is written or dropped.
pub struct ProfileRecording {
    /// A recording must end on its own thread.
    _thread: PhantomData<*const ()>,
}

impl ProfileRecording {
    /// Starts to record this thread and, with `with_gpu`, the GPU work of the process.
    ///
    /// # Errors
    /// libtorch's message, if another recording is active or the machine does not support one.
    pub fn start(with_gpu: bool) -> Result<Self, String> {
        // SAFETY: the shim takes a plain value and catches every C++ exception.
        check(unsafe { ds_profile_start(with_gpu) })?;
        Ok(Self { _thread: PhantomData })
    }

    /// Ends the recording and writes it as JSON.
    ///
    /// # Errors
    /// libtorch's message. libtorch reports no error if it cannot open the file, so check that the file exists.
    pub fn write(self, path: &Path) -> Result<(), String> {
        let path = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|error| error.to_string())?;
        let _ended = ManuallyDrop::new(self);
        // SAFETY: the recording began on this thread, which it cannot leave, and ends only here. The path outlives
        // the call.
        check(unsafe { ds_profile_stop(path.as_ptr()) })
    }
}

impl Drop for ProfileRecording {
    fn drop(&mut self) {
        // SAFETY: as in `write`, with a null path. A discarded recording has no write error.
        let _ = check(unsafe { ds_profile_stop(ptr::null()) });
    }
}

/// A named range of this thread's time, until it is dropped.
pub struct Range(*mut c_void);

/// Begins a range. The cost is low if nothing is recorded.
pub fn range(name: &'static CStr) -> Range {
    // SAFETY: the name is static. The shim catches every C++ exception, and returns null or a range that the caller
    // owns.
    Range(unsafe { ds_range_begin(name.as_ptr()) })
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: the range is null or came from ds_range_begin on this thread, which a pointer cannot leave. It ends
        // once.
        unsafe { ds_range_end(self.0) }
    }
}
