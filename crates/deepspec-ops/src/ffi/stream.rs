//! Streams of a GPU, on which work runs beside other work, and events by which one waits for the other.

use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use tch::{Device, Tensor};

use super::c10d::check;

/// An event of the shim.
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

/// A stream of a GPU beside the one that everything runs on.
#[derive(Debug, Clone, Copy)]
pub struct CudaStream {
    index: c_int,
    id: i64,
}

/// While it lives, this thread's work on the GPU goes to a [`CudaStream`].
pub struct StreamGuard {
    before: CudaStream,
    /// Streams are chosen thread by thread.
    _thread: PhantomData<*const ()>,
}

impl CudaStream {
    /// One of the GPU's; none of the CPU, which does everything in turn.
    ///
    /// # Panics
    /// With the driver's words.
    pub fn of(device: Device) -> Option<Self> {
        let index = index_of(device)?;
        let mut id = 0;
        // SAFETY: the shim writes one number and catches every C++ exception.
        done("a stream", unsafe { ds_side_stream(index, &mut id) });
        Some(Self { index, id })
    }

    /// Makes it this thread's.
    ///
    /// # Panics
    /// With the driver's words.
    pub fn enter(self) -> StreamGuard {
        StreamGuard { before: self.exchange(), _thread: PhantomData }
    }

    fn exchange(self) -> Self {
        let mut before = 0;
        // SAFETY: the number is one that libtorch gave for a stream of this GPU; its streams live as long as the process. The shim writes one number
        // and catches every C++ exception.
        done("changing streams", unsafe { ds_enter_stream(self.index, self.id, &mut before) });
        Self { index: self.index, id: before }
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.before.exchange();
    }
}

/// A moment in the work of a GPU's stream.
pub struct CudaEvent(NonNull<RawEvent>);

// SAFETY: an event may be waited for and freed by any thread; nothing of it changes once it is recorded, which `here` does.
unsafe impl Send for CudaEvent {}

impl CudaEvent {
    /// Behind all that this thread has asked of the device; none of the CPU, where it is done.
    ///
    /// # Panics
    /// With the driver's words.
    pub fn here(device: Device) -> Option<Self> {
        let index = index_of(device)?;
        let mut event = ptr::null_mut();
        // SAFETY: the shim writes one pointer, to an event that belongs to nobody else, and catches every C++ exception.
        done("an event", unsafe { ds_event_here(index, &mut event) });
        NonNull::new(event).map(Self)
    }

    /// Lets what this thread asks of the device from now on wait for it, but not the host.
    ///
    /// # Panics
    /// With the driver's words.
    pub fn block(&self, device: Device) {
        let Some(index) = index_of(device) else { return };
        // SAFETY: the event is alive; the shim takes a plain number beside it and catches every C++ exception.
        done("waiting", unsafe { ds_event_block(self.0.as_ptr(), index) });
    }

    /// Lets what this thread asks of the tensors' devices from now on wait for it, but not the host. Their memory, which may be another stream's,
    /// goes to nobody else before all of that is done.
    ///
    /// # Panics
    /// With the driver's words.
    pub fn hold<'t>(&self, tensors: impl IntoIterator<Item = &'t Tensor>) {
        let tensors: Vec<*const c_void> = tensors.into_iter().map(|tensor| tensor.as_ptr().cast()).collect();
        // SAFETY: the event is alive, and the tensors are for as long as the call, which only reads where they lie. The shim catches every C++ exception.
        done("waiting", unsafe { ds_event_hold(self.0.as_ptr(), tensors.as_ptr(), tensors.len()) });
    }

    /// Waits until it has come.
    ///
    /// # Panics
    /// With the driver's words.
    pub fn wait(self) {
        // SAFETY: the event is alive; the shim catches every C++ exception.
        done("waiting", unsafe { ds_event_wait(self.0.as_ptr()) });
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: it came from the shim's `new` and is freed here only.
        unsafe { ds_event_free(self.0.as_ptr()) };
    }
}

/// An uninitialised tensor of the kind of `like` in host memory that GPUs copy from and to while the host goes on.
///
/// # Panics
/// Where there is no such memory, or no GPU.
pub fn pinned(size: &[i64], like: &Tensor) -> Tensor {
    let (like, mut out) = (like.as_ptr().cast(), ptr::null_mut());
    // SAFETY: the shim reads so many numbers and the tensor's kind, writes one pointer and catches every C++ exception.
    done("page-locked memory", unsafe { ds_pinned(size.as_ptr(), size.len(), like, &mut out) });
    // SAFETY: without an error it is a tensor from `new` that belongs to nobody else; tch frees it by `delete`.
    unsafe { Tensor::from_ptr(out.cast()) }
}

fn index_of(device: Device) -> Option<c_int> {
    let Device::Cuda(index) = device else { return None };
    c_int::try_from(index).ok()
}

#[track_caller]
fn done(what: &str, problem: *mut c_char) {
    if let Err(problem) = check(problem) {
        panic!("{what}: {problem}");
    }
}
