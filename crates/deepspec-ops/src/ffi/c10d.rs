//! The shim over c10d (`src/cpp`). Every function of it catches C++ exceptions and hands them back as text.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem;
use std::ptr::{self, NonNull};
use std::slice;
use std::time::Duration;

use tch::Tensor;

/// A `Store` of the shim.
#[repr(C)]
struct RawStore([u8; 0]);

/// A connection of GPUs of the shim.
#[repr(C)]
struct RawNccl([u8; 0]);

/// A `Group` of the shim.
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

/// What c10d said, in its own words.
type Outcome<T> = Result<T, String>;

/// A client of the job's key-value store; also its server, where it was opened as host.
pub struct Store(NonNull<RawStore>);

// SAFETY: the pointer is owned, and what it points to counts its references atomically and locks itself; nothing of it belongs to
// the thread that made it.
unsafe impl Send for Store {}

impl Store {
    /// Connects to the store at `host:port`, or hosts it there; also returns the port, which a host may leave to the system
    /// by asking for 0. Keys live under `prefix`.
    pub fn open(
        host: &str,
        port: u16,
        is_host: bool,
        timeout: Duration,
        prefix: &str,
    ) -> Outcome<(Self, u16)> {
        let (host, prefix) = (text(host)?, text(prefix)?);
        let (mut bound, mut raw) = (port, ptr::null_mut());
        // SAFETY: both strings and both out-pointers outlive the call, which keeps none of them.
        check(unsafe {
            ds_store_open(host.as_ptr(), &mut bound, is_host, millis(timeout), prefix.as_ptr(), &mut raw)
        })?;
        Ok((Self(not_null(raw)?), bound))
    }

    /// A connection of its own to the same keys, for another thread: a wait on one holds up no other.
    pub fn another(&self) -> Outcome<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the store lives until `self` is dropped; the out-pointer outlives the call.
        check(unsafe { ds_store_clone(self.0.as_ptr(), &mut raw) })?;
        Ok(Self(not_null(raw)?))
    }

    /// From here on every wait ends with an error, whatever time it was given, once the machine that hosts the store has been silent for
    /// so long; before, that takes 15 s, or the time that the store was opened with where that is less. Does nothing where the system is not Linux.
    pub fn notice_silence(&self, after: Duration) -> Outcome<()> {
        // SAFETY: the store lives until `self` is dropped.
        check(unsafe { ds_store_notice_silence(self.0.as_ptr(), millis(after)) })
    }

    /// Sets a key.
    pub fn set(&self, key: &str, value: &[u8]) -> Outcome<()> {
        let key = text(key)?;
        // SAFETY: the store lives until `self` is dropped and locks itself; key and value outlive the call, which copies them.
        check(unsafe { ds_store_set(self.0.as_ptr(), key.as_ptr(), value.as_ptr(), value.len()) })
    }

    /// Waits for a key and returns its value.
    pub fn get(&self, key: &str, timeout: Duration) -> Outcome<Vec<u8>> {
        let key = text(key)?;
        let (mut bytes, mut length) = (ptr::null_mut(), 0);
        // SAFETY: as for `set`; the out-pointers outlive the call.
        check(unsafe {
            ds_store_get(self.0.as_ptr(), key.as_ptr(), millis(timeout), &mut bytes, &mut length)
        })?;
        // SAFETY: without an error `bytes` is `length` bytes from malloc, and ours.
        let value = unsafe { slice::from_raw_parts(bytes, length) }.to_vec();
        // SAFETY: they came from malloc and nothing else points to them.
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

/// Makes a GPU the calling thread's current one.
pub fn set_device(index: usize) -> Outcome<()> {
    let index = number(index)?;
    // SAFETY: it takes a plain number, and the guards of devices are there as long as the process.
    check(unsafe { ds_device_set(index) })
}

/// Who opens a connection, and how.
#[derive(Debug, Clone, Copy)]
pub struct Member {
    /// This rank.
    pub rank: usize,
    /// All ranks.
    pub world_size: usize,
    /// How long a collective may take.
    pub timeout: Duration,
}

/// NCCL's connection of the GPUs of all ranks.
pub struct Nccl(NonNull<RawNccl>);

// SAFETY: the pointer is owned; c10d's process groups are made and used by different threads everywhere.
unsafe impl Send for Nccl {}

impl Nccl {
    /// Connects GPU `device` of this rank with those of all others. Blocks until all have come: a thread of its own is the place
    /// for it.
    pub fn open(store: &Store, member: Member, device: usize) -> Outcome<Self> {
        let (rank, world_size) = (number(member.rank)?, number(member.world_size)?);
        let (device, timeout, mut raw) = (number(device)?, millis(member.timeout), ptr::null_mut());
        // SAFETY: the store lives during the call, which takes a counted reference; the out-pointer outlives it.
        check(unsafe { ds_nccl_open(store.0.as_ptr(), rank, world_size, timeout, device, &mut raw) })?;
        Ok(Self(not_null(raw)?))
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `ds_nccl_open`; it is freed only here, or taken over by `take_nccl`, which forgets it.
        unsafe { ds_nccl_free(self.0.as_ptr()) }
    }
}

/// Collectives over Gloo and, for CUDA tensors, NCCL. Not to be shared among threads: their order is what matches them up.
pub struct Group(NonNull<RawGroup>);

impl Group {
    /// Connects to all other ranks, who find each other through the store, over Gloo; `address` is this host's, as they reach it.
    pub fn open(store: &Store, address: &str, member: Member) -> Outcome<Self> {
        let address = text(address)?;
        let (rank, world_size) = (number(member.rank)?, number(member.world_size)?);
        let (timeout, mut raw) = (millis(member.timeout), ptr::null_mut());
        // SAFETY: the store lives during the call, which takes a counted reference; the string and the out-pointer outlive it.
        check(unsafe {
            ds_group_open(store.0.as_ptr(), address.as_ptr(), rank, world_size, timeout, &mut raw)
        })?;
        Ok(Self(not_null(raw)?))
    }

    /// Lets NCCL carry tensors of GPUs from now on.
    pub fn take_nccl(&mut self, nccl: Nccl) {
        // SAFETY: both live; the group is borrowed mutably, and owns the connection from here on.
        unsafe { ds_group_take_nccl(self.0.as_ptr(), nccl.0.as_ptr()) };
        mem::forget(nccl);
    }

    /// Adds up a contiguous tensor over all ranks, in place.
    pub fn all_reduce(&self, tensor: &mut Tensor) -> Outcome<()> {
        // SAFETY: the group lives until `self` is dropped; the tensor stays mutably borrowed until the shim, which waits for the
        // collective, has returned.
        check(unsafe { ds_group_all_reduce(self.0.as_ptr(), tensor.as_mut_ptr().cast()) })
    }

    /// The same without waiting for it.
    pub fn start_all_reduce(&self, mut tensor: Tensor) -> Outcome<Sum> {
        let mut number = 0;
        // SAFETY: the group lives until `self` is dropped; the tensor is ours, and c10d holds a counted reference to its storage until the
        // collective is over. The out-pointer outlives the call.
        check(unsafe {
            ds_group_all_reduce_start(self.0.as_ptr(), tensor.as_mut_ptr().cast(), &mut number)
        })?;
        Ok(Sum { number, tensor })
    }

    /// Waits for a sum that this group started; on a GPU has what is asked of it from now on wait.
    pub fn finish(&self, sum: Sum) -> Outcome<Tensor> {
        // SAFETY: the group lives until `self` is dropped.
        check(unsafe { ds_group_finish(self.0.as_ptr(), sum.number) })?;
        Ok(sum.tensor)
    }

    /// Copies a contiguous tensor of rank `root` to all ranks, in place.
    pub fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Outcome<()> {
        let root = number(root)?;
        // SAFETY: as for `all_reduce`.
        check(unsafe { ds_group_broadcast(self.0.as_ptr(), tensor.as_mut_ptr().cast(), root) })
    }

    /// Collects a contiguous tensor of every rank in `output`, `[world size, …]`.
    pub fn all_gather(&self, output: &mut Tensor, input: &Tensor) -> Outcome<()> {
        // SAFETY: as for `all_reduce`; the input is only read.
        check(unsafe {
            ds_group_all_gather(self.0.as_ptr(), output.as_mut_ptr().cast(), input.as_ptr().cast())
        })
    }

    /// Gives up what is under way and closes all connections, from which the other ranks learn of it. No operation works then.
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

/// A sum over all ranks that is under way. The group keeps what of it is c10d's.
pub struct Sum {
    number: u64,
    tensor: Tensor,
}

/// Takes over the text of an error.
pub(super) fn check(error: *mut c_char) -> Outcome<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: the shim returns null or a C string from strdup, which is ours.
    let said = unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned();
    // SAFETY: it came from malloc and nothing else points to it.
    unsafe { libc::free(error.cast()) };
    Err(said)
}

fn text(text: &str) -> Outcome<CString> {
    CString::new(text).map_err(|error| error.to_string())
}

fn number(value: usize) -> Outcome<c_int> {
    c_int::try_from(value).map_err(|error| error.to_string())
}

fn not_null<T>(raw: *mut T) -> Outcome<NonNull<T>> {
    NonNull::new(raw).ok_or_else(|| "c10d returned nothing".into())
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
