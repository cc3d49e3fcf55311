//! `states agent`: sends the states of a vLLM server on this machine over HTTP.

use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use deepspec_capture::served::{
    AGENT_PROTOCOL, Failure, ServedLimits, TOKEN_VARIABLE, VllmServer, http_client, sweep_leftovers,
    sweep_regularly,
};
use deepspec_core::cli::UsageError;
use deepspec_core::digest::sha256_of_bytes;
use deepspec_core::env;
use deepspec_core::recipe::{DEFAULT_STATES_FOLDER, check_server_urls};
use deepspec_core::usage;
use serde::Deserialize;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

/// Largest body of a request, in bytes: a prompt of a million tokens.
const MAX_BODY_BYTES: usize = 8 << 20;

/// Arguments of `states agent`.
#[derive(clap::Args)]
pub struct Args {
    /// The vLLM server on this machine
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    server: String,
    /// Folder of the server's files, its shared_storage_path
    #[arg(long, value_name = "D", default_value = DEFAULT_STATES_FOLDER)]
    folder: PathBuf,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes any free one, which the line `listening on ...` names
    #[arg(long, default_value_t = 8400)]
    port: u16,
}

/// State of the agent.
struct Agent {
    server: Arc<VllmServer>,
    token: Option<String>,
}

/// Body of a request for states.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Prompt {
    ids: Vec<i32>,
}

/// Runs the agent until a signal ends it. Other addresses than loopback need a token.
///
/// # Errors
/// Usage errors, and a port that is in use.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let token = env::read_secret(TOKEN_VARIABLE);
    let listener = TcpListener::bind((args.host.as_str(), args.port))
        .with_context(|| format!("listening on {}:{}", args.host, args.port))?;
    let address = listener.local_addr()?;
    if token.is_none() && !address.ip().is_loopback() {
        usage!(
            "--host {} is open to other machines; set {TOKEN_VARIABLE} here and on the machines that read the states",
            args.host
        );
    }
    let limits = ServedLimits::default();
    std::fs::create_dir_all(&args.folder).with_context(|| args.folder.display().to_string())?;
    sweep_leftovers(&args.folder, limits.leftover_age).with_context(|| args.folder.display().to_string())?;
    let http = http_client(&limits).map_err(anyhow::Error::msg)?;
    let url = check_server_urls(vec![args.server.clone()])
        .map_err(|problem| UsageError(format!("--server {problem}")))?
        .remove(0);
    let server = Arc::new(VllmServer::new(&http, &url, &args.folder, limits));
    let agent = Arc::new(Agent { server, token });
    let app = Router::new()
        .route("/version", get(version))
        .route("/v1/models", get(models))
        .route("/states", post(states))
        .layer(middleware::from_fn_with_state(Arc::clone(&agent), check_token))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(agent);
    let runtime = tokio::runtime::Runtime::new()?;
    listener.set_nonblocking(true)?;
    runtime.spawn(sweep_regularly(args.folder.clone(), limits.leftover_age));
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let mut terminated = signal(SignalKind::terminate())?;
        tracing::info!("listening on http://{address}, for {url}");
        let stopped = async move {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminated.recv() => {}
            }
        };
        axum::serve(listener, app).with_graceful_shutdown(stopped).await.context("serving")
    })
}

/// Refuses requests without the token.
async fn check_token(State(agent): State<Arc<Agent>>, request: Request, next: Next) -> Response {
    let sent = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    // Digests are compared, so that the time of the comparison says nothing about the token.
    let digest = |text: &str| sha256_of_bytes(text.as_bytes());
    match &agent.token {
        Some(token) if sent.map(digest) != Some(digest(&format!("Bearer {token}"))) => {
            (StatusCode::UNAUTHORIZED, "the token is missing or wrong").into_response()
        }
        _ => next.run(request).await,
    }
}

async fn version(State(agent): State<Arc<Agent>>) -> Response {
    match agent.server.probe(0).await {
        Ok(info) => Json(json!({"version": info.version, "deepspec_agent": AGENT_PROTOCOL})).into_response(),
        Err(failure) => failure_response(failure),
    }
}

async fn models(State(agent): State<Arc<Agent>>) -> Response {
    match agent.server.probe(0).await {
        Ok(info) => {
            let model = json!({"id": info.model, "max_model_len": info.max_model_len});
            Json(json!({"object": "list", "data": [model]})).into_response()
        }
        Err(failure) => failure_response(failure),
    }
}

async fn states(State(agent): State<Arc<Agent>>, Json(prompt): Json<Prompt>) -> Response {
    let request = async {
        let info = agent.server.probe(prompt.ids.len()).await?;
        agent.server.request(&info, &prompt.ids).await
    };
    match request.await {
        Ok(served) => served.into_agent_response().into_response(),
        Err(failure) => failure_response(failure),
    }
}

/// Statuses from which a client reads the same kind of failure.
fn failure_response(failure: Failure) -> Response {
    let (status, problem) = match failure {
        Failure::Unreachable(problem) => (StatusCode::SERVICE_UNAVAILABLE, problem),
        Failure::Request(problem) => (StatusCode::INTERNAL_SERVER_ERROR, problem),
        Failure::Final(problem) => (StatusCode::BAD_REQUEST, problem),
    };
    (status, problem).into_response()
}
