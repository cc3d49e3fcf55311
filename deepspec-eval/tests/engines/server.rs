//! An engine's server as a separate process.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use deepspec_testkit::signal;

/// A running server. Dropping it kills the server and the processes that it started.
pub struct Server {
    child: Child,
    pub url: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = signal::send("KILL", -i64::from(self.child.id()));
        // Whatever happened to the process group, the wait must end.
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

impl Server {
    /// Starts the server on a free port and waits until its log contains `words` and it listens.
    pub fn start(mut command: Command, words: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        command.args(["--port", &port]).process_group(0);
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut server = Self { child, url: format!("http://127.0.0.1:{port}") };
        let mut log = BufReader::new(server.child.stderr.take().unwrap()).lines();
        let mut told = vec![];
        loop {
            let line = log.next().unwrap_or_else(|| panic!("it ended: {}", told.join("\n"))).unwrap();
            let ready = line.contains(words);
            told.push(line);
            if ready {
                break;
            }
        }
        // Reads the rest of the log, because a full pipe would block the server.
        thread::spawn(move || log.for_each(drop));
        // Some servers log this just before they listen.
        while ureq::get(format!("{}/health", server.url)).call().is_err() {
            assert!(server.child.try_wait().unwrap().is_none(), "it ended: {}", told.join("\n"));
            thread::sleep(Duration::from_millis(50));
        }
        server
    }

    /// Posts a JSON body and returns the answer.
    pub fn post(&self, path: &str, body: &str) -> String {
        let sent =
            ureq::post(format!("{}{path}", self.url)).header("Content-Type", "application/json").send(body);
        sent.unwrap().body_mut().read_to_string().unwrap()
    }

    /// The value of a metric; 0 if it does not exist.
    pub fn metric(&self, name: &str) -> f64 {
        let page =
            ureq::get(format!("{}/metrics", self.url)).call().unwrap().body_mut().read_to_string().unwrap();
        let line = page
            .lines()
            .find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{'])));
        line.map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    }
}
