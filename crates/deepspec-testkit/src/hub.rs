//! A server on loopback that implements the used part of the Hugging Face hub API and fails on
//! demand.
//!
//! Small files are served by the hub itself after a redirect. Large files (`lfs`) are served after
//! a redirect to another host name, as by the real hub.

mod answer;
mod repo;

use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use answer::{HubResponse, respond};
pub use repo::FakeRepo;

/// A fault of a response.
#[derive(Clone)]
pub enum Fault {
    /// This status with these headers, and an empty body.
    Status(u16, Vec<(&'static str, String)>),
    /// The connection closes after this many bytes of the body.
    BreakAfter(usize),
    /// The connection closes without a response.
    Closed,
    /// The requested range is ignored.
    NoRanges,
    /// The body has the announced length but wrong bytes.
    Flipped,
}

/// A received request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// `GET` or `HEAD`.
    pub method: String,
    /// The path with its query.
    pub path: String,
    /// The `Range` header.
    pub range: Option<String>,
    /// The `Authorization` header.
    pub authorization: Option<String>,
}

struct FaultRule {
    part: String,
    left: usize,
    fault: Fault,
}

#[derive(Default)]
struct State {
    repos: Mutex<Vec<FakeRepo>>,
    rules: Mutex<Vec<FaultRule>>,
    requests: Mutex<Vec<Request>>,
    stops: AtomicBool,
}

/// The server; dropping it ends the server.
pub struct FakeHub {
    state: Arc<State>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl FakeHub {
    /// Serves `repos` on a free port.
    pub fn start(repos: impl IntoIterator<Item = FakeRepo>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("its address");
        let state = Arc::new(State::default());
        state.repos.lock().expect("unshared").extend(repos);
        let shared = Arc::clone(&state);
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.stops.load(Ordering::SeqCst) {
                    break;
                }
                let (state, port) = (Arc::clone(&shared), address.port());
                // Clients that disconnect are ignored.
                thread::spawn(move || stream.and_then(|stream| serve(&state, port, stream)).ok());
            }
        });
        Self { state, address, thread: Some(thread) }
    }

    /// The value for `HF_ENDPOINT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Adds a repository. It replaces repositories with its name and one of its revisions.
    pub fn put(&self, repo: FakeRepo) {
        let mut repos = lock(&self.state.repos);
        repos.retain(|old| {
            old.prefix() != repo.prefix() || !old.revisions.iter().any(|own| repo.revisions.contains(own))
        });
        repos.push(repo);
    }

    /// Injects a fault into the next `times` requests whose path contains `part`. Faults of the
    /// body apply only to requests that fetch content.
    pub fn fail(&self, part: &str, times: usize, fault: Fault) {
        lock(&self.state.rules).push(FaultRule { part: part.into(), left: times, fault });
    }

    /// All requests so far, in order.
    pub fn requests(&self) -> Vec<Request> {
        lock(&self.state.requests).clone()
    }

    /// Clears the list of requests.
    pub fn forget(&self) {
        lock(&self.state.requests).clear();
    }
}

impl Drop for FakeHub {
    fn drop(&mut self) {
        self.state.stops.store(true, Ordering::SeqCst);
        // Wakes the listening thread.
        let woken = TcpStream::connect(self.address).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(state: &State, port: u16, stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace().map(str::to_string);
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(()) };
    let mut request = Request { method, path, range: None, authorization: None };
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            break;
        }
        let Some((name, value)) = line.trim().split_once(": ") else { continue };
        match name.to_ascii_lowercase().as_str() {
            "range" => request.range = Some(value.into()),
            "authorization" => request.authorization = Some(value.into()),
            _ => {}
        }
    }
    lock(&state.requests).push(request.clone());
    let fault = take_fault(state, &request);
    if matches!(fault, Some(Fault::Closed)) {
        return Ok(());
    }
    let answer = match &fault {
        Some(Fault::Status(status, headers)) => HubResponse::empty(*status, headers.clone()),
        _ => respond(&lock(&state.repos), port, request.path.split('?').next().unwrap_or_default()),
    };
    send(stream, &request, answer, fault)
}

/// Takes the first matching fault and counts it as used.
fn take_fault(state: &State, request: &Request) -> Option<Fault> {
    let sends_content = request.method == "GET" && is_content(&request.path);
    let mut rules = lock(&state.rules);
    let rule = rules.iter_mut().find(|rule| {
        let applies = matches!(rule.fault, Fault::Status(..)) || sends_content;
        rule.left > 0 && applies && request.path.contains(&rule.part)
    })?;
    rule.left -= 1;
    Some(rule.fault.clone())
}

fn is_content(path: &str) -> bool {
    path.starts_with("/cdn/") || path.starts_with("/api/resolve-cache/")
}

fn send(
    mut stream: TcpStream,
    request: &Request,
    answer: HubResponse,
    fault: Option<Fault>,
) -> io::Result<()> {
    let HubResponse { mut status, mut headers, mut body } = answer;
    let total = body.len();
    let first = request.range.as_deref().filter(|_| status == 200 && !matches!(fault, Some(Fault::NoRanges)));
    if let Some((start, end)) = first.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) {
        let start: usize = start.parse().unwrap_or(0);
        let end = end.parse().map_or(total, |end: usize| (end + 1).min(total));
        if start >= total {
            (status, body) = (416, vec![]);
            headers.push(("Content-Range", format!("bytes */{total}")));
        } else {
            (status, body) = (206, body[start..end].to_vec());
            headers.push(("Content-Range", format!("bytes {start}-{}/{total}", end - 1)));
        }
    }
    if matches!(fault, Some(Fault::Flipped)) {
        body.iter_mut().for_each(|byte| *byte ^= 1);
    }
    write!(stream, "HTTP/1.1 {status} Told\r\nConnection: close\r\nContent-Length: {}\r\n", body.len())?;
    for (name, value) in headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    if request.method == "HEAD" {
        return Ok(());
    }
    let sent = match fault {
        Some(Fault::BreakAfter(bytes)) => bytes.min(body.len()),
        _ => body.len(),
    };
    stream.write_all(&body[..sent])
}
