//! Input rows: what is asked of each, and what comes out.

use std::collections::HashSet;
use std::path::PathBuf;

use deepspec_core::atomic::FileError;
use deepspec_core::jsonl::{self, Line};
use deepspec_core::row;
use deepspec_text::{Message, Role, check_starts_with_user, conversation};
use serde_json::{Map, Value, json};

use super::asker::{AskError, Asker};
use super::settings::Settings;
use crate::rejects::Reject;

/// A usable input row.
pub struct Row {
    /// Its id as text.
    pub id: String,
    /// The row as it stands in the input.
    pub fields: Map<String, Value>,
    /// What the system and the user say.
    prompts: Vec<Message>,
}

/// A row with new answers.
pub struct Answered {
    /// The row to write.
    pub fields: Map<String, Value>,
    /// Tokens of the answers.
    pub tokens: u64,
}

impl Row {
    fn parse(fields: Map<String, Value>) -> Result<Self, String> {
        let id = row::id_of(&fields)?;
        let mut prompts = conversation(&fields).map_err(|error| error.to_string())?;
        check_starts_with_user(&prompts).map_err(|error| error.to_string())?;
        for (index, message) in prompts.iter().enumerate() {
            match message.role {
                Role::Tool => {
                    return Err(format!("conversations[{index}]: tool messages cannot be regenerated yet"));
                }
                Role::User if message.content.trim().is_empty() => {
                    return Err(format!("conversations[{index}]: the user message is empty"));
                }
                _ => {}
            }
        }
        prompts.retain(|message| message.role != Role::Assistant);
        Ok(Self { id, fields, prompts })
    }

    /// Asks for an answer after each user turn, with the conversation so far.
    pub async fn answered(&self, asker: &Asker, settings: &Settings) -> Result<Answered, AskError> {
        let (mut said, mut tokens, mut turn) = (Vec::with_capacity(2 * self.prompts.len()), 0, 0);
        for prompt in &self.prompts {
            said.push(prompt.clone());
            if prompt.role == Role::User {
                let answer = asker.ask(&settings.body(&said, &self.id, turn)).await?;
                tokens += answer.tokens;
                said.push(answer.message);
                turn += 1;
            }
        }
        let mut fields = self.fields.clone();
        fields.shift_remove("error");
        fields.insert("conversations".into(), json!(said));
        fields.insert("status".into(), json!("success"));
        Ok(Answered { fields, tokens })
    }

    /// The row to write when it could not be answered.
    pub fn failed(self, problem: &str) -> Map<String, Value> {
        let mut fields = self.fields;
        fields.insert("status".into(), json!("error"));
        fields.insert("error".into(), json!(problem));
        fields
    }
}

/// What a first pass over the inputs found.
#[derive(Default)]
pub struct Survey {
    /// Ids of the usable rows.
    pub ids: HashSet<String>,
    /// The other lines.
    pub rejected: Vec<Reject>,
}

/// Reads all inputs once.
///
/// # Errors
/// If a file cannot be read; bad lines are no error.
pub fn survey(inputs: &[PathBuf]) -> Result<Survey, FileError> {
    let mut survey = Survey::default();
    for file in inputs {
        for line in jsonl::Reader::open(file)? {
            let (line, id) = match line? {
                Line::Row(line, fields) => (line, Row::parse(fields).map(|row| row.id)),
                Line::Bad(bad) => (bad.line, Err(bad.problem)),
            };
            let reason = match id {
                Ok(id) if survey.ids.contains(&id) => format!("id `{id}` was used by an earlier row"),
                Ok(id) => {
                    survey.ids.insert(id);
                    continue;
                }
                Err(reason) => reason,
            };
            survey.rejected.push(Reject { file: file.clone(), line, reason });
        }
    }
    Ok(survey)
}

/// The rows with these ids, each once, in the order of the inputs.
pub fn select(inputs: &[PathBuf], mut ids: HashSet<String>) -> impl Iterator<Item = anyhow::Result<Row>> {
    let lines = inputs.iter().flat_map(|file| -> Box<dyn Iterator<Item = Result<Line, FileError>>> {
        match jsonl::Reader::open(file) {
            Ok(reader) => Box::new(reader),
            Err(error) => Box::new(std::iter::once(Err(error))),
        }
    });
    lines.filter_map(move |line| match line {
        Err(error) => Some(Err(error.into())),
        Ok(Line::Bad(_)) => None,
        Ok(Line::Row(_, fields)) => Row::parse(fields).ok().filter(|row| ids.remove(&row.id)).map(Ok),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(row: Value) -> Result<Row, String> {
        let Value::Object(row) = row else { unreachable!() };
        Row::parse(row)
    }

    #[test]
    fn only_prompts_are_kept() {
        let row = parse(json!({"id": 3, "conversations": [
            {"role": "system", "content": "s"}, {"role": "user", "content": "q", "lang": "en"},
            {"role": "assistant", "content": ""}, {"role": "user", "content": "r"}]}));
        let row = row.unwrap();
        assert_eq!(row.id, "3");
        let texts: Vec<&str> = row.prompts.iter().map(|message| message.content.as_str()).collect();
        assert_eq!(texts, ["s", "q", "r"]);
        assert_eq!(row.prompts[1].extra["lang"], "en");
    }

    #[test]
    fn unusable_rows_say_why() {
        let says = |row: Value, reason: &str| {
            let error = parse(row).err().unwrap();
            assert!(error.contains(reason), "{error}");
        };
        says(json!({"conversations": []}), "no `id`");
        says(
            json!({"id": 1, "conversations": [{"role": "assistant", "content": "x"}]}),
            "must start with user",
        );
        says(json!({"id": 1, "conversations": [{"role": "user", "content": " "}]}), "is empty");
        says(
            json!({"id": 1, "conversations": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}),
            "[1]: tool messages",
        );
    }
}
