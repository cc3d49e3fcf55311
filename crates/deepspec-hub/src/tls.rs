//! Which library does the cryptography of HTTPS, and whom it trusts.

use rustls::crypto::ring;
use ureq::tls::{RootCerts, TlsConfig};

/// Has ring do the cryptography of all HTTPS in this process, as ureq does by itself; to be called before a client of reqwest, which
/// brings none, is built. Whoever has chosen already keeps the choice.
pub fn prepare_tls() {
    let _ = ring::default_provider().install_default();
}

/// Trusts whom the system trusts (or `SSL_CERT_FILE` and `SSL_CERT_DIR` say), the certificate of a company's proxy among them; a system that has no
/// list of authorities, as many containers, takes Mozilla's, which is built in.
pub(crate) fn trusted() -> TlsConfig {
    let has_some = !rustls_native_certs::load_native_certs().certs.is_empty();
    let roots = if has_some { RootCerts::PlatformVerifier } else { RootCerts::WebPki };
    TlsConfig::builder().root_certs(roots).build()
}
