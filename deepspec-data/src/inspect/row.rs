//! Checks one row and its loss mask.

use deepspec_capture::unknown_token;
use deepspec_core::jsonl::Line;
use deepspec_core::row::{self, UniqueIds};
use deepspec_text::{
    Conversation, MIN_SUPERVISED_TOKENS, Role, RowFindings, Supervised, check_loss_mask, supervise,
};
use serde_json::{Map, Value};

use super::settings::MaskSettings;

/// The result of checking a line.
pub enum RowOutcome {
    /// A row whose conversation can be rendered.
    Row(Box<MaskedRow>),
    /// A row that `regenerate` could not answer.
    Failed,
    /// A line without a usable row: the row's id, if it has one, and the reason.
    Unusable(Option<String>, String),
}

/// A row whose conversation was rendered.
pub struct MaskedRow {
    /// The id in the row, or the unique id that [`MaskedRow::assign_unique_id`] assigned.
    pub id: Option<String>,
    /// The conversation.
    pub conversation: Conversation,
    /// Text, tokens and mask.
    pub supervised: Supervised,
    /// Problems and counts.
    pub checked: RowFindings,
    /// Whether the alternative mask rules give the same mask; None without such rules.
    pub agrees: Option<bool>,
}

impl MaskedRow {
    /// Makes the id of the row with index `place` unique.
    pub fn assign_unique_id(&mut self, ids: &mut UniqueIds, place: usize) -> String {
        let id = ids.assign_id(self.id.as_deref(), place);
        self.id = Some(id.clone());
        id
    }

    /// Whether the row was truncated.
    pub fn is_truncated(&self) -> bool {
        self.supervised.untruncated_len > self.supervised.input_ids.len()
    }

    /// Whether `cache build` would skip the row.
    pub fn is_too_short(&self) -> bool {
        self.supervised.supervised_count() < MIN_SUPERVISED_TOKENS
    }

    /// Whether the row has no system message.
    pub fn lacks_system(&self) -> bool {
        self.conversation.messages.first().is_none_or(|message| message.role != Role::System)
    }
}

/// Parses a line, computes its loss mask and collects the problems of both.
pub fn inspect_line(settings: &MaskSettings, line: Line) -> RowOutcome {
    let fields = match line {
        Line::Row(_, fields) => fields,
        Line::Bad(bad) => return RowOutcome::Unusable(None, bad.problem),
    };
    if fields.get("status").is_some_and(|status| status == "error") {
        return RowOutcome::Failed;
    }
    let id = match row::optional_id(&fields) {
        Ok(id) => id,
        Err(problem) => return RowOutcome::Unusable(None, problem),
    };
    match check_row(settings, id.clone(), &fields) {
        Ok(examined) => RowOutcome::Row(Box::new(examined)),
        Err(problem) => RowOutcome::Unusable(id, problem),
    }
}

fn check_row(
    settings: &MaskSettings,
    id: Option<String>,
    fields: &Map<String, Value>,
) -> Result<MaskedRow, String> {
    let one_line = |error: &dyn std::error::Error| error.to_string().replace('\n', " ");
    let MaskSettings { tokenizer, template, other, max_length, vocab_size, .. } = settings;
    let conversation = Conversation::from_row(fields).map_err(|error| one_line(&error))?;
    let supervised =
        supervise(tokenizer, template, &conversation, *max_length).map_err(|error| one_line(&error))?;
    let unknown =
        vocab_size.and_then(|vocab_size| unknown_token(tokenizer, &supervised.input_ids, vocab_size));
    if let Some(problem) = unknown {
        return Err(problem);
    }
    let checked =
        check_loss_mask(tokenizer, template, &conversation, &supervised).map_err(|error| one_line(&error))?;
    let same = |other| {
        let seen = supervise(tokenizer, other, &conversation, *max_length);
        seen.is_ok_and(|seen| seen.loss_mask == supervised.loss_mask)
    };
    let agrees = other.as_ref().map(same);
    Ok(MaskedRow { id, agrees, conversation, supervised, checked })
}
