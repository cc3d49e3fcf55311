//! A parsed conversation, and the lines that `split` writes for it.

use deepspec_text::Role;

use super::roles::{MessageShape, Roles};

/// Why a row is unusable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The kind of problem, which the report counts.
    pub kind: ProblemKind,
    /// A phrase that follows the file and line.
    pub text: String,
}

/// Kinds of problems in the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProblemKind {
    /// The line is not a JSON object.
    NotAnObject,
    /// There is no list of messages.
    NoMessages,
    /// A message lacks a speaker or a text, or they are not strings.
    Message,
    /// A user message is empty.
    Empty,
    /// The first non-system message is not the user's.
    Order,
    /// The id is neither a string nor an integer.
    Id,
}

impl ProblemKind {
    /// The name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotAnObject => "not_a_json_object",
            Self::NoMessages => "no_messages",
            Self::Message => "malformed_message",
            Self::Empty => "empty_message",
            Self::Order => "does_not_start_with_user",
            Self::Id => "malformed_id",
        }
    }

    /// A problem of this kind.
    pub fn with_text(self, text: impl Into<String>) -> Problem {
        Problem { kind: self, text: text.into() }
    }
}

/// The id of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Id {
    /// A string.
    Text(String),
    /// A number, in the notation of the row.
    Number(String),
    /// No id in the row; its 0-based index in the dataset is used.
    Index,
}

impl Id {
    /// The id in the row as text, so that `1` and `"1"` are equal.
    pub fn own(&self) -> Option<&str> {
        match self {
            Self::Text(id) | Self::Number(id) => Some(id),
            Self::Index => None,
        }
    }
}

/// One message.
#[derive(Debug, PartialEq)]
pub struct Turn {
    /// The role.
    pub role: Role,
    /// The text; empty only for tool calls and tool results.
    pub text: String,
    /// The message's other fields, as JSON members without the braces.
    pub rest: Vec<u8>,
}

/// A usable row.
#[derive(Debug, PartialEq)]
pub struct Conversation {
    /// The id.
    pub id: Id,
    /// The messages; after system messages, the first is the user's.
    pub turns: Vec<Turn>,
    /// The row's other fields, as JSON members without the braces.
    pub rest: Vec<u8>,
    /// Speakers of dropped messages, one entry per message.
    pub dropped: Vec<String>,
}

/// One message in the dataset's form.
pub struct RawMessage {
    /// ShareGPT or OpenAI.
    pub shape: MessageShape,
    /// The speaker's name in the dataset.
    pub speaker: String,
    /// The text; None if the dataset has null.
    pub text: Option<String>,
    /// The message's other fields, as JSON members without the braces.
    pub rest: Vec<u8>,
}

impl Conversation {
    /// A row without messages. [`Conversation::add_message`] adds messages and
    /// [`Conversation::check`] checks the result.
    pub fn new(id: Id, rest: Vec<u8>) -> Self {
        Self { id, turns: Vec::with_capacity(8), rest, dropped: vec![] }
    }

    /// Adds a message if its speaker has a role. Empty system messages are skipped.
    ///
    /// # Errors
    /// If a user message is empty.
    pub fn add_message(&mut self, said: RawMessage, roles: &Roles) -> Result<(), Problem> {
        let Some(role) = roles.role(said.shape, &said.speaker) else {
            self.dropped.push(said.speaker);
            return Ok(());
        };
        let text = said.text.unwrap_or_default();
        if text.chars().all(char::is_whitespace) {
            match role {
                Role::System => return Ok(()),
                // `regenerate` replaces old answers, and empty answers are not trained on.
                Role::Tool | Role::Assistant => {}
                Role::User => return Err(ProblemKind::Empty.with_text(format!("the {role}'s text is empty"))),
            }
        }
        self.turns.push(Turn { role, text, rest: said.rest });
        Ok(())
    }

    /// Checks that the first non-system message is the user's.
    pub fn check(self) -> Result<Self, Problem> {
        match self.turns.iter().map(|turn| turn.role).find(|&role| role != Role::System) {
            Some(Role::User) => Ok(self),
            None => Err(ProblemKind::Order.with_text("the conversation has no user message")),
            Some(Role::Assistant) => {
                Err(ProblemKind::Order.with_text("the conversation starts with an assistant message"))
            }
            Some(role) => {
                Err(ProblemKind::Order.with_text(format!("the conversation starts with a {role} message")))
            }
        }
    }

    /// The texts of the user messages.
    pub fn user_turns(&self) -> impl Iterator<Item = &str> {
        self.turns.iter().filter(|turn| turn.role == Role::User).map(|turn| &*turn.text)
    }

    /// Writes the first user turn in the form of [`Conversation::write_prompt_key`]. Equal bytes
    /// mark overlap between training rows and held-out rows, which are evaluated without their
    /// system message.
    pub fn write_first_user_turn(&self, out: &mut Vec<u8>) {
        let first = self.turns.iter().find(|turn| turn.role == Role::User);
        write_prompt(first.into_iter(), out);
    }

    /// Writes the system and user texts, each after its role, so that equal prompts give equal
    /// bytes. White space is trimmed and collapsed.
    pub fn write_prompt_key(&self, out: &mut Vec<u8>) {
        write_prompt(self.turns.iter(), out);
    }

    /// Writes the row as a line of training data: `{"id", "conversations": [{"role", "content",
    /// …}], …}`.
    pub fn write_train(&self, name: &OutputId<'_>, out: &mut Vec<u8>) {
        name.write(&self.id, out);
        out.extend_from_slice(b",\"conversations\":[");
        for (index, turn) in self.turns.iter().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            out.extend_from_slice(b"{\"role\":\"");
            out.extend_from_slice(turn.role.as_str().as_bytes());
            out.extend_from_slice(b"\",\"content\":");
            write_json_string(&turn.text, out);
            write_rest(&turn.rest, out);
            out.push(b'}');
        }
        out.push(b']');
        write_rest(&self.rest, out);
        out.extend_from_slice(b"}\n");
    }

    /// Writes the row as a line of held-out prompts: `{"id", "turns": [user text, …]}`.
    pub fn write_eval(&self, name: &OutputId<'_>, out: &mut Vec<u8>) {
        name.write(&self.id, out);
        out.extend_from_slice(b",\"turns\":[");
        for (index, text) in self.user_turns().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            write_json_string(text, out);
        }
        out.extend_from_slice(b"]}\n");
    }
}

fn write_prompt<'a>(turns: impl Iterator<Item = &'a Turn>, out: &mut Vec<u8>) {
    out.clear();
    for turn in turns {
        match turn.role {
            Role::System => out.push(1),
            Role::User => out.push(2),
            Role::Assistant | Role::Tool => continue,
        }
        for word in turn.text.split_whitespace() {
            out.extend_from_slice(word.as_bytes());
            out.push(b' ');
        }
    }
}

/// The parts of a row's output id.
pub struct OutputId<'a> {
    /// The source's name in a mix, which becomes the id's prefix.
    pub source: Option<&'a str>,
    /// The row's 0-based index in its source.
    pub index: usize,
    /// A new id, if an earlier row has the same id.
    pub renamed: Option<&'a str>,
}

impl OutputId<'_> {
    fn write(&self, id: &Id, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"id\":");
        if let Some(name) = self.renamed {
            let name = self.source.map_or_else(|| name.to_owned(), |source| format!("{source}/{name}"));
            return write_json_string(&name, out);
        }
        match (self.source, id) {
            (Some(source), id) => {
                let own = id.own().map_or_else(|| self.index.to_string(), str::to_owned);
                write_json_string(&format!("{source}/{own}"), out);
            }
            (None, Id::Text(text)) => write_json_string(text, out),
            (None, Id::Number(text)) => out.extend_from_slice(text.as_bytes()),
            (None, Id::Index) => out.extend_from_slice(self.index.to_string().as_bytes()),
        }
    }
}

fn write_json_string(text: &str, out: &mut Vec<u8>) {
    // Writing a string to memory cannot fail.
    let _ = serde_json::to_writer(out, text);
}

fn write_rest(rest: &[u8], out: &mut Vec<u8>) {
    if !rest.is_empty() {
        out.push(b',');
        out.extend_from_slice(rest);
    }
}
