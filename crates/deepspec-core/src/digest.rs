//! SHA-256 digests that identify content.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::atomic::FileError;

/// An incremental SHA-256. Its parts can be delimited, so that `ab`, `c` and `a`, `bc` give
/// different digests.
#[derive(Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// Adds bytes preceded by their length, so that the boundaries of parts affect the digest.
    pub fn update_part(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    /// Adds bytes without their length.
    pub fn update_raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.update(bytes);
        self
    }

    /// The digest in lower-case hexadecimal.
    pub fn hex_digest(self) -> String {
        self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The first 12 characters of a digest or a commit, for display.
pub fn short_digest(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

/// The digest of a byte string, in hexadecimal.
pub fn sha256_of_bytes(bytes: &[u8]) -> String {
    let mut hasher = Hasher::default();
    hasher.update_raw(bytes);
    hasher.hex_digest()
}

/// The first 128 bits of the SHA-256 of a byte string. They serve as a compact hash key.
pub fn fingerprint(bytes: &[u8]) -> u128 {
    let digest = Sha256::digest(bytes);
    digest.iter().take(16).fold(0, |bits, &byte| bits << 8 | u128::from(byte))
}

/// The digest of a whole file, in hexadecimal.
///
/// # Errors
/// Fails on any I/O error, with the path.
pub fn sha256_of_file(path: &Path) -> Result<String, FileError> {
    let mut reader = File::open(path).map_err(FileError::at("reading", path))?;
    let (mut hasher, mut buffer) = (Hasher::default(), vec![0; 1 << 20]);
    loop {
        match reader.read(&mut buffer).map_err(FileError::at("reading", path))? {
            0 => return Ok(hasher.hex_digest()),
            read => hasher.update_raw(&buffer[..read]),
        };
    }
}
