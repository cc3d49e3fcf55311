//! Which library does the cryptography of HTTPS, and whom it trusts.

use std::env;
use std::sync::Arc;

use rustls::crypto::ring;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

/// Has ring do the cryptography of all HTTPS in this process, as ureq does by itself; to be called before a client of reqwest, which
/// brings none, is built. Whoever has chosen already keeps the choice.
pub fn prepare_tls() {
    let _ = ring::default_provider().install_default();
}

/// Trusts whom the system trusts, or `SSL_CERT_FILE` and `SSL_CERT_DIR` say, the certificate of a company's proxy among them. A system that has no
/// list of authorities, as many containers, takes Mozilla's, which is built in, unless one of those names another.
pub(crate) fn trusted() -> TlsConfig {
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
