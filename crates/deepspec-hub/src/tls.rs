//! TLS of HTTPS: the cryptography library and the trusted certificates.

use std::env;
use std::sync::Arc;

use rustls::crypto::ring;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

/// Installs ring as the cryptography library of all HTTPS in this process, unless another is
/// installed. Call this before building a reqwest client, which has no such library. ureq uses ring
/// by itself.
pub fn prepare_tls() {
    let _ = ring::default_provider().install_default();
}

/// The TLS settings: trusts the system's certificates, or the ones in `SSL_CERT_FILE` and
/// `SSL_CERT_DIR`, for example a company proxy's. A system without certificates, like many
/// containers, gets Mozilla's built-in list, unless one of these variables is set.
pub(crate) fn tls_config() -> TlsConfig {
    let found = rustls_native_certs::load_native_certs();
    let is_set = |name: &&str| env::var_os(name).is_some_and(|value| !value.is_empty());
    let named: Vec<&str> = ["SSL_CERT_FILE", "SSL_CERT_DIR"].into_iter().filter(is_set).collect();
    let roots = match (found.certs.is_empty(), named.is_empty()) {
        (true, true) => RootCerts::WebPki,
        (true, false) => {
            let errors: Vec<String> = found.errors.iter().map(ToString::to_string).collect();
            tracing::warn!(
                "{} names no certificate of an authority: no server is believed over https ({})",
                named.join(" or "),
                errors.join("; ")
            );
            RootCerts::Specific(Arc::default())
        }
        (false, _) => {
            let certificates = found.certs.iter().map(|found| Certificate::from_der(found).to_owned());
            RootCerts::Specific(Arc::new(certificates.collect()))
        }
    };
    TlsConfig::builder().root_certs(roots).build()
}
