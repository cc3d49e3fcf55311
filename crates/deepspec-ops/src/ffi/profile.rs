//! libtorch's profiler: its operators, what runs on GPUs, and ranges of our own, as a trace for chrome://tracing and ui.perfetto.dev.

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

/// A recording of what this thread does, from its start until it is written or dropped.
pub struct Profile {
    /// It ends on the thread that began it.
    _thread: PhantomData<*const ()>,
}

impl Profile {
    /// Begins to record this thread, and with `with_gpu` what GPUs do for the process.
    ///
    /// # Errors
    /// With libtorch's words, if another recording is under way or the machine allows none.
    pub fn start(with_gpu: bool) -> Result<Self, String> {
        // SAFETY: the shim takes a plain value and catches every C++ exception.
        check(unsafe { ds_profile_start(with_gpu) })?;
        Ok(Self { _thread: PhantomData })
    }

    /// Ends the recording and writes it as JSON.
    ///
    /// # Errors
    /// With libtorch's words. It says nothing where the file cannot be opened; see whether it is there.
    pub fn write(self, path: &Path) -> Result<(), String> {
        let path = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|error| error.to_string())?;
        let _ended = ManuallyDrop::new(self);
        // SAFETY: the recording began on this thread, which it cannot leave, and ends here only; the path is a C string for the length of
        // the call.
        check(unsafe { ds_profile_stop(path.as_ptr()) })
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        // SAFETY: as above, without a path. What is thrown away cannot fail to be written.
        let _ = check(unsafe { ds_profile_stop(ptr::null()) });
    }
}

/// A named range of this thread's time, until it is dropped.
pub struct Range(*mut c_void);

/// Begins a range; it costs little where nothing is recorded.
pub fn range(name: &'static CStr) -> Range {
    // SAFETY: the name lives for ever; the shim catches every C++ exception and returns null or a range that is the caller's.
    Range(unsafe { ds_range_begin(name.as_ptr()) })
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: it is null or came from ds_range_begin on this thread, which a pointer cannot leave, and is ended once.
        unsafe { ds_range_end(self.0) }
    }
}
