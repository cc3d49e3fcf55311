//! Input rows: their requests and their output.

use deepspec_core::row::{self, UniqueIds};
use deepspec_text::{
    Conversation, FINISH_REASON, FinishReason, MESSAGE_KEYS, Message, PROMPT_TOKEN_IDS, Role,
};
use serde_json::{Map, Value, json};

use super::answer::{AskError, TokenCounts};
use super::backend::Backend;
use super::openai_messages;
use super::overrides::Overrides;
use super::settings::{Reasoning, RequestKey, RequestSettings};

/// A usable input row, or one sample of it.
#[derive(Debug, Clone)]
pub struct Row {
    /// The output row's id as text. The id is empty until [`Row::with_unique_id`], if the row has no id.
    pub id: String,
    /// The output row, except for its conversation.
    fields: Map<String, Value>,
    plan: Vec<Step>,
    tools: Option<Value>,
    overrides: Overrides,
}

/// A step of a conversation.
#[derive(Debug, Clone, PartialEq)]
enum Step {
    /// A message of the row: system, user or tool, or a tool call with a recorded result.
    Message(Message),
    /// A request to the model.
    Generate,
}

/// An answered row.
pub struct AnsweredRow {
    /// The output row.
    pub fields: Map<String, Value>,
    /// Tokens of its requests.
    pub tokens: TokenCounts,
}

impl Row {
    /// Parses a row and plans its conversation.
    pub fn parse(fields: Map<String, Value>, settings: &RequestSettings) -> Result<Self, String> {
        let id = row::optional_id(&fields)?.unwrap_or_default();
        let Conversation { messages, tools } =
            Conversation::from_row(&fields).map_err(|error| error.to_string())?;
        let overrides = Overrides::parse(&fields)?;
        if !overrides.is_empty() {
            settings.check_values(&overrides).map_err(|problem| format!("`sampling`: {problem}"))?;
        }
        Ok(Self { id, plan: plan_steps(messages)?, tools, fields, overrides })
    }

    /// Sets the row's unique id, also in its fields.
    pub fn with_unique_id(mut self, ids: &mut UniqueIds, place: usize) -> Self {
        let own = Some(self.id.as_str()).filter(|id| !id.is_empty());
        let id = ids.assign_id(own, place);
        if self.id != id {
            let value = if own.is_none() { json!(place) } else { json!(id) };
            let is_number = value.is_number() && id == value.to_string().as_str();
            self.fields.shift_insert(0, "id".into(), if is_number { value } else { json!(id) });
            self.id = id;
        }
        self
    }

    /// Ids of the output rows for `count` answers to row `id`.
    pub fn sample_ids(id: &str, count: usize) -> Vec<String> {
        if count == 1 { vec![id.into()] } else { (0..count).map(|k| format!("{id}#{k}")).collect() }
    }

    /// Copies the row `count` times, once per answer to generate. Each copy gets an id from [`Self::sample_ids`].
    pub fn into_samples(self, count: usize) -> Vec<Self> {
        if count == 1 {
            return vec![self];
        }
        let sample = |(k, id): (usize, String)| {
            let mut row = self.clone();
            let own = row.fields.insert("id".into(), json!(id));
            row.fields.insert("prompt_id".into(), json!(own));
            row.fields.insert("sample".into(), json!(k));
            row.id = id;
            row
        };
        Self::sample_ids(&self.id, count).into_iter().enumerate().map(sample).collect()
    }

    /// Requests the row's answers in order, each with the conversation so far. Stops after an answer
    /// with tool calls, because tools are not executed.
    pub async fn generate_answers(
        &self,
        backend: &Backend,
        settings: &RequestSettings,
    ) -> Result<AnsweredRow, AskError> {
        let (mut said, mut tokens, mut turn) = (vec![], TokenCounts::default(), 0);
        // Finish reason of the first truncated answer, or of the last answer if no answer was truncated.
        let mut finish = FinishReason::default();
        // A conversation stays at one server if possible, because the prefix cache of that server has the beginning of
        // the conversation.
        let mut home = None;
        let mut states = None;
        for step in &self.plan {
            match step {
                Step::Message(message) => said.push(settings.output_message(message)),
                Step::Generate => {
                    let body = settings.body(&said, &self.request_key(turn));
                    // The last prompt contains the earlier turns.
                    drop(states.take());
                    let mut answer = backend.ask(body, &mut home).await?;
                    states = answer.states.take();
                    tokens += answer.tokens;
                    if turn == 0 || finish.is_whole() {
                        finish = answer.finish;
                    }
                    // The last prompt contains the earlier ones.
                    said.iter_mut().for_each(|message| drop(message.extra.shift_remove(PROMPT_TOKEN_IDS)));
                    let message = answer.into_message(settings.reasoning);
                    if message.is_empty() {
                        let words = match settings.reasoning {
                            Reasoning::Drop => {
                                "nothing is left of the answer but thoughts, which --reasoning drop leaves out"
                            }
                            Reasoning::Keep => "the answer has no text but white space",
                        };
                        return Err(AskError::Row(format!("{words} (finish_reason {:?})", finish.name())));
                    }
                    said.push(message);
                    turn += 1;
                    // Tools are not executed, so the row's next message would not fit a call
                    // without a recorded result.
                    if said.last().is_some_and(|message| !message.tool_calls().is_empty()) {
                        break;
                    }
                }
            }
        }
        // A row is recorded only after its states are on disk.
        if let Some((folder, answer)) = settings.states.clone().zip(states) {
            let id = self.id.clone();
            let stored = tokio::task::spawn_blocking(move || folder.store(&id, &answer)).await;
            stored
                .map_err(|error| AskError::Run(error.into()))?
                .map_err(|error| AskError::Run(error.into()))?;
        }
        let mut fields = self.fields.clone();
        fields.shift_remove("error");
        write_conversation(&mut fields, json!(said));
        fields.insert("status".into(), json!("success"));
        fields.insert(FINISH_REASON.into(), json!(finish.name()));
        Ok(AnsweredRow { fields, tokens })
    }

    /// The body of the row's first request.
    pub fn first_request(&self, settings: &RequestSettings) -> Map<String, Value> {
        let said = self.plan.iter().map_while(|step| match step {
            Step::Message(message) => Some(message.clone()),
            Step::Generate => None,
        });
        settings.body(&said.collect::<Vec<_>>(), &self.request_key(0))
    }

    /// Number of answers that the row needs.
    pub fn answer_count(&self) -> usize {
        self.plan.iter().filter(|step| **step == Step::Generate).count()
    }

    /// A text of everything in the row that an answer depends on. Two rows with equal texts send
    /// equal requests.
    pub fn prompt(&self) -> String {
        let said: Vec<Value> = self
            .plan
            .iter()
            .map(|step| match step {
                Step::Message(message) => openai_messages::messages(std::slice::from_ref(message)),
                Step::Generate => Value::Null,
            })
            .collect();
        let mut overrides = Map::new();
        self.overrides.apply(&mut overrides);
        json!([said, self.tools, overrides, self.overrides.seed]).to_string()
    }

    /// The output row with the answers of an earlier run's row.
    pub fn with_answers(&self, earlier: &Map<String, Value>) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        fields.shift_remove("error");
        write_conversation(&mut fields, earlier.get("conversations").cloned().unwrap_or_default());
        for name in ["status", FINISH_REASON] {
            fields.insert(name.into(), earlier.get(name).cloned().unwrap_or_default());
        }
        fields
    }

    /// The output row of a failure, with the finish reason of an answer that was broken off.
    pub fn into_failed_row(self, problem: &str, finish: Option<FinishReason>) -> Map<String, Value> {
        let mut fields = self.fields;
        fields.shift_remove(FINISH_REASON);
        if let Some(reason) = finish {
            fields.insert(FINISH_REASON.into(), json!(reason.name()));
        }
        fields.insert("status".into(), json!("error"));
        fields.insert("error".into(), json!(problem));
        fields
    }

    fn request_key(&self, turn: usize) -> RequestKey<'_> {
        RequestKey { id: &self.id, turn, overrides: &self.overrides, tools: self.tools.as_ref() }
    }
}

/// Replaces the conversation of a row.
fn write_conversation(fields: &mut Map<String, Value>, conversation: Value) {
    fields.retain(|name, _| !MESSAGE_KEYS.contains(&name.as_str()) || name == MESSAGE_KEYS[0]);
    fields.insert(MESSAGE_KEYS[0].into(), conversation);
}

/// Keeps system, user and tool messages, and plans a request for each assistant turn. Tool calls with recorded results
/// stay, because tools are not executed. A call without a result is generated anew.
fn plan_steps(messages: Vec<Message>) -> Result<Vec<Step>, String> {
    let roles: Vec<Role> = messages.iter().map(|message| message.role).collect();
    let spliced: Vec<bool> = messages
        .iter()
        .enumerate()
        .map(|(index, message)| {
            !message.tool_calls().is_empty()
                && message.role == Role::Assistant
                && roles.get(index + 1) == Some(&Role::Tool)
        })
        .collect();
    // Assistant text directly before a tool call belongs to the same turn.
    let call_follows = |index: usize| {
        let next = (index + 1..roles.len()).find(|&next| spliced[next] || roles[next] != Role::Assistant);
        next.is_some_and(|next| spliced[next])
    };
    let mut plan = Vec::with_capacity(messages.len() + 1);
    for (index, message) in messages.into_iter().enumerate() {
        let ends = match message.role {
            Role::System => false,
            Role::Assistant if spliced[index] => false,
            Role::Assistant => continue,
            Role::User if message.content.trim().is_empty() => {
                return Err(format!("conversations[{index}]: the user message is empty"));
            }
            Role::User => true,
            Role::Tool if spliced[index - 1] || roles[index - 1] == Role::Tool => {
                roles.get(index + 1) != Some(&Role::Tool)
            }
            Role::Tool => {
                return Err(format!(
                    "conversations[{index}]: a tool message must follow an assistant message with `tool_calls`"
                ));
            }
        };
        plan.push(Step::Message(message));
        if ends && !call_follows(index) {
            plan.push(Step::Generate);
        }
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::regenerate::settings::Sampling;
    use clap::Parser;
    use deepspec_capture::cache::Worker;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        sampling: Sampling,
    }

    fn parse(row: Value) -> Result<Row, String> {
        let Value::Object(row) = row else { unreachable!() };
        let sampling = Line::try_parse_from(["x", "--temperature", "1"]).unwrap().sampling;
        Row::parse(row, &RequestSettings::new(&[], "m", None, &sampling, Worker::ALONE).unwrap())
    }

    /// The plan as text, with `?` for each request.
    fn told(conversations: Value) -> Vec<String> {
        let row = parse(json!({"id": 1, "conversations": conversations})).unwrap();
        let step = |step: &Step| match step {
            Step::Message(message) => format!("{}:{}", message.role, message.content),
            Step::Generate => "?".into(),
        };
        row.plan.iter().map(step).collect()
    }

    #[test]
    fn only_prompts_are_kept() {
        let row = json!([
            {"role": "system", "content": "s"}, {"role": "user", "content": "q"},
            {"role": "assistant", "content": ""}, {"role": "user", "content": "r"}]);
        assert_eq!(told(row), ["system:s", "user:q", "?", "user:r", "?"]);
    }

    #[test]
    fn recorded_calls_and_results_are_spliced() {
        let call = json!({"role": "assistant", "content": "c", "tool_calls": [{"name": "f"}]});
        let tool = |text: &str| json!({"role": "tool", "content": text});
        let user = json!({"role": "user", "content": "q"});
        assert_eq!(
            told(
                json!([user, call, tool("1"), tool("2"), call, tool("3"), {"role": "assistant", "content": "a"}])
            ),
            ["user:q", "assistant:c", "tool:1", "tool:2", "assistant:c", "tool:3", "?"]
        );
        let text = json!({"role": "assistant", "content": "let me see"});
        assert_eq!(told(json!([user, text, call, tool("1")])), ["user:q", "assistant:c", "tool:1", "?"]);
        let written = json!({"role": "assistant", "content": "c", "tool_calls": "[{\"name\": \"f\"}]"});
        assert_eq!(told(json!([user, written, tool("1")])), ["user:q", "assistant:c", "tool:1", "?"]);
        // A call without a result is generated anew.
        assert_eq!(told(json!([user, call])), ["user:q", "?"]);
        assert_eq!(told(json!([user, call, tool("1")])), ["user:q", "assistant:c", "tool:1", "?"]);
    }

    #[test]
    fn recorded_calls_may_be_kept_out_of_the_loss() {
        let call =
            Message::try_from(json!({"role": "assistant", "content": "c", "tool_calls": [{"name": "f"}]}));
        let (call, user) = (call.unwrap(), Message::new(Role::User, "q"));
        let written = |flags: &[&str], message: &Message| {
            let sampling = Line::try_parse_from([&["x"], flags].concat()).unwrap().sampling;
            RequestSettings::new(&[], "m", None, &sampling, Worker::ALONE).unwrap().output_message(message)
        };
        assert_eq!(written(&[], &call), call);
        let masked = ["--recorded-calls", "mask"];
        assert_eq!(written(&masked, &user), user);
        assert!(call.is_trained_on() && !written(&masked, &call).is_trained_on());
    }

    #[test]
    fn samples_have_ids_of_their_own() {
        let row = parse(json!({"id": 3, "conversations": [{"role": "user", "content": "q"}]})).unwrap();
        let ids = |samples| -> Vec<Value> {
            row.clone().into_samples(samples).iter().map(|row| row.fields["id"].clone()).collect()
        };
        assert_eq!((ids(1), ids(2)), (vec![json!(3)], vec![json!("3#0"), json!("3#1")]));
        let second = &row.clone().into_samples(2)[1];
        assert_eq!((&second.fields["prompt_id"], &second.fields["sample"]), (&json!(3), &json!(1)));
        assert_eq!(second.prompt(), row.prompt());
    }

    #[test]
    fn unusable_rows_say_why() {
        let says = |row: Value, reason: &str| {
            let error = parse(row).err().unwrap();
            assert!(error.contains(reason), "{error}");
        };
        let user = json!({"role": "user", "content": "x"});
        says(json!({"conversations": []}), "`conversations` must be a non-empty array of messages");
        says(json!({"id": [1], "conversations": [user]}), "`id` must be a string or an integer");
        says(
            json!({"id": 1, "conversations": [{"role": "assistant", "content": "x"}]}),
            "must start with user",
        );
        says(json!({"id": 1, "conversations": [{"role": "user", "content": " "}]}), "is empty");
        says(
            json!({"id": 1, "conversations": [user, {"role": "tool", "content": "x"}]}),
            "[1]: a tool message must follow",
        );
        says(json!({"id": 1, "conversations": [user], "tools": "{}"}), "found an object");
        says(json!({"id": 1, "conversations": [user], "tools": "["}), "a text that is not JSON");
        says(
            json!({"id": 1, "conversations": [user], "sampling": {"temperature": 9}}),
            "`sampling`: `temperature`: 9",
        );
    }
}
