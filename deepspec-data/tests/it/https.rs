//! An HTTPS server with a certificate from a private authority, as companies use them.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use rustls::crypto::ring;
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use tempfile::TempDir;

/// The server, which runs as long as the process.
pub struct Https {
    pub url: String,
    dir: TempDir,
}

impl Https {
    /// Calls `respond` with the head of every request, including the blank line, and sends the
    /// response that it returns.
    pub fn start(respond: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let certified = rcgen::generate_simple_self_signed(["localhost".to_string()]).unwrap();
        let key = PrivateKeyDer::Pkcs8(certified.signing_key.serialize_der().into());
        let config = ServerConfig::builder_with_provider(ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certified.cert.der().clone()], key)
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
        let (config, respond) = (Arc::new(config), Arc::new(respond));
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (config, respond) = (Arc::clone(&config), Arc::clone(&respond));
                thread::spawn(move || {
                    let session = ServerConnection::new(config).unwrap();
                    let mut stream = StreamOwned::new(session, connection.unwrap());
                    let mut head = vec![];
                    let mut byte = [0];
                    while !head.ends_with(b"\r\n\r\n") {
                        if !stream.read(&mut byte).is_ok_and(|read| read == 1) {
                            return;
                        }
                        head.push(byte[0]);
                    }
                    let _ = stream.write_all(&respond(&String::from_utf8_lossy(&head)));
                    stream.conn.send_close_notify();
                    let _ = stream.flush();
                    // Waits until the client has read everything and closes.
                    let _ = std::io::copy(&mut stream, &mut std::io::sink());
                });
            }
        });
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("ca.pem"), certified.cert.pem()).unwrap();
        Self { url, dir }
    }

    /// A proxy to the server without a certificate at `address`, which closes the connection after
    /// every response.
    pub fn before(address: &str) -> Self {
        let address = address.to_string();
        Self::start(move |head| {
            let mut behind = TcpStream::connect(&address).unwrap();
            behind.write_all(head.as_bytes()).unwrap();
            let mut response = vec![];
            behind.read_to_end(&mut response).unwrap();
            response
        })
    }

    /// The certificate of its authority, for `SSL_CERT_FILE`.
    pub fn authority(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }
}
