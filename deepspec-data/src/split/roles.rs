//! Who speaks: the names that datasets use, and the roles that they become.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use deepspec_text::Role;

/// The two ways in which datasets write a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// `{"from", "value"}`.
    ShareGpt,
    /// `{"role", "content"}`.
    OpenAi,
}

impl Shape {
    /// The keys of the speaker and of the text.
    pub fn keys(self) -> (&'static str, &'static str) {
        match self {
            Self::ShareGpt => ("from", "value"),
            Self::OpenAi => ("role", "content"),
        }
    }
}

/// A role, or `drop`, as it is given by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    /// Instructions.
    System,
    /// Prompts.
    User,
    /// Answers.
    Assistant,
    /// Results of tools.
    Tool,
    /// The message is left out, and counted.
    Drop,
}

impl Target {
    fn role(self) -> Option<Role> {
        match self {
            Self::System => Some(Role::System),
            Self::User => Some(Role::User),
            Self::Assistant => Some(Role::Assistant),
            Self::Tool => Some(Role::Tool),
            Self::Drop => None,
        }
    }
}

/// Reads `SPEAKER=ROLE` as given on the command line.
pub fn parse(text: &str) -> Result<(String, Target), String> {
    let (speaker, role) = text.split_once('=').ok_or("expected SPEAKER=ROLE")?;
    if speaker.is_empty() {
        return Err("the speaker is empty; expected SPEAKER=ROLE".into());
    }
    let target = serde_json::from_value(role.into())
        .map_err(|_| format!("unknown role `{role}` (known: system, user, assistant, tool, drop)"))?;
    Ok((speaker.into(), target))
}

/// What each speaker's messages become.
#[derive(Debug, Default)]
pub struct Roles {
    given: BTreeMap<String, Given>,
    drop_system: bool,
}

/// What the user said of a speaker, and whether such a speaker was met.
#[derive(Debug)]
struct Given {
    target: Target,
    met: AtomicBool,
}

impl Roles {
    /// The usual map, with `given` before it; `drop_system` leaves out all messages that would be the system's.
    pub fn new(given: impl IntoIterator<Item = (String, Target)>, drop_system: bool) -> Self {
        let given =
            given.into_iter().map(|(name, target)| (name, Given { target, met: AtomicBool::new(false) }));
        Self { given: given.collect(), drop_system }
    }

    /// Speakers that were given a role and never met.
    pub fn unmet(&self) -> impl Iterator<Item = &str> {
        self.given
            .iter()
            .filter(|(_, given)| !given.met.load(Ordering::Relaxed))
            .map(|(name, _)| name.as_str())
    }

    /// What a speaker's message becomes; None if it is dropped.
    pub fn role(&self, shape: Shape, speaker: &str) -> Option<Role> {
        let role = match self.given.get(speaker) {
            Some(given) => {
                given.met.store(true, Ordering::Relaxed);
                given.target.role()
            }
            // OpenAI's tool results say which call they answer; ShareGPT's only make sense with a map for the calls.
            None => Role::of_speaker(speaker).filter(|&role| role != Role::Tool || shape == Shape::OpenAi),
        };
        role.filter(|&role| !(self.drop_system && role == Role::System))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_given_map_comes_before_the_usual_one() {
        let usual = Roles::default();
        assert_eq!(usual.role(Shape::ShareGpt, "human"), Some(Role::User));
        assert_eq!(usual.role(Shape::ShareGpt, "tool"), None);
        assert_eq!(usual.role(Shape::OpenAi, "tool"), Some(Role::Tool));
        assert_eq!(usual.role(Shape::OpenAi, "system"), Some(Role::System));
        let given = ["observation=tool", "bard=drop", "a=b=user"].map(parse);
        assert_eq!(
            given[2].as_ref().unwrap_err(),
            "unknown role `b=user` (known: system, user, assistant, tool, drop)"
        );
        let given = given.into_iter().flatten();
        let roles = Roles::new(given, true);
        assert_eq!(roles.role(Shape::ShareGpt, "observation"), Some(Role::Tool));
        assert_eq!(roles.role(Shape::ShareGpt, "bard"), None);
        assert_eq!(roles.role(Shape::ShareGpt, "bing"), Some(Role::Assistant));
        assert_eq!(roles.role(Shape::OpenAi, "system"), None);
        assert!(parse("=user").is_err() && parse("user").is_err());
    }
}
