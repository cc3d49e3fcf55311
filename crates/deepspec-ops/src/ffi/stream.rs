//! GPU streams, whose work runs concurrently, and events that synchronise streams.

use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use tch::{Device, Tensor};

use super::c10d::check;

/// The shim's event.
#[repr(C)]
struct RawEvent([u8; 0]);

unsafe extern "C" {
    fn ds_side_stream(index: c_int, id: *mut i64) -> *mut c_char;
    fn ds_enter_stream(index: c_int, id: i64, before: *mut i64) -> *mut c_char;
    fn ds_event_here(index: c_int, out: *mut *mut RawEvent) -> *mut c_char;
    fn ds_event_block(event: *mut RawEvent, index: c_int) -> *mut c_char;
    fn ds_event_hold(event: *mut RawEvent, tensors: *const *const c_void, count: usize) -> *mut c_char;
    fn ds_event_wait(event: *mut RawEvent) -> *mut c_char;
    fn ds_event_free(event: *mut RawEvent);
    fn ds_pinned(size: *const i64, dims: usize, like: *const c_void, out: *mut *mut c_void) -> *mut c_char;
}

/// A GPU stream other than the default stream.
#[derive(Debug, Clone, Copy)]
pub struct CudaStream {
    index: c_int,
    id: i64,
}

/// While the guard lives, this thread's GPU work goes to a [`CudaStream`].
pub struct StreamGuard {
    before: CudaStream,
    /// The current stream is a setting of each thread.
    _thread: PhantomData<*const ()>,
}

impl CudaStream {
    /// A stream of the GPU. None for the CPU, which has no streams.
    ///
    /// # Panics
    /// With the driver's message.
    pub fn on_device(device: Device) -> Option<Self> {
        let index = cuda_index(device)?;
        let mut id = 0;
        // SAFETY: the shim writes one number and catches every C++ exception.
        panic_on_error("a stream", unsafe { ds_side_stream(index, &mut id) });
        Some(Self { index, id })
    }

    /// Makes the stream this thread's current stream.
    ///
    /// # Panics
    /// With the driver's message.
    pub fn enter(self) -> StreamGuard {
        StreamGuard { before: self.swap_current(), _thread: PhantomData }
    }

    fn swap_current(self) -> Self {
        let mut before = 0;
        // SAFETY: the id came from libtorch, for a stream of this GPU, and streams live as long as the process. The
        // shim writes one number and catches every C++ exception.
        panic_on_error("changing streams", unsafe { ds_enter_stream(self.index, self.id, &mut before) });
        Self { index: self.index, id: before }
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.before.swap_current();
    }
}

/// A point in a GPU stream's work.
pub struct CudaEvent(NonNull<RawEvent>);

// SAFETY: any thread may wait for an event and free it. An event does not change after `record` has recorded it.
unsafe impl Send for CudaEvent {}

impl CudaEvent {
    /// Records an event after all work of this thread's current stream so far. None for the CPU, whose work is done.
    ///
    /// # Panics
    /// With the driver's message.
    pub fn record(device: Device) -> Option<Self> {
        let index = cuda_index(device)?;
        let mut event = ptr::null_mut();
        // SAFETY: the shim writes one pointer, to an event that nobody else owns, and catches every C++ exception.
        panic_on_error("an event", unsafe { ds_event_here(index, &mut event) });
        NonNull::new(event).map(Self)
    }

    /// Makes this thread's current stream on the device wait for the event. The host does not wait.
    ///
    /// # Panics
    /// With the driver's message.
    pub fn make_stream_wait(&self, device: Device) {
        let Some(index) = cuda_index(device) else { return };
        // SAFETY: the event is live. The shim also takes a plain number, and catches every C++ exception.
        panic_on_error("waiting", unsafe { ds_event_block(self.0.as_ptr(), index) });
    }

    /// Makes this thread's current streams on the tensors' devices wait for the event. The host does not wait. The
    /// allocator does not reuse the tensors' memory before these streams are done with it.
    ///
    /// # Panics
    /// With the driver's message.
    pub fn make_streams_wait<'t>(&self, tensors: impl IntoIterator<Item = &'t Tensor>) {
        let tensors: Vec<*const c_void> = tensors.into_iter().map(|tensor| tensor.as_ptr().cast()).collect();
        // SAFETY: the event is live, and the tensors outlive the call, which only reads their addresses. The shim
        // catches every C++ exception.
        panic_on_error("waiting", unsafe { ds_event_hold(self.0.as_ptr(), tensors.as_ptr(), tensors.len()) });
    }

    /// Blocks the host until the event has happened.
    ///
    /// # Panics
    /// With the driver's message.
    pub fn synchronize(self) {
        // SAFETY: the event is live. The shim catches every C++ exception.
        panic_on_error("waiting", unsafe { ds_event_wait(self.0.as_ptr()) });
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: the event came from the shim's `new` and is freed only here.
        unsafe { ds_event_free(self.0.as_ptr()) };
    }
}

/// An uninitialised tensor in pinned host memory with the dtype of `like`, for asynchronous copies.
///
/// # Panics
/// If there is no such memory or no GPU.
pub fn empty_pinned(size: &[i64], like: &Tensor) -> Tensor {
    let (like, mut out) = (like.as_ptr().cast(), ptr::null_mut());
    // SAFETY: the shim reads `size.len()` numbers and the dtype of `like`, writes one pointer and catches every C++
    // exception.
    panic_on_error("page-locked memory", unsafe { ds_pinned(size.as_ptr(), size.len(), like, &mut out) });
    // SAFETY: without an error, `out` is a tensor from `new` that nobody else owns; tch frees it by `delete`.
    unsafe { Tensor::from_ptr(out.cast()) }
}

fn cuda_index(device: Device) -> Option<c_int> {
    let Device::Cuda(index) = device else { return None };
    c_int::try_from(index).ok()
}

#[track_caller]
fn panic_on_error(what: &str, problem: *mut c_char) {
    if let Err(problem) = check(problem) {
        panic!("{what}: {problem}");
    }
}
