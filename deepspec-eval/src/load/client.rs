//! HTTP client that times each request from sending it to the last byte of the response.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use deepspec_core::env;
use deepspec_core::rng::{Purpose, Stream};
use deepspec_text::{Completeness, FinishReason, REASONING_FIELDS};
use reqwest::Url;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time;

use super::Level;
use super::events::SseParser;

/// Read timeout of a connection to the server.
const READ_TIMEOUT: Duration = Duration::from_secs(120);

/// A prompt to send.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// Suite of the prompt.
    pub suite: String,
    /// Id of the prompt in the suite.
    pub sample: String,
    /// The user's message.
    pub text: String,
}

/// When requests are sent.
#[derive(Debug, Clone, Copy)]
pub struct Arrivals {
    /// Number of users, or requests per second.
    pub level: Level,
    /// Warm-up time before the measurement.
    pub warm_up: Duration,
    /// Duration of the measurement.
    pub seconds: Duration,
}

/// A request with its response; times are since the start of the run.
#[derive(Debug, Clone, Default)]
pub struct RequestRecord {
    /// Suite of its prompt.
    pub suite: String,
    /// Id of its prompt.
    pub sample: String,
    /// Time when the request was sent.
    pub begun: Duration,
    /// Time when the response ended or the request failed.
    pub ended: Duration,
    /// Arrival time of each text chunk. The first counts as the first token, the last as the last
    /// token.
    pub chunks: Vec<Duration>,
    /// Tokens of prompt and answer, as the server counts them.
    pub tokens: [u64; 2],
    /// Whether `tokens` has the number of text chunks, because the server did not count the
    /// answer's tokens.
    pub tokens_are_pieces: bool,
    /// Error message if the request failed.
    pub problem: Option<String>,
}

/// Client of one model on one server.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    url: Url,
    model: String,
    asking: RequestOptions,
}

/// Options of all requests.
#[derive(Debug, Clone, Copy)]
pub struct RequestOptions {
    /// `max_tokens` of each request.
    pub max_tokens: u32,
    /// Sampling temperature, which divides the logits.
    pub temperature: f64,
    /// `enable_thinking` of the chat template; None leaves it out of the request.
    pub thinking: Option<bool>,
}

impl Client {
    /// Connects to the server, and asks for its models if `model` is None.
    ///
    /// # Errors
    /// Fails if the server cannot be reached or lists no model.
    pub fn connect(
        runtime: &Runtime,
        server: &str,
        model: Option<&str>,
        asking: RequestOptions,
    ) -> anyhow::Result<Self> {
        let mut headers = HeaderMap::new();
        env::warn_unencrypted_key("OPENAI_API_KEY", server);
        if let Some(key) = env::read_secret("OPENAI_API_KEY") {
            let value = HeaderValue::from_str(&format!("Bearer {key}"));
            headers.insert(
                AUTHORIZATION,
                value.context("OPENAI_API_KEY holds characters that no header may have")?,
            );
        }
        // Each request opens a connection, because servers close idle connections and a request on
        // a closed connection is lost.
        deepspec_hub::prepare_tls();
        let http = reqwest::Client::builder()
            .pool_max_idle_per_host(0)
            .default_headers(headers)
            .read_timeout(READ_TIMEOUT)
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

    /// Sends requests until the time is over, and waits for those in flight.
    pub async fn send_requests(&self, prompts: Arc<Vec<Prompt>>, arrivals: Arrivals) -> Vec<RequestRecord> {
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
                            asked.push(client.send_request(prompt, begun).await);
                            // A user whose request failed waits before the next request.
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
                    // The times between Poisson arrivals are exponentially distributed.
                    at +=
                        Duration::from_secs_f64(-(1.0 - stream.uniform(index, Purpose::Init, 0)).ln() / rate);
                    if at >= end {
                        break;
                    }
                    time::sleep_until((begun + at).into()).await;
                    let (client, prompts) = (self.clone(), Arc::clone(&prompts));
                    tasks.spawn(async move {
                        vec![client.send_request(&prompts[index as usize % prompts.len()], begun).await]
                    });
                }
            }
        }
        let mut asked: Vec<RequestRecord> = tasks.join_all().await.into_iter().flatten().collect();
        asked.sort_by_key(|asked| asked.begun);
        asked
    }

    async fn send_request(&self, prompt: &Prompt, begun: Instant) -> RequestRecord {
        let mut asked = RequestRecord {
            suite: prompt.suite.clone(),
            sample: prompt.sample.clone(),
            begun: begun.elapsed(),
            ..RequestRecord::default()
        };
        if let Err(error) = self.send_and_stream(&prompt.text, begun, &mut asked).await {
            asked.problem = Some(format!("{error:#}"));
        }
        asked.ended = begun.elapsed();
        asked
    }

    async fn send_and_stream(
        &self,
        prompt: &str,
        begun: Instant,
        asked: &mut RequestRecord,
    ) -> anyhow::Result<()> {
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
        let kind =
            response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        if kind.starts_with("application/json") {
            let said = response.text().await.unwrap_or_default();
            bail!("no stream but JSON: {}", said.chars().take(200).collect::<String>());
        }
        let (mut events, mut stream) = (SseParser::default(), StreamState::default());
        while let Some(bytes) = response.chunk().await? {
            let now = begun.elapsed();
            for data in events.push(&bytes) {
                stream.read_event(&data, now, asked)?;
            }
        }
        if let Some(data) = events.finish() {
            stream.read_event(&data, begun.elapsed(), asked)?;
        }
        stream.finish_record(asked)
    }
}

/// State of a response stream while it is read.
#[derive(Default)]
struct StreamState {
    finish: Option<FinishReason>,
    is_done: bool,
    /// Latest token counts of prompt and answer.
    counted: [Option<u64>; 2],
}

impl StreamState {
    /// Reads the data of one event.
    fn read_event(&mut self, data: &str, now: Duration, asked: &mut RequestRecord) -> anyhow::Result<()> {
        if data.trim() == "[DONE]" {
            self.is_done = true;
            return Ok(());
        }
        let event: Value = serde_json::from_str(data).context("an event of the stream is no JSON")?;
        if !event.is_object() {
            bail!("an event of the stream is no object: {}", data.chars().take(200).collect::<String>());
        }
        // vLLM and other servers also send errors as events without `error`.
        let is_error =
            event["object"] == "error" || (event.get("choices").is_none() && event["message"].is_string());
        let own = is_error.then_some(&event);
        if let Some(error) = event.get("error").filter(|error| !error.is_null()).or(own) {
            bail!("{}", error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned));
        }
        let choice = &event["choices"][0];
        let said = ["content"]
            .iter()
            .chain(&REASONING_FIELDS)
            .any(|key| choice["delta"][key].as_str().is_some_and(|text| !text.is_empty()));
        if said || choice["delta"]["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty()) {
            asked.chunks.push(now);
        }
        self.finish = FinishReason::from_field(choice.get("finish_reason")).or(self.finish);
        // OpenAI's token counts, which take precedence over llama.cpp's `timings`.
        let counts =
            [("timings", ["prompt_n", "predicted_n"]), ("usage", ["prompt_tokens", "completion_tokens"])];
        for (object, keys) in counts {
            for (counted, key) in self.counted.iter_mut().zip(keys) {
                *counted = event[object][key].as_u64().or(*counted);
            }
        }
        Ok(())
    }

    /// Finishes the record of a request at the end of its stream.
    fn finish_record(self, asked: &mut RequestRecord) -> anyhow::Result<()> {
        match self.finish {
            Some(reason) if reason.completeness() == Completeness::Broken => {
                bail!("the answer was broken off (finish_reason {})", reason.name())
            }
            None if !self.is_done => {
                bail!("the stream ended before the answer did: neither finish_reason nor [DONE] came")
            }
            _ if asked.chunks.is_empty() => bail!("the stream had no text"),
            _ => {}
        }
        let [prompt, completion] = self.counted;
        asked.tokens_are_pieces = completion.is_none_or(|tokens| tokens == 0 && !asked.chunks.is_empty());
        let pieces = asked.chunks.len() as u64;
        asked.tokens =
            [prompt.unwrap_or(0), completion.filter(|_| !asked.tokens_are_pieces).unwrap_or(pieces)];
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepspec_testkit::mutate::Fuzzer;

    /// Reads a stream that arrives in chunks of `piece` bytes.
    fn read(stream: &[u8], piece: usize) -> (anyhow::Result<()>, RequestRecord) {
        let (mut events, mut streamed, mut asked) =
            (SseParser::default(), StreamState::default(), RequestRecord::default());
        let mut take = || {
            for bytes in stream.chunks(piece) {
                for data in events.push(bytes) {
                    streamed.read_event(&data, Duration::ZERO, &mut asked)?;
                }
            }
            if let Some(data) = std::mem::take(&mut events).finish() {
                streamed.read_event(&data, Duration::ZERO, &mut asked)?;
            }
            std::mem::take(&mut streamed).finish_record(&mut asked)
        };
        let ended = take();
        (ended, asked)
    }

    /// Number of text chunks in a stream, counted in the simplest way; `None` if a line is not
    /// JSON.
    fn pieces(stream: &[u8]) -> Option<usize> {
        let text = String::from_utf8_lossy(stream);
        let data = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .filter(|data| !data.trim().is_empty() && *data != "[DONE]");
        let said = |event: Value| {
            let delta = &event["choices"][0]["delta"];
            let texts = ["content", "reasoning_content", "reasoning"]
                .map(|key| delta[key].as_str().unwrap_or_default().to_owned());
            texts.iter().any(|text| !text.is_empty())
        };
        data.map(|data| serde_json::from_str(data).ok().map(said))
            .collect::<Option<Vec<_>>>()
            .map(|all| all.into_iter().filter(|&said| said).count())
    }

    /// Streams with random nulls, types, unknown keys and truncated lines are either counted or
    /// reported as errors.
    #[test]
    fn damaged_streams_are_counted_or_say_what_is_wrong() {
        let words = ["content", "delta", "choices", "error", "usage", "finish_reason", "abort", "stop", "x"];
        let (mut whole, mut failed) = (0, 0);
        for seed in 0..10_000 {
            let mut dice = Fuzzer::new(seed, &words);
            let mut chunks = vec![
                json!({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}], "error": null}),
            ];
            for _ in 0..=dice.roll(3) {
                chunks.push(json!({"choices": [{"index": 0, "delta": {"content": "a", "tool_calls": null}, "finish_reason": null}], "usage": null}));
            }
            chunks.push(json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}));
            chunks.push(json!({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}));
            let at = dice.roll(chunks.len());
            (0..dice.roll(3)).for_each(|_| dice.mutate(&mut chunks[at]));
            let mut stream: Vec<u8> =
                chunks.iter().flat_map(|chunk| format!("data: {chunk}\n\n").into_bytes()).collect();
            if dice.roll(4) > 0 {
                stream.extend_from_slice(b"data: [DONE]\n\n");
            }
            if dice.roll(8) == 0 {
                stream.truncate(dice.roll(stream.len()));
            }
            let piece = 1 + dice.roll(50);
            let (ended, asked) = read(&stream, piece);
            let shown = String::from_utf8_lossy(&stream);
            match ended {
                Ok(()) => {
                    whole += 1;
                    let pieces = pieces(&stream).unwrap_or_else(|| {
                        panic!("seed {seed}: a line that is no JSON was passed over: {shown}")
                    });
                    assert!(asked.chunks.len() >= pieces, "seed {seed}: {shown}");
                    assert!(pieces == 0 || asked.tokens[1] > 0, "seed {seed}: text without tokens: {shown}");
                }
                Err(error) => {
                    failed += 1;
                    assert!(!format!("{error:#}").is_empty(), "seed {seed}: {shown}");
                }
            }
            let again = read(&stream, stream.len().max(1));
            assert_eq!(
                (again.0.is_ok(), again.1.tokens),
                (read(&stream, piece).0.is_ok(), asked.tokens),
                "seed {seed}: pieces matter: {shown}"
            );
        }
        assert!(whole > 4_000 && failed > 500, "{whole} whole, {failed} failed");
    }
}
