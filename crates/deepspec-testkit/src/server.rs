//! A small HTTP/1.1 server that responds, fails and stops on demand.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use socket2::SockRef;

/// A received request.
pub struct ReceivedRequest {
    /// Number of earlier requests, except those to `/v1/models`.
    pub number: usize,
    /// The path.
    pub path: String,
    /// The `Authorization` header.
    pub authorization: Option<String>,
    /// The JSON body; null if there is none.
    pub body: Value,
}

/// Reaction of the server to a request.
pub enum Reply {
    /// Status 200 with this JSON.
    Json(Value),
    /// Another status with headers and a body.
    Status(u16, Vec<(&'static str, String)>, String),
    /// Like `Json`, after a delay.
    Later(Duration, Value),
    /// No response until the client disconnects.
    Hang,
    /// A connection reset.
    Reset,
    /// Bytes that are not HTTP.
    Garbage(&'static [u8]),
    /// The head of a response and half of its body.
    Truncated(Value),
}

/// A running server; dropping it stops the server.
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    /// Whether the server is stopped.
    dead: Arc<AtomicBool>,
}

type Replies = dyn Fn(ReceivedRequest) -> Reply + Send + Sync;

struct Shared {
    reply: Box<Replies>,
    /// The answer to `GET /v1/models`.
    models: Value,
    count: AtomicUsize,
    /// Second handles of open connections, for closing them.
    connections: Mutex<HashMap<SocketAddr, TcpStream>>,
}

impl Server {
    /// Starts a server that answers `GET /v1/models` itself and calls `reply` for all other
    /// requests.
    pub fn start(reply: impl Fn(ReceivedRequest) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_with_models(json!([]), reply)
    }

    /// Like [`Self::start`], for a server that lists `models`.
    pub fn start_with_models(
        models: Value,
        reply: impl Fn(ReceivedRequest) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("the port");
        let shared = Arc::new(Shared {
            reply: Box::new(reply),
            models: json!({"object": "list", "data": models}),
            count: AtomicUsize::new(0),
            connections: Mutex::default(),
        });
        let mut server = Self { address, shared, dead: Arc::new(AtomicBool::new(false)) };
        server.listen(listener);
        server
    }

    /// Base URL of the server.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Number of requests so far, except those to `/v1/models`.
    pub fn count(&self) -> usize {
        self.shared.count.load(Ordering::SeqCst)
    }

    /// Resets all connections and refuses new ones.
    pub fn die(&self) {
        if self.dead.swap(true, Ordering::SeqCst) {
            return;
        }
        // Wakes the listening thread, which then ends.
        drop(TcpStream::connect(self.address));
        for (_, connection) in self.shared.connections.lock().expect("no panic").drain() {
            let _ = SockRef::from(&connection).set_linger(Some(Duration::ZERO));
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        // The port is free once connections fail.
        while TcpStream::connect(self.address).is_ok() {
            thread::yield_now();
        }
    }

    /// Listens at the old address again after [`Self::die`].
    pub fn revive(&mut self) {
        if !self.dead.load(Ordering::SeqCst) {
            return;
        }
        self.dead = Arc::new(AtomicBool::new(false));
        let listener = TcpListener::bind(self.address).expect("the old port");
        self.listen(listener);
    }

    fn listen(&mut self, listener: TcpListener) {
        let (shared, dead) = (Arc::clone(&self.shared), Arc::clone(&self.dead));
        thread::spawn(move || {
            while let Ok((connection, peer)) = listener.accept() {
                if dead.load(Ordering::SeqCst) {
                    return;
                }
                let _ = connection.set_nodelay(true);
                if let Ok(copy) = connection.try_clone() {
                    shared.connections.lock().expect("no panic").insert(peer, copy);
                }
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    // Clients that disconnect are not an error here.
                    let _ = serve(connection, &shared);
                    // The connection closes, or resets, with its last handle.
                    shared.connections.lock().expect("no panic").remove(&peer);
                });
            }
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.die();
    }
}

fn serve(connection: TcpStream, shared: &Shared) -> io::Result<()> {
    let mut reader = BufReader::new(connection.try_clone()?);
    let mut out = connection;
    while let Some(mut ask) = read_request(&mut reader)? {
        if ask.path == "/v1/models" {
            write_response(&mut out, 200, &[], &shared.models.to_string())?;
            continue;
        }
        ask.number = shared.count.fetch_add(1, Ordering::SeqCst);
        match (shared.reply)(ask) {
            Reply::Json(value) => write_response(&mut out, 200, &[], &value.to_string())?,
            Reply::Status(status, headers, text) => write_response(&mut out, status, &headers, &text)?,
            Reply::Later(pause, value) => {
                thread::sleep(pause);
                write_response(&mut out, 200, &[], &value.to_string())?;
            }
            Reply::Hang => {
                // Ends when the client disconnects.
                io::copy(&mut reader, &mut io::sink())?;
                return Ok(());
            }
            Reply::Reset => {
                SockRef::from(&out).set_linger(Some(Duration::ZERO))?;
                return Ok(());
            }
            Reply::Garbage(bytes) => {
                out.write_all(bytes)?;
                return Ok(());
            }
            Reply::Truncated(value) => {
                let text = value.to_string();
                write!(
                    out,
                    "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{}",
                    text.len(),
                    &text[..text.len() / 2]
                )?;
                return Ok(());
            }
        }
    }
    Ok(())
}

fn write_response(
    out: &mut TcpStream,
    status: u16,
    headers: &[(&'static str, String)],
    text: &str,
) -> io::Result<()> {
    let mut head = format!(
        "HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n",
        text.len()
    );
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    // A single write, so that small responses fit one packet.
    out.write_all(format!("{head}\r\n{text}").as_bytes())
}

fn read_request(reader: &mut BufReader<TcpStream>) -> io::Result<Option<ReceivedRequest>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let path = line.split(' ').nth(1).unwrap_or_default().to_string();
    let (mut length, mut authorization) = (0, None);
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().map_err(io::Error::other)?,
            "authorization" => authorization = Some(value.to_string()),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let body = serde_json::from_slice(&body).unwrap_or_default();
    Ok(Some(ReceivedRequest { number: 0, path, authorization, body }))
}
