//! Maps speaker names of datasets to roles.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use deepspec_text::Role;

/// The two forms of a message in datasets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageShape {
    /// `{"from", "value"}`.
    ShareGpt,
    /// `{"role", "content"}`.
    OpenAi,
}

impl MessageShape {
    /// The keys of the speaker and of the text.
    pub fn keys(self) -> (&'static str, &'static str) {
        match self {
            Self::ShareGpt => ("from", "value"),
            Self::OpenAi => ("role", "content"),
        }
    }
}

/// A role's name in arguments and mixes, or `drop`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RoleTarget {
    /// Instructions.
    System,
    /// Prompts.
    User,
    /// Answers.
    Assistant,
    /// Tool results.
    Tool,
    /// Drops the message and counts it.
    Drop,
}

impl RoleTarget {
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

/// Parses `SPEAKER=ROLE` from the command line.
pub fn parse_speaker_role(text: &str) -> Result<(String, RoleTarget), String> {
    let (speaker, role) = text.split_once('=').ok_or("expected SPEAKER=ROLE")?;
    if speaker.is_empty() {
        return Err("the speaker is empty; expected SPEAKER=ROLE".into());
    }
    let target = serde_json::from_value(role.into())
        .map_err(|_| format!("unknown role `{role}` (known: system, user, assistant, tool, drop)"))?;
    Ok((speaker.into(), target))
}

/// The role of each speaker.
#[derive(Debug, Default)]
pub struct Roles {
    given: BTreeMap<String, GivenRole>,
    drop_system: bool,
}

/// A given role of a speaker, and whether the speaker occurred.
#[derive(Debug)]
struct GivenRole {
    target: RoleTarget,
    met: AtomicBool,
}

impl Roles {
    /// The default roles, with `given` taking priority; `drop_system` drops all system messages.
    pub fn new(given: impl IntoIterator<Item = (String, RoleTarget)>, drop_system: bool) -> Self {
        let given =
            given.into_iter().map(|(name, target)| (name, GivenRole { target, met: AtomicBool::new(false) }));
        Self { given: given.collect(), drop_system }
    }

    /// Speakers with a given role that never occurred.
    pub fn unused_speakers(&self) -> impl Iterator<Item = &str> {
        self.given
            .iter()
            .filter(|(_, given)| !given.met.load(Ordering::Relaxed))
            .map(|(name, _)| name.as_str())
    }

    /// The role of a speaker's message; None if the message is dropped.
    pub fn role(&self, shape: MessageShape, speaker: &str) -> Option<Role> {
        let role = match self.given.get(speaker) {
            Some(given) => {
                given.met.store(true, Ordering::Relaxed);
                given.target.role()
            }
            // OpenAI's tool results name their call. ShareGPT's tool results do not, so they need
            // an explicit role.
            None => Role::from_speaker(speaker)
                .filter(|&role| role != Role::Tool || shape == MessageShape::OpenAi),
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
        assert_eq!(usual.role(MessageShape::ShareGpt, "human"), Some(Role::User));
        assert_eq!(usual.role(MessageShape::ShareGpt, "tool"), None);
        assert_eq!(usual.role(MessageShape::OpenAi, "tool"), Some(Role::Tool));
        assert_eq!(usual.role(MessageShape::OpenAi, "system"), Some(Role::System));
        let given = ["observation=tool", "bard=drop", "a=b=user"].map(parse_speaker_role);
        assert_eq!(
            given[2].as_ref().unwrap_err(),
            "unknown role `b=user` (known: system, user, assistant, tool, drop)"
        );
        let given = given.into_iter().flatten();
        let roles = Roles::new(given, true);
        assert_eq!(roles.role(MessageShape::ShareGpt, "observation"), Some(Role::Tool));
        assert_eq!(roles.role(MessageShape::ShareGpt, "bard"), None);
        assert_eq!(roles.role(MessageShape::ShareGpt, "bing"), Some(Role::Assistant));
        assert_eq!(roles.role(MessageShape::OpenAi, "system"), None);
        assert!(parse_speaker_role("=user").is_err() && parse_speaker_role("user").is_err());
    }
}
