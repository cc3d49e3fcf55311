//! Serves one model as a chat server: chat template, engine, stop strings and reasoning. [`http`]
//! provides the OpenAI API; [`ChatModel`] can also be used directly in a process.

mod body;
mod defaults;
mod engine;
mod error;
mod fields;
pub mod http;
mod metrics;
mod ranges;
mod reasoning;
mod response_stream;
mod schedule;
mod stop;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;
use std::sync::Arc;

use deepspec_core::usage;
use deepspec_engine::Request;
use deepspec_text::{ChatTokenizer, Message, RenderOptions, Role, TextError, generation_prompt};
use serde_json::Value;

pub use body::{ChatRequest, parse_chat_request};
pub use defaults::Defaults;
pub use engine::{EngineArgs, EngineStats};
pub use error::ChatError;
pub use reasoning::AnswerDelta;
pub use response_stream::{ResponseStream, Usage};

use engine::EngineThread;

/// All requests have this id, so that sampling depends only on seed and prompt.
const SHARED_REQUEST_ID: &str = "chat";

/// Bytes per context token in the first prefix that the length check tokenises. Languages use 1 to
/// 6 bytes per token.
const MAX_BYTES_PER_TOKEN: usize = 8;

/// A loaded model with its tokenizer.
pub struct ChatModel {
    tokenizer: ChatTokenizer,
    stop_ids: Arc<[i64]>,
    defaults: Defaults,
    engine: EngineThread,
}

impl ChatModel {
    /// Loads the model in `dir` and starts its engine.
    ///
    /// # Errors
    /// Fails if a file is missing, or does not fit the other files.
    pub fn load(dir: &Path, args: &EngineArgs) -> anyhow::Result<Self> {
        let tokenizer = ChatTokenizer::load(dir)?;
        if let Some(draft) = &args.draft
            && deepspec_drafters::is_language_model(draft)?
            && let Err(error) = tokenizer.check_same_vocabulary(draft)
        {
            usage!("--draft {error}");
        }
        let stop_ids: Arc<[i64]> = deepspec_models::stop_ids(dir, tokenizer.eos_token_id())?.into();
        tokenizer.log_stop_tokens(&stop_ids);
        let defaults = Defaults::read(dir);
        Ok(Self { tokenizer, stop_ids, defaults, engine: EngineThread::start(dir, args)? })
    }

    /// Logs that requests without an explicit setting get the template's default of thinking on,
    /// because other commands turn thinking off.
    pub fn report_thinking(&self) {
        let question = [Message::new(Role::User, "Hi")];
        let prompt = |thinking| generation_prompt(&self.tokenizer, &question, None, thinking).ok();
        let unsaid = prompt(None);
        if unsaid.is_some() && unsaid == prompt(Some(true)) && unsaid != prompt(Some(false)) {
            tracing::info!(
                "requests without chat_template_kwargs.enable_thinking are answered with thinking on, the template's default; \
                 deepspec-eval run and load ask without thinking"
            );
        }
    }

    /// Whether the tokenizer has all these ids.
    pub fn has_token_ids(&self, ids: &[i64]) -> bool {
        ids.iter().all(|&id| self.tokenizer.token(id).is_some())
    }

    /// Defaults of fields that a request omits.
    pub fn defaults(&self) -> &Defaults {
        &self.defaults
    }

    /// Starts an answer. Dropping the returned stream cancels the request.
    ///
    /// # Errors
    /// Fails if the template rejects the messages, or if the prompt is too long.
    pub fn start(&self, request: &ChatRequest) -> Result<ResponseStream, ChatError> {
        let tools = (!request.tools.is_empty()).then(|| Value::from(request.tools.clone()));
        let options =
            RenderOptions { add_generation_prompt: true, kwargs: request.template_kwargs.clone(), tools };
        let text = self.tokenizer.render(&request.messages, &options).map_err(text_error)?;
        let context = self.engine.context();
        self.check_length(&text, context)?;
        let prompt = self.tokenizer.encode(&text).map_err(text_error)?;
        let length = prompt.len();
        let room = context.saturating_sub(length);
        if room == 0 {
            return Err(ChatError::TooLong { prompt: length, context });
        }
        let own = if request.ignore_eos { &[][..] } else { &self.stop_ids };
        let stop_ids: Arc<[i64]> = own.iter().chain(&request.stop_token_ids).copied().collect();
        let updates = self.engine.submit(Request {
            id: SHARED_REQUEST_ID.into(),
            prompt: prompt.clone(),
            sampling: request.sampling,
            max_new_tokens: request.max_tokens.map_or(room, |limit| limit.min(room)),
            stop_ids: stop_ids.to_vec(),
        });
        Ok(ResponseStream::new(updates, self.tokenizer.stream(&text), &text, prompt, stop_ids, &request.stop))
    }

    /// Rejects a text that cannot fit, without tokenising all of it: a prefix may already have more
    /// tokens than the context.
    fn check_length(&self, text: &str, context: usize) -> Result<(), ChatError> {
        let mut least = context.saturating_mul(MAX_BYTES_PER_TOKEN);
        while text.len() > least {
            let end = (least..=text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len());
            let begun = self.tokenizer.encode(&text[..end]).map_err(text_error)?.len();
            // The text after the prefix may merge with the prefix's last token.
            if begun > context + 1 {
                return Err(ChatError::TooLong { prompt: begun, context });
            }
            least = least.saturating_mul(2);
        }
        Ok(())
    }

    /// Figures of the engine.
    pub fn engine_stats(&self) -> &EngineStats {
        self.engine.stats()
    }

    /// Context length of a conversation, in tokens.
    pub fn context(&self) -> usize {
        self.engine.context()
    }
}

fn text_error(error: TextError) -> ChatError {
    match error {
        TextError::Refused { .. } | TextError::Render { .. } | TextError::Endless { .. } => {
            ChatError::Template(error.to_string())
        }
        other => ChatError::Internal(other.to_string()),
    }
}

/// A random number for seeds and ids.
pub fn random_u64() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use serde_json::json;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn tiny(context: &str) -> ChatModel {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
        let line = ["x", "--device", "cpu", "--max-num-seqs", "1", "--max-model-len", context];
        ChatModel::load(&dir, &Line::parse_from(line).engine).unwrap()
    }

    fn asked(model: &ChatModel, text: &str) -> Result<ResponseStream, ChatError> {
        let body = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1});
        model.start(&parse_chat_request(body.to_string().as_bytes(), "m", model.defaults(), 5).unwrap())
    }

    #[test]
    fn prompts_that_cannot_fit_are_refused_by_their_beginning() {
        let model = tiny("64");
        let long = "word ".repeat(1_400_000);
        match asked(&model, &long).map(|_| ()).unwrap_err() {
            // The whole prompt has more than a million tokens.
            ChatError::TooLong { prompt, context } => {
                assert!(context == 64 && prompt > 64 && prompt <= 64 * MAX_BYTES_PER_TOKEN, "{prompt}");
            }
            other => panic!("{other}"),
        }
        let marks = "<|endoftext|>".repeat(100_000);
        match asked(&model, &marks).map(|_| ()).unwrap_err() {
            ChatError::TooLong { prompt, .. } => assert!(prompt < 64 * MAX_BYTES_PER_TOKEN, "{prompt}"),
            other => panic!("{other}"),
        }
        // A text with few tokens but many bytes is accepted.
        let marks = "<|endoftext|>".repeat(50);
        assert!(marks.len() > 64 * MAX_BYTES_PER_TOKEN);
        assert!(asked(&model, &marks).is_ok());
        // At any length, a prompt is answered if it fits, else rejected.
        for words in 0..160 {
            let text = "word ".repeat(words);
            let request = [Message::new(Role::User, text.as_str())];
            let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
            let rendered = model.tokenizer.render(&request, &options).unwrap();
            let fits = model.tokenizer.encode(&rendered).unwrap().len() < 64;
            assert_eq!(asked(&model, &text).is_ok(), fits, "{words} words");
        }
    }
}
