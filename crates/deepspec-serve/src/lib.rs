//! One model that answers conversations: chat template, engine, stop strings and thoughts. [`http`] puts the OpenAI API around
//! it; within a process [`ChatModel`] is asked directly.

mod body;
mod engine;
mod error;
pub mod http;
mod metrics;
mod reply;
mod schedule;
mod stop;
mod thinking;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;
use std::sync::Arc;

use deepspec_core::usage;
use deepspec_decode::Request;
use deepspec_text::{ChatTokenizer, RenderOptions, TextError};
use serde_json::Value;

pub use body::{ChatRequest, parse};
pub use engine::{EngineArgs, Load};
pub use error::ChatError;
pub use reply::{Reply, Usage, finish_name};
pub use thinking::Delta;

use engine::EngineThread;

/// Names the randomness of every answer, so that seed and prompt alone decide it.
const REQUEST_ID: &str = "chat";

/// A loaded model with its tokenizer.
pub struct ChatModel {
    tokenizer: ChatTokenizer,
    stop_ids: Arc<[i64]>,
    engine: EngineThread,
}

impl ChatModel {
    /// Loads the model in `dir` and starts its engine.
    ///
    /// # Errors
    /// If a file is missing or does not fit the others.
    pub fn load(dir: &Path, args: &EngineArgs) -> anyhow::Result<Self> {
        let tokenizer = ChatTokenizer::load(dir)?;
        if let Some(draft) = &args.draft
            && deepspec_drafters::is_language_model(draft)?
            && let Err(error) = tokenizer.check_drafter(draft)
        {
            usage!("--draft {error}");
        }
        let stop_ids = deepspec_models::stop_ids(dir, tokenizer.eos_token_id())?.into();
        Ok(Self { tokenizer, stop_ids, engine: EngineThread::start(dir, args)? })
    }

    /// Begins an answer. Dropping the reply cancels it.
    ///
    /// # Errors
    /// If the template refuses the messages or the prompt is too long.
    pub fn start(&self, request: &ChatRequest) -> Result<Reply, ChatError> {
        let tools = (!request.tools.is_empty()).then(|| Value::from(request.tools.clone()));
        let options =
            RenderOptions { add_generation_prompt: true, kwargs: request.template_kwargs.clone(), tools };
        let text = self.tokenizer.render(&request.messages, &options).map_err(text_error)?;
        let prompt = self.tokenizer.encode(&text).map_err(text_error)?;
        let (length, context) = (prompt.len(), self.engine.context());
        let room = context.saturating_sub(length);
        if room == 0 {
            return Err(ChatError::TooLong { prompt: length, context });
        }
        let stop_ids: Arc<[i64]> = if request.ignore_eos { Arc::new([]) } else { Arc::clone(&self.stop_ids) };
        let news = self.engine.submit(Request {
            id: REQUEST_ID.into(),
            prompt: prompt.clone(),
            sampling: request.sampling,
            max_new_tokens: request.max_tokens.map_or(room, |limit| limit.min(room)),
            stop_ids: stop_ids.to_vec(),
        });
        Ok(Reply::new(news, self.tokenizer.stream(&text), &text, prompt, stop_ids, &request.stop))
    }

    /// What the engine is doing.
    pub fn load_now(&self) -> &Load {
        self.engine.load()
    }

    /// Tokens that one conversation may hold.
    pub fn context(&self) -> usize {
        self.engine.context()
    }
}

fn text_error(error: TextError) -> ChatError {
    match error {
        TextError::Refused { .. } | TextError::Render { .. } => ChatError::Template(error.to_string()),
        other => ChatError::Internal(other.to_string()),
    }
}

/// A number that nobody could foresee, for requests without a seed and for names.
pub fn fresh_number() -> u64 {
    RandomState::new().build_hasher().finish()
}
