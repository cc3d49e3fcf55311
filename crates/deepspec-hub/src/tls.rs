//! Which library does the cryptography of HTTPS.

use rustls::crypto::ring;

/// Has ring do the cryptography of all HTTPS in this process, as ureq does by itself; to be called before a client of reqwest, which
/// brings none, is built. Whoever has chosen already keeps the choice.
pub fn prepare_tls() {
    let _ = ring::default_provider().install_default();
}
