//! Compares the prompts of a running server with this project's.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use deepspec_core::{env, jsonl, usage};
use deepspec_text::{Conversation, Role, served_prompt};
use reqwest::{Client, StatusCode, Url};
use serde_json::{Value, json};
use tokio::runtime::Builder;

use super::inspection::Inspection;
use super::row::{RowOutcome, inspect_line};
use super::settings::MaskSettings;
use crate::regenerate::openai_messages;

/// Number of rows whose prompts are compared.
const MAX_COMPARED_ROWS: usize = 64;
/// The environment variable with the server's API key.
const API_KEY_VARIABLE: &str = "OPENAI_API_KEY";
/// Timeout of a request. Rendering a prompt is fast.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A prompt to compare.
struct Probe {
    file: PathBuf,
    line: usize,
    id: String,
    /// The conversation before its last answer, with the default system message.
    before: Conversation,
}

/// Compares the prompt before the last answer of the first rows with the server's, and reports
/// differences as problems.
///
/// # Errors
/// With a usage error if the URL is invalid. Also fails if the connection fails or the server
/// refuses a request.
pub fn compare(
    url: &str,
    files: &[PathBuf],
    settings: &MaskSettings,
    inspection: &mut Inspection,
) -> anyhow::Result<()> {
    match Url::parse(url) {
        Ok(parsed) if matches!(parsed.scheme(), "http" | "https") => {}
        _ => usage!("--server {url}: expected a URL such as http://127.0.0.1:8000"),
    }
    let base = url.trim_end_matches('/').trim_end_matches("/v1");
    env::warn_unencrypted_key(API_KEY_VARIABLE, base);
    let probes = collect_probes(files, settings)?;
    let runtime =
        Builder::new_current_thread().enable_all().build().context("starting the network's runtime")?;
    deepspec_hub::prepare_tls();
    let client = Client::builder().timeout(TIMEOUT).build().context("setting up the HTTP client")?;
    let mut differing = 0;
    for probe in &probes {
        let tokens = match runtime.block_on(request_token_ids(&client, base, &probe.before))? {
            Some(tokens) => tokens,
            None => {
                let text = format!(
                    "{base} cannot say how it renders (no POST /tokenize with messages); prompts were not compared with it"
                );
                tracing::warn!("{text}");
                inspection.summary.server = Some(text);
                return Ok(());
            }
        };
        let ours = served_prompt(&settings.tokenizer, &probe.before)?;
        if ours != tokens {
            differing += 1;
            let reason = describe_difference(settings, &ours, &tokens)?;
            inspection.add_finding(&probe.file, probe.line, Some(probe.id.clone()), reason);
        }
    }
    inspection.summary.server_differs = differing;
    inspection.summary.server =
        Some(format!("{base} renders {} of {} prompts as we do", probes.len() - differing, probes.len()));
    Ok(())
}

fn collect_probes(files: &[PathBuf], settings: &MaskSettings) -> anyhow::Result<Vec<Probe>> {
    let mut probes = Vec::new();
    for batch in jsonl::line_batches_of_files(files, MAX_COMPARED_ROWS) {
        let (file, lines) = batch?;
        for line in lines {
            let RowOutcome::Row(row) = inspect_line(settings, line.parse(file)) else { continue };
            let mut before = row.conversation;
            let last = before.messages.iter().rposition(|message| message.role == Role::Assistant);
            before.messages.truncate(last.unwrap_or(before.messages.len()));
            before.messages = settings.template.with_system(&before.messages);
            probes.push(Probe {
                file: file.to_path_buf(),
                line: line.number,
                id: row.id.unwrap_or_default(),
                before,
            });
            if probes.len() == MAX_COMPARED_ROWS {
                return Ok(probes);
            }
        }
    }
    Ok(probes)
}

/// The server's token ids of a prompt; None if it has no endpoint for that.
async fn request_token_ids(
    client: &Client,
    base: &str,
    before: &Conversation,
) -> anyhow::Result<Option<Vec<i64>>> {
    let url = format!("{base}/tokenize");
    let mut body =
        json!({"messages": openai_messages::messages(&before.messages), "add_generation_prompt": true});
    if let Some(tools) = &before.tools {
        body["tools"] = tools.clone();
    }
    let mut request = client.post(&url).json(&body);
    if let Some(key) = env::read_secret(API_KEY_VARIABLE) {
        request = request.bearer_auth(key);
    }
    let response = request.send().await.with_context(|| format!("asking {url}"))?;
    let status = response.status();
    if matches!(
        status,
        StatusCode::NOT_FOUND
            | StatusCode::METHOD_NOT_ALLOWED
            | StatusCode::NOT_IMPLEMENTED
            | StatusCode::UNPROCESSABLE_ENTITY
    ) {
        return Ok(None);
    }
    let text = response.text().await.with_context(|| format!("reading the answer of {url}"))?;
    if !status.is_success() {
        let said: String = text.trim().replace('\n', " ").chars().take(300).collect();
        anyhow::bail!("{url}: HTTP {}: {said}", status.as_u16());
    }
    let answer: Value =
        serde_json::from_str(&text).with_context(|| format!("{url}: the answer is not JSON"))?;
    Ok(answer["tokens"].as_array().and_then(|tokens| tokens.iter().map(Value::as_i64).collect()))
}

/// The first difference between two prompts.
fn describe_difference(settings: &MaskSettings, ours: &[i64], theirs: &[i64]) -> anyhow::Result<String> {
    let at = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
    // The server may use another tokenizer. The tokenizer of this process cannot decode its ids.
    let shown = |ids: &[i64]| match ids.get(at) {
        Some(&id) => settings
            .tokenizer
            .decode(&[id], false)
            .map_or_else(|_| format!("id {id}"), |text| format!("{text:?}")),
        None => "the end".into(),
    };
    let before = settings.tokenizer.decode(&ours[at.saturating_sub(3)..at], false)?;
    Ok(format!(
        "the server's template differs from ours at token {at} of the prompt: behind {before:?} the server has {}, we have {}",
        shown(theirs),
        shown(ours)
    ))
}
