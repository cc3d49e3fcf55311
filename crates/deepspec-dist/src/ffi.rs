//! The one room of this crate with `unsafe` in it.
#![expect(unsafe_code, reason = "loading a shared library runs its initialisers")]

use libloading::Library;

/// libtorch's CUDA part. Our binaries need only libtorch_cpu, so CUDA stays invisible until this is opened.
const CUDA_LIBRARY: &str = "libtorch_cuda.so";

/// Opens libtorch's CUDA part for the rest of the process.
pub fn load_cuda() -> Result<(), libloading::Error> {
    // SAFETY: the library is the sibling of the libtorch_cpu that is linked already, found by the same run path; its initialisers
    // only register kernels. It is never closed, so nothing it registered can dangle.
    let library = unsafe { Library::new(CUDA_LIBRARY) }?;
    std::mem::forget(library);
    Ok(())
}
