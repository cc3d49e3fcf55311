//! Models by their hub id.

use std::net::TcpListener;
use std::path::Path;

use deepspec_testkit::hub::{FakeHub, FakeRepo};

use crate::https::Https;
use crate::process::{Ended, Running, command, tiny};

fn serve(model: &str, endpoint: &str, cache: &Path) -> std::process::Command {
    let mut command = command(&["serve", "--model", model, "--port", "0", "--device", "cpu"]);
    command.env("HF_ENDPOINT", endpoint).env("HF_HUB_CACHE", cache);
    command
}

fn ended(mut command: std::process::Command) -> Ended {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[test]
fn a_model_on_the_hub_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let hub = FakeHub::start([FakeRepo::model("own/tiny").folder(Path::new(&tiny()))]);
    let mut command = serve("own/tiny@main", &hub.url(), dir.path());
    command.arg("--quiet");
    let server = Running::start(command);
    server.line_with("listening on ");
    drop(server);
    ended(serve("own/tony", &hub.url(), dir.path()))
        .fails_with(2, &["--model", "own/tony", "no model of that name"]);
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let words = ["own/tony", "cannot be reached", "local path", "HF_HUB_OFFLINE"];
    ended(serve("own/tony", &format!("http://{nobody}"), dir.path())).fails_with(1, &words);
}

/// Behind a company's proxy every server has the company's certificate. The system trusts it, but
/// no public list of authorities contains it.
#[test]
fn the_system_s_authorities_vouch_for_a_hub() {
    let dir = tempfile::tempdir().unwrap();
    let hub = FakeHub::start([FakeRepo::model("own/tiny").folder(Path::new(&tiny()))]);
    let https = Https::before(hub.url().trim_start_matches("http://"));
    let mut command = serve("own/tiny", &https.url, dir.path());
    command.arg("--quiet").env("SSL_CERT_FILE", https.authority());
    Running::start(command).line_with("listening on ");
    // A certificate of an unknown authority is not accepted.
    let other = tempfile::tempdir().unwrap();
    ended(serve("own/tiny", &https.url, other.path())).fails_with(1, &["own/tiny", "certificate"]);
    // A mistyped path does not make the client trust other authorities.
    let mut command = serve("own/tiny", &https.url, other.path());
    command.env("SSL_CERT_FILE", other.path().join("cb.pem")).env_remove("SSL_CERT_DIR");
    let Ended { code, stderr, .. } = ended(command);
    assert_eq!(code, Some(1), "{stderr}");
    let (warning, error) = stderr.split_once('\n').unwrap();
    assert!(warning.contains("SSL_CERT_FILE names no certificate") && warning.contains("cb.pem"), "{stderr}");
    assert!(error.contains("own/tiny") && error.contains("invalid peer certificate"), "{stderr}");
}
