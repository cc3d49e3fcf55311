//! C API over c10d (`src/cpp`). Every function catches C++ exceptions and returns their message as text.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem;
use std::ptr::{self, NonNull};
use std::slice;
use std::time::Duration;

use tch::Tensor;

/// The shim's `Store`.
#[repr(C)]
struct RawStore([u8; 0]);

/// The shim's NCCL backend.
#[repr(C)]
struct RawNccl([u8; 0]);

/// The shim's `Group`.
#[repr(C)]
struct RawGroup([u8; 0]);

unsafe extern "C" {
    fn ds_store_open(
        host: *const c_char,
        port: *mut u16,
        is_host: bool,
        timeout_ms: i64,
        prefix: *const c_char,
        out: *mut *mut RawStore,
    ) -> *mut c_char;
    fn ds_store_free(store: *mut RawStore);
    fn ds_store_set(store: *mut RawStore, key: *const c_char, bytes: *const u8, length: usize)
    -> *mut c_char;
    fn ds_store_get(
        store: *mut RawStore,
        key: *const c_char,
        timeout_ms: i64,
        bytes: *mut *mut u8,
        length: *mut usize,
    ) -> *mut c_char;
    fn ds_group_open(
        store: *mut RawStore,
        address: *const c_char,
        rank: c_int,
        world_size: c_int,
        timeout_ms: i64,
        out: *mut *mut RawGroup,
    ) -> *mut c_char;
    fn ds_store_clone(store: *mut RawStore, out: *mut *mut RawStore) -> *mut c_char;
    fn ds_store_notice_silence(store: *mut RawStore, silence_ms: i64) -> *mut c_char;
    fn ds_device_set(index: c_int) -> *mut c_char;
    fn ds_nccl_open(
        store: *mut RawStore,
        rank: c_int,
        world_size: c_int,
        timeout_ms: i64,
        device: c_int,
        out: *mut *mut RawNccl,
    ) -> *mut c_char;
    fn ds_nccl_free(nccl: *mut RawNccl);
    fn ds_group_take_nccl(group: *mut RawGroup, nccl: *mut RawNccl);
    fn ds_group_free(group: *mut RawGroup);
    fn ds_group_abort(group: *mut RawGroup) -> *mut c_char;
    fn ds_group_all_reduce(group: *mut RawGroup, tensor: *mut c_void) -> *mut c_char;
    fn ds_group_all_reduce_start(group: *mut RawGroup, tensor: *mut c_void, number: *mut u64) -> *mut c_char;
    fn ds_group_finish(group: *mut RawGroup, number: u64) -> *mut c_char;
    fn ds_group_broadcast(group: *mut RawGroup, tensor: *mut c_void, root: c_int) -> *mut c_char;
    fn ds_group_all_gather(group: *mut RawGroup, output: *mut c_void, input: *const c_void) -> *mut c_char;
}

/// A result with c10d's error message.
type Outcome<T> = Result<T, String>;

/// Client of the job's key-value store. The host's `Store` also runs the server.
pub struct Store(NonNull<RawStore>);

// SAFETY: the pointer is owned. The store behind it has atomic reference counts and its own locks, and is not tied to
// a thread.
unsafe impl Send for Store {}

impl Store {
    /// Connects to the store at `host:port`, or hosts the store at that address. Also returns the port, because a host may pass 0 to let
    /// the system choose one. Keys get the prefix `prefix`.
    pub fn open(
        host: &str,
        port: u16,
        is_host: bool,
        timeout: Duration,
        prefix: &str,
    ) -> Outcome<(Self, u16)> {
        let (host, prefix) = (to_c_string(host)?, to_c_string(prefix)?);
        let (mut bound, mut raw) = (port, ptr::null_mut());
        // SAFETY: both strings and both out-pointers outlive the call, which keeps none of them.
        check(unsafe {
            ds_store_open(host.as_ptr(), &mut bound, is_host, to_millis(timeout), prefix.as_ptr(), &mut raw)
        })?;
        Ok((Self(not_null(raw)?), bound))
    }

    /// Opens another connection to the same keys. A wait on one connection does not block the other.
    pub fn clone_connection(&self) -> Outcome<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the store lives until `self` is dropped; the out-pointer outlives the call.
        check(unsafe { ds_store_clone(self.0.as_ptr(), &mut raw) })?;
        Ok(Self(not_null(raw)?))
    }

    /// Makes every later wait fail when the store's host has not answered for `after`, even if the wait's timeout is longer. The initial
    /// limit is 15 s, or the timeout of `open` if that is less. Does nothing on systems other than Linux.
    pub fn set_silence_timeout(&self, after: Duration) -> Outcome<()> {
        // SAFETY: the store lives until `self` is dropped.
        check(unsafe { ds_store_notice_silence(self.0.as_ptr(), to_millis(after)) })
    }

    /// Sets a key.
    pub fn set(&self, key: &str, value: &[u8]) -> Outcome<()> {
        let key = to_c_string(key)?;
        // SAFETY: the store lives until `self` is dropped and locks itself. Key and value outlive the call, which
        // copies them.
        check(unsafe { ds_store_set(self.0.as_ptr(), key.as_ptr(), value.as_ptr(), value.len()) })
    }

    /// Waits for a key and returns its value.
    pub fn get(&self, key: &str, timeout: Duration) -> Outcome<Vec<u8>> {
        let key = to_c_string(key)?;
        let (mut bytes, mut length) = (ptr::null_mut(), 0);
        // SAFETY: as for `set`; the out-pointers outlive the call.
        check(unsafe {
            ds_store_get(self.0.as_ptr(), key.as_ptr(), to_millis(timeout), &mut bytes, &mut length)
        })?;
        // SAFETY: without an error, `bytes` points to `length` bytes from malloc, which this function owns.
        let value = unsafe { slice::from_raw_parts(bytes, length) }.to_vec();
        // SAFETY: the bytes came from malloc, and nothing else points to them.
        unsafe { libc::free(bytes.cast()) };
        Ok(value)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `ds_store_open` and is freed only here. Groups hold counted references of their own.
        unsafe { ds_store_free(self.0.as_ptr()) }
    }
}

/// Makes a GPU the current device of the calling thread.
pub fn set_device(index: usize) -> Outcome<()> {
    let index = to_c_int(index)?;
    // SAFETY: the shim takes a plain number, and libtorch's device guards live as long as the process.
    check(unsafe { ds_device_set(index) })
}

/// Rank, world size and timeout of a new connection.
#[derive(Debug, Clone, Copy)]
pub struct GroupMember {
    /// Rank of this process.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Timeout of a collective.
    pub timeout: Duration,
}

/// NCCL connection of the GPUs of all ranks.
pub struct Nccl(NonNull<RawNccl>);

// SAFETY: the pointer is owned. One thread may create a c10d process group, and another may use it.
unsafe impl Send for Nccl {}

impl Nccl {
    /// Connects GPU `device` of this rank with the GPUs of all other ranks. Blocks until all ranks have connected;
    /// call it on a separate thread.
    pub fn open(store: &Store, member: GroupMember, device: usize) -> Outcome<Self> {
        let (rank, world_size) = (to_c_int(member.rank)?, to_c_int(member.world_size)?);
        let (device, timeout, mut raw) = (to_c_int(device)?, to_millis(member.timeout), ptr::null_mut());
        // SAFETY: the store lives during the call, which takes a counted reference. The out-pointer outlives the
        // call.
        check(unsafe { ds_nccl_open(store.0.as_ptr(), rank, world_size, timeout, device, &mut raw) })?;
        Ok(Self(not_null(raw)?))
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `ds_nccl_open`. Only this function frees it, because `use_nccl` forgets the
        // value that it takes.
        unsafe { ds_nccl_free(self.0.as_ptr()) }
    }
}

/// Collectives over Gloo, and over NCCL for CUDA tensors. Threads must not share a group: ranks match collectives by
/// their order.
pub struct Group(NonNull<RawGroup>);

impl Group {
    /// Connects to all other ranks over Gloo; ranks find each other through the store. The other ranks reach this
    /// host at `address`.
    pub fn open(store: &Store, address: &str, member: GroupMember) -> Outcome<Self> {
        let address = to_c_string(address)?;
        let (rank, world_size) = (to_c_int(member.rank)?, to_c_int(member.world_size)?);
        let (timeout, mut raw) = (to_millis(member.timeout), ptr::null_mut());
        // SAFETY: the store lives during the call, which takes a counted reference. The string and the out-pointer
        // outlive the call.
        check(unsafe {
            ds_group_open(store.0.as_ptr(), address.as_ptr(), rank, world_size, timeout, &mut raw)
        })?;
        Ok(Self(not_null(raw)?))
    }

    /// Uses NCCL for CUDA tensors from now on.
    pub fn use_nccl(&mut self, nccl: Nccl) {
        // SAFETY: both pointers are live. The group is borrowed mutably, and owns the connection afterwards.
        unsafe { ds_group_take_nccl(self.0.as_ptr(), nccl.0.as_ptr()) };
        mem::forget(nccl);
    }

    /// Sums a contiguous tensor over all ranks, in place.
    pub fn all_reduce(&self, tensor: &mut Tensor) -> Outcome<()> {
        // SAFETY: the group lives until `self` is dropped. The tensor stays mutably borrowed until the shim has
        // waited for the collective.
        check(unsafe { ds_group_all_reduce(self.0.as_ptr(), tensor.as_mut_ptr().cast()) })
    }

    /// Starts an all-reduce without waiting for it.
    pub fn start_all_reduce(&self, mut tensor: Tensor) -> Outcome<PendingAllReduce> {
        let mut number = 0;
        // SAFETY: the group lives until `self` is dropped. This function owns the tensor, and c10d holds a counted
        // reference to its storage during the collective. The out-pointer outlives the call.
        check(unsafe {
            ds_group_all_reduce_start(self.0.as_ptr(), tensor.as_mut_ptr().cast(), &mut number)
        })?;
        Ok(PendingAllReduce { number, tensor })
    }

    /// Waits for an all-reduce that this group started. On a GPU the current stream waits, not the host.
    pub fn finish(&self, sum: PendingAllReduce) -> Outcome<Tensor> {
        // SAFETY: the group lives until `self` is dropped.
        check(unsafe { ds_group_finish(self.0.as_ptr(), sum.number) })?;
        Ok(sum.tensor)
    }

    /// Broadcasts a contiguous tensor of rank `root` to all ranks, in place.
    pub fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Outcome<()> {
        let root = to_c_int(root)?;
        // SAFETY: as for `all_reduce`.
        check(unsafe { ds_group_broadcast(self.0.as_ptr(), tensor.as_mut_ptr().cast(), root) })
    }

    /// Gathers a contiguous tensor of every rank into `output`, `[world size, …]`.
    pub fn all_gather(&self, output: &mut Tensor, input: &Tensor) -> Outcome<()> {
        // SAFETY: as for `all_reduce`. The shim only reads the input.
        check(unsafe {
            ds_group_all_gather(self.0.as_ptr(), output.as_mut_ptr().cast(), input.as_ptr().cast())
        })
    }

    /// Drops the collectives in progress and closes all connections, which the other ranks notice. Later operations
    /// fail.
    pub fn abort(&self) -> Outcome<()> {
        // SAFETY: the group lives until `self` is dropped.
        check(unsafe { ds_group_abort(self.0.as_ptr()) })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `ds_group_open` and is freed only here.
        unsafe { ds_group_free(self.0.as_ptr()) }
    }
}

/// An all-reduce in progress. The group keeps c10d's handle.
pub struct PendingAllReduce {
    number: u64,
    tensor: Tensor,
}

/// Takes ownership of an error message.
pub(super) fn check(error: *mut c_char) -> Outcome<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: the shim returns null or a C string from strdup, which this function owns.
    let said = unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned();
    // SAFETY: the string came from malloc, and nothing else points to it.
    unsafe { libc::free(error.cast()) };
    Err(said)
}

fn to_c_string(text: &str) -> Outcome<CString> {
    CString::new(text).map_err(|error| error.to_string())
}

fn to_c_int(value: usize) -> Outcome<c_int> {
    c_int::try_from(value).map_err(|error| error.to_string())
}

fn not_null<T>(raw: *mut T) -> Outcome<NonNull<T>> {
    NonNull::new(raw).ok_or_else(|| "c10d returned nothing".into())
}

fn to_millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
