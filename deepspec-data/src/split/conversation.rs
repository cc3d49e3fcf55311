//! A dataset row on its way out: messages with roles, and the lines that are written of them.

use deepspec_text::Role;

use super::roles::{Roles, Shape};

/// Why a row is unusable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// What kind of problem it is; these are counted.
    pub kind: Kind,
    /// A phrase to follow the file and line.
    pub text: String,
}

/// The kinds of problems, as the report counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The text is no JSON object.
    NotAnObject,
    /// There is no list of messages.
    NoMessages,
    /// A message has no speaker or no text, or they are no strings.
    Message,
    /// Someone says nothing.
    Empty,
    /// The user does not speak first.
    Order,
    /// The id is neither text nor number.
    Id,
}

impl Kind {
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
    pub fn because(self, text: impl Into<String>) -> Problem {
        Problem { kind: self, text: text.into() }
    }
}

/// What a row is called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Id {
    /// A string of its own.
    Text(String),
    /// A number of its own, as it is written.
    Number(String),
    /// None of its own: its 0-based place in the dataset.
    Index,
}

impl Id {
    /// The id that the row brings along, as text: `1` and `"1"` are the same one.
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
    /// Who speaks.
    pub role: Role,
    /// What is said; empty only where an assistant calls tools, or a tool returns nothing.
    pub text: String,
    /// The message's other fields as the inside of a JSON object.
    pub rest: Vec<u8>,
}

/// A usable row.
#[derive(Debug, PartialEq)]
pub struct Conversation {
    /// What it is called.
    pub id: Id,
    /// What is said; after system messages, the user begins.
    pub turns: Vec<Turn>,
    /// The row's other fields as the inside of a JSON object.
    pub rest: Vec<u8>,
    /// Speakers whose messages were dropped, one entry a message.
    pub dropped: Vec<String>,
}

/// One message as the dataset has it.
pub struct Said {
    /// How the dataset writes messages.
    pub shape: Shape,
    /// Who speaks, in the dataset's words.
    pub speaker: String,
    /// What is said; None where the dataset says so.
    pub text: Option<String>,
    /// Its other fields as the inside of a JSON object.
    pub rest: Vec<u8>,
}

impl Conversation {
    /// A row without messages, to be filled by [`Conversation::say`] and checked by [`Conversation::check`].
    pub fn new(id: Id, rest: Vec<u8>) -> Self {
        Self { id, turns: Vec::with_capacity(8), rest, dropped: vec![] }
    }

    /// Adds a message if its speaker has a role. Empty system messages are nothing to keep and nothing to complain of.
    ///
    /// # Errors
    /// If a user or an assistant says nothing.
    pub fn say(&mut self, said: Said, roles: &Roles) -> Result<(), Problem> {
        let Some(role) = roles.role(said.shape, &said.speaker) else {
            self.dropped.push(said.speaker);
            return Ok(());
        };
        let text = said.text.unwrap_or_default();
        if text.chars().all(char::is_whitespace) {
            match role {
                Role::System => return Ok(()),
                // An old answer is replaced by `regenerate`; one of nothing teaches nothing.
                Role::Tool | Role::Assistant => {}
                Role::User => return Err(Kind::Empty.because(format!("the {role}'s text is empty"))),
            }
        }
        self.turns.push(Turn { role, text, rest: said.rest });
        Ok(())
    }

    /// Checks that the user begins.
    pub fn check(self) -> Result<Self, Problem> {
        match self.turns.iter().map(|turn| turn.role).find(|&role| role != Role::System) {
            Some(Role::User) => Ok(self),
            None => Err(Kind::Order.because("the conversation has no user message")),
            Some(Role::Assistant) => {
                Err(Kind::Order.because("the conversation starts with an assistant message"))
            }
            Some(role) => Err(Kind::Order.because(format!("the conversation starts with a {role} message"))),
        }
    }

    /// What the user says.
    pub fn user_turns(&self) -> impl Iterator<Item = &str> {
        self.turns.iter().filter(|turn| turn.role == Role::User).map(|turn| &*turn.text)
    }

    /// What the user says first, in the form of [`Conversation::prompt`]: whatever follows, this is trained on, and a
    /// held-out row is measured on it without its system message.
    pub fn asked(&self, out: &mut Vec<u8>) {
        let first = self.turns.iter().find(|turn| turn.role == Role::User);
        write_prompt(first.into_iter(), out);
    }

    /// What is asked, in a form in which the same prompts are the same bytes: the texts of the system and the user, blanks
    /// at their ends cut off and blanks within made one, each behind its role.
    pub fn prompt(&self, out: &mut Vec<u8>) {
        write_prompt(self.turns.iter(), out);
    }

    /// Writes the row as a line of training data: `{"id", "conversations": [{"role", "content", …}], …}`.
    pub fn write_train(&self, name: &Name<'_>, out: &mut Vec<u8>) {
        name.write(&self.id, out);
        out.extend_from_slice(b",\"conversations\":[");
        for (index, turn) in self.turns.iter().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            out.extend_from_slice(b"{\"role\":\"");
            out.extend_from_slice(turn.role.as_str().as_bytes());
            out.extend_from_slice(b"\",\"content\":");
            write_text(&turn.text, out);
            write_rest(&turn.rest, out);
            out.push(b'}');
        }
        out.push(b']');
        write_rest(&self.rest, out);
        out.extend_from_slice(b"}\n");
    }

    /// Writes the row as a line of held-out prompts: `{"id", "turns": [what the user says]}`.
    pub fn write_eval(&self, name: &Name<'_>, out: &mut Vec<u8>) {
        name.write(&self.id, out);
        out.extend_from_slice(b",\"turns\":[");
        for (index, text) in self.user_turns().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            write_text(text, out);
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

/// What tells a row's id apart from those of others.
pub struct Name<'a> {
    /// The source in a mix; its rows' ids begin with it.
    pub source: Option<&'a str>,
    /// The row's 0-based place in its source.
    pub index: usize,
    /// What it is called instead, where an earlier row has its id.
    pub renamed: Option<&'a str>,
}

impl Name<'_> {
    fn write(&self, id: &Id, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"id\":");
        if let Some(name) = self.renamed {
            let name = self.source.map_or_else(|| name.to_owned(), |source| format!("{source}/{name}"));
            return write_text(&name, out);
        }
        match (self.source, id) {
            (Some(source), id) => {
                let own = id.own().map_or_else(|| self.index.to_string(), str::to_owned);
                write_text(&format!("{source}/{own}"), out);
            }
            (None, Id::Text(text)) => write_text(text, out),
            (None, Id::Number(text)) => out.extend_from_slice(text.as_bytes()),
            (None, Id::Index) => out.extend_from_slice(self.index.to_string().as_bytes()),
        }
    }
}

fn write_text(text: &str, out: &mut Vec<u8>) {
    // Writing a string to memory cannot fail.
    let _ = serde_json::to_writer(out, text);
}

fn write_rest(rest: &[u8], out: &mut Vec<u8>) {
    if !rest.is_empty() {
        out.push(b',');
        out.extend_from_slice(rest);
    }
}
