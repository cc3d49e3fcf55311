//! Serves a model with the chat completions of the OpenAI API.

mod auth;
mod connections;
mod respond;
mod routes;

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use deepspec_core::cli::Verbosity;
use deepspec_core::usage;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::{ChatModel, EngineArgs};
use auth::{AccessPolicy, is_loopback};
use routes::{App, Limits};

/// Time for running answers to finish after a stop signal.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);

/// Arguments of `serve`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder, GGUF file or hub id (owner/name, owner/name@revision) of the model that answers
    #[arg(long, value_name = "M")]
    model: String,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes any free one, which the line `listening on ...` names
    #[arg(long, default_value_t = 30000)]
    port: u16,
    /// Name that requests use for the model; by default the folder or id as given
    #[arg(long, value_name = "NAME")]
    served_name: Option<String>,
    /// Requests that may wait while --max-num-seqs others run; further ones get status 503 with Retry-After
    #[arg(long, default_value_t = 256, value_name = "N")]
    queue: usize,
    /// Largest body of a request
    #[arg(long, default_value_t = 8, value_name = "MB")]
    max_body: usize,
    /// Key that requests must bring as `Authorization: Bearer KEY`; without it everyone who reaches the port is answered
    #[arg(long, value_name = "KEY", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    api_key: Option<String>,
    /// Connections that are open at once; further ones wait
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: u32,
    /// Seconds that a client may take to send the head of a request, to send its body, and to read any of an answer
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    client_timeout: u64,
    #[command(flatten)]
    engine: EngineArgs,
}

/// Phase of the shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ShutdownPhase {
    Serving,
    /// No new requests are accepted; running ones may finish.
    Draining,
    /// Running requests are aborted.
    Over,
}

/// Runs the server until a signal ends it.
///
/// # Errors
/// Usage errors, a model that cannot be loaded, or a port that is in use.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    let limits = args.limits()?;
    let (dir, engine) = args.engine.resolve("--model", &args.model, verbosity)?;
    let asked = format!("{}:{}", args.host, args.port);
    let listener = TcpListener::bind((args.host.as_str(), args.port));
    let listener =
        listener.with_context(|| format!("cannot listen on {asked}; choose another --host or --port"))?;
    listener.set_nonblocking(true)?;
    let model = ChatModel::load(&dir, &engine)?;
    let name = args.served_name.clone().unwrap_or_else(|| args.model.clone());
    let access = AccessPolicy { key: args.api_key.clone(), is_local: is_loopback(&args.host) };
    if !access.is_local && access.key.is_none() {
        tracing::warn!("--host {} without --api-key: everyone who reaches the port is answered", args.host);
    }
    model.report_thinking();
    let app = Arc::new(App::new(model, name, engine.max_num_seqs, limits, access));
    // The runtime is dropped here with all requests, so the engine is idle when `app` is dropped.
    Runtime::new().context("starting the server's threads")?.block_on(serve(
        listener,
        Arc::clone(&app),
        limits,
    ))
}

impl Args {
    /// The limits of clients.
    fn limits(&self) -> anyhow::Result<Limits> {
        let (mb, seconds) = (self.max_body, self.client_timeout);
        match mb.checked_mul(1 << 20) {
            Some(body) if body > 0 => Ok(Limits {
                queue: self.queue,
                body,
                client_timeout: Duration::from_secs(seconds),
                connections: self.max_connections as usize,
            }),
            _ => usage!("--max-body {mb}: must be at least 1 and fit into memory"),
        }
    }
}

/// Waits until the shutdown reaches phase `wanted`.
async fn wait_for_phase(mut phase: watch::Receiver<ShutdownPhase>, wanted: ShutdownPhase) {
    // The sender lives as long as the runtime; without it the server has ended anyway.
    let _ = phase.wait_for(|&phase| phase >= wanted).await;
}

async fn serve(listener: TcpListener, app: Arc<App>, limits: Limits) -> anyhow::Result<()> {
    let address = listener.local_addr()?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (phases, phase) = watch::channel(ShutdownPhase::Serving);
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::spawn(async move {
        let mut told = async || tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} };
        told().await;
        tracing::info!("stopping; running answers may finish, a second signal abandons them");
        phases.send_replace(ShutdownPhase::Draining);
        let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, told()).await;
        phases.send_replace(ShutdownPhase::Over);
    });
    // Printed even with --quiet, because the program that started the server may wait for this
    // line.
    print_to_stderr(&format!("listening on http://{address}\n"))?;
    tokio::select! {
        () = connections::serve(
            listener,
            routes::router(app),
            limits,
            wait_for_phase(phase.clone(), ShutdownPhase::Draining),
        ) => {}
        () = wait_for_phase(phase, ShutdownPhase::Over) => tracing::warn!("abandoned the answers that were still running"),
    }
    Ok(())
}

fn print_to_stderr(line: &str) -> io::Result<()> {
    let mut stderr = io::stderr().lock();
    io::Write::write_all(&mut stderr, line.as_bytes())?;
    io::Write::flush(&mut stderr)
}
