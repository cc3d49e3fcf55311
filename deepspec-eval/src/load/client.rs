//! Users of a server: each request is timed from its first byte out to its last byte in.

use std::env;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use deepspec_core::rng::{Purpose, Stream};
use reqwest::Url;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time;

use super::Level;

/// How long a server may say nothing.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is asked.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// Its suite.
    pub suite: String,
    /// Its id there.
    pub sample: String,
    /// The user's message.
    pub text: String,
}

/// When requests are made.
#[derive(Debug, Clone, Copy)]
pub struct Arrivals {
    /// How many.
    pub level: Level,
    /// Before what counts.
    pub warm_up: Duration,
    /// What counts.
    pub seconds: Duration,
}

/// A request and what became of it; times are since the run began.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    /// Suite of its prompt.
    pub suite: String,
    /// Id of its prompt.
    pub sample: String,
    /// When it was made.
    pub begun: Duration,
    /// When its answer had ended, or it had failed.
    pub ended: Duration,
    /// When text came; the first and the last are its first and last token.
    pub chunks: Vec<Duration>,
    /// Tokens of prompt and answer, as the server counts them.
    pub tokens: [u64; 2],
    /// Why there is no answer.
    pub problem: Option<String>,
}

/// One server's model.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    url: Url,
    model: String,
    asking: Asking,
}

/// How it is asked.
#[derive(Debug, Clone, Copy)]
pub struct Asking {
    /// Tokens of an answer at most.
    pub max_tokens: u32,
    /// Divides the logits.
    pub temperature: f64,
    /// Chat templates' `enable_thinking`, where it is said.
    pub thinking: Option<bool>,
}

impl Client {
    /// Finds out whether somebody is there.
    ///
    /// # Errors
    /// Nobody is, or has no model.
    pub fn connect(
        runtime: &Runtime,
        server: &str,
        model: Option<&str>,
        asking: Asking,
    ) -> anyhow::Result<Self> {
        let mut headers = HeaderMap::new();
        if let Ok(key) = env::var("OPENAI_API_KEY") {
            let value = HeaderValue::from_str(&format!("Bearer {key}"));
            headers.insert(
                AUTHORIZATION,
                value.context("OPENAI_API_KEY holds characters that no header may have")?,
            );
        }
        // A connection for each request: servers close idle ones, and a request that meets that is lost.
        deepspec_hub::prepare_tls();
        let http = reqwest::Client::builder()
            .pool_max_idle_per_host(0)
            .default_headers(headers)
            .read_timeout(PATIENCE)
            .build()?;
        let url = |path: &str| Url::parse(&format!("{server}{path}")).with_context(|| server.to_string());
        let model = match model {
            Some(model) => model.to_string(),
            None => {
                let listed = async {
                    http.get(url("/v1/models")?).send().await?.json::<Value>().await.context("its list")
                };
                let listed =
                    runtime.block_on(listed).with_context(|| format!("asking {server} for its models"))?;
                let first = listed["data"][0]["id"].as_str();
                first.ok_or_else(|| anyhow!("{server} lists no model; name it with --model"))?.to_string()
            }
        };
        Ok(Self { url: url("/v1/chat/completions")?, http, model, asking })
    }

    /// Asks until the time is over, and waits for what is under way then.
    pub async fn ask(&self, prompts: Arc<Vec<Prompt>>, arrivals: Arrivals) -> Vec<Asked> {
        let (begun, end) = (Instant::now(), arrivals.warm_up + arrivals.seconds);
        let next = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        match arrivals.level {
            Level::Concurrency(users) => {
                for _ in 0..users {
                    let (client, prompts, next) = (self.clone(), Arc::clone(&prompts), Arc::clone(&next));
                    tasks.spawn(async move {
                        let mut asked = vec![];
                        while begun.elapsed() < end {
                            let prompt = &prompts[next.fetch_add(1, Ordering::Relaxed) % prompts.len()];
                            asked.push(client.request(prompt, begun).await);
                            // Who is turned away does not hammer at the door.
                            if asked.last().is_some_and(|asked| asked.problem.is_some()) {
                                time::sleep(Duration::from_millis(200)).await;
                            }
                        }
                        asked
                    });
                }
            }
            Level::Rate(rate) => {
                let stream = Stream::new(rate.to_bits(), "arrivals");
                let mut at = Duration::ZERO;
                for index in 0u64.. {
                    // Times between arrivals by chance are exponential.
                    at +=
                        Duration::from_secs_f64(-(1.0 - stream.uniform(index, Purpose::Init, 0)).ln() / rate);
                    if at >= end {
                        break;
                    }
                    time::sleep_until((begun + at).into()).await;
                    let (client, prompts) = (self.clone(), Arc::clone(&prompts));
                    tasks.spawn(async move {
                        vec![client.request(&prompts[index as usize % prompts.len()], begun).await]
                    });
                }
            }
        }
        let mut asked: Vec<Asked> = tasks.join_all().await.into_iter().flatten().collect();
        asked.sort_by_key(|asked| asked.begun);
        asked
    }

    async fn request(&self, prompt: &Prompt, begun: Instant) -> Asked {
        let mut asked = Asked {
            suite: prompt.suite.clone(),
            sample: prompt.sample.clone(),
            begun: begun.elapsed(),
            ..Asked::default()
        };
        if let Err(error) = self.stream(&prompt.text, begun, &mut asked).await {
            asked.problem = Some(format!("{error:#}"));
        }
        asked.ended = begun.elapsed();
        asked
    }

    async fn stream(&self, prompt: &str, begun: Instant, asked: &mut Asked) -> anyhow::Result<()> {
        let mut body = json!({
            "model": self.model, "stream": true, "stream_options": {"include_usage": true},
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.asking.max_tokens, "temperature": self.asking.temperature,
        });
        if let Some(thinking) = self.asking.thinking {
            body["chat_template_kwargs"] = json!({"enable_thinking": thinking});
        }
        let mut response = self.http.post(self.url.clone()).json(&body).send().await?;
        let status = response.status();
        if !status.is_success() {
            let said = response.text().await.unwrap_or_default();
            bail!("status {status}: {}", said.chars().take(200).collect::<String>());
        }
        let (mut buffer, mut usage) = (Vec::new(), None);
        while let Some(bytes) = response.chunk().await? {
            let now = begun.elapsed();
            buffer.extend_from_slice(&bytes);
            while let Some(at) = buffer.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = buffer.drain(..=at).collect();
                let line = String::from_utf8_lossy(&line);
                let Some(data) = line.trim_end().strip_prefix("data:").map(str::trim_start) else { continue };
                if data == "[DONE]" {
                    continue;
                }
                let event: Value = serde_json::from_str(data).context("a line of the stream")?;
                if let Some(error) = event.get("error") {
                    bail!("{error}");
                }
                let delta = &event["choices"][0]["delta"];
                let said = ["content", "reasoning_content", "reasoning"]
                    .iter()
                    .any(|key| delta[key].as_str().is_some_and(|text| !text.is_empty()));
                if said {
                    asked.chunks.push(now);
                }
                usage = event.get("usage").filter(|usage| usage.is_object()).cloned().or(usage);
            }
        }
        let Some(usage) = usage else { bail!("the stream ended without `usage`") };
        asked.tokens = ["prompt_tokens", "completion_tokens"].map(|key| usage[key].as_u64().unwrap_or(0));
        Ok(())
    }
}
