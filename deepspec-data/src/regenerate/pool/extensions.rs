//! Request fields beyond the OpenAI API, and servers that reject them.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use serde_json::{Map, Value, json};

use super::super::overrides::TEMPLATE_KWARGS;
use super::super::settings::TOKEN_ID_FIELDS;
use super::failure::{Failure, FailureClass};

/// Optional fields. If they are omitted, a server answers the same prompt, but with other samples
/// or without token ids.
pub const OPTIONAL_FIELDS: [&str; 8] = [
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    TOKEN_ID_FIELDS[0],
    TOKEN_ID_FIELDS[1],
    TOKEN_ID_FIELDS[2],
    TEMPLATE_KWARGS,
];

/// Interpretation of a refusal that may be about optional fields.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The server rejects these fields; later requests omit them.
    Of(FieldSet),
    /// The server rejects the thinking switch. Omitting it would silently change the data.
    OfThinking,
    /// The refusal names no field. The server may reject these fields, because it has never
    /// accepted them.
    Perhaps(FieldSet),
    /// The refusal has another cause than these fields.
    Other,
}

/// A set of [`OPTIONAL_FIELDS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FieldSet(u8);

impl FieldSet {
    /// The optional fields of a request.
    pub fn of(body: &Map<String, Value>) -> Self {
        // The thinking switch is optional only at its default, off.
        let off = json!({"enable_thinking": false});
        Self::select(|name| body.get(name).is_some_and(|value| name != TEMPLATE_KWARGS || *value == off))
    }

    fn select(mut wanted: impl FnMut(&str) -> bool) -> Self {
        let bit = |(place, name): (usize, &&str)| u8::from(wanted(name)) << place;
        Self(OPTIONAL_FIELDS.iter().enumerate().map(bit).sum())
    }

    /// Whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The set without [`TOKEN_ID_FIELDS`].
    fn without_token_id_fields(self) -> Self {
        self.without(Self::select(|name| TOKEN_ID_FIELDS.contains(&name)))
    }

    /// After a refusal without a field name, the subsets to omit, in order. The token id fields
    /// come first, because they do not change the answer.
    pub fn subsets_to_omit(self) -> impl Iterator<Item = Self> {
        let ids = self.without(self.without_token_id_fields());
        [ids, self].into_iter().filter(|fields| !fields.is_empty()).take(if ids == self { 1 } else { 2 })
    }

    /// The fields that are not in `others`.
    pub fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// The names of the fields.
    pub fn names(self) -> Vec<&'static str> {
        (0..OPTIONAL_FIELDS.len())
            .filter(|place| self.0 & (1 << place) != 0)
            .map(|place| OPTIONAL_FIELDS[place])
            .collect()
    }
}

/// Optional fields that a server accepted or rejected.
#[derive(Debug, Default)]
pub struct Extensions {
    dropped: AtomicU8,
    accepted: AtomicU8,
    accepted_thinking: AtomicBool,
}

impl Extensions {
    /// The optional fields of a request, except fields that this server rejects.
    pub fn fields_to_send(&self, body: &Map<String, Value>) -> FieldSet {
        FieldSet::of(body).without(self.dropped())
    }

    /// The fields that requests to this server omit.
    pub fn dropped(&self) -> FieldSet {
        FieldSet(self.dropped.load(Ordering::Relaxed))
    }

    /// The request body with only the optional fields `sent`.
    pub fn body_with_fields(body: &Map<String, Value>, sent: FieldSet) -> Vec<u8> {
        let unwanted = FieldSet::of(body).without(sent);
        if unwanted.is_empty() {
            return to_bytes(body);
        }
        let mut trimmed = body.clone();
        for name in unwanted.names() {
            trimmed.shift_remove(name);
        }
        to_bytes(&trimmed)
    }

    /// Records that the server answered a request with these fields.
    pub fn accept(&self, body: &Map<String, Value>, sent: FieldSet) {
        self.accepted.fetch_or(sent.0, Ordering::Relaxed);
        if body.contains_key(TEMPLATE_KWARGS) {
            self.accepted_thinking.store(true, Ordering::Relaxed);
        }
    }

    /// Omits these fields from now on. Returns false if all of them were omitted already.
    pub fn drop(&self, fields: FieldSet) -> bool {
        let before = self.dropped.fetch_or(fields.0, Ordering::Relaxed);
        before | fields.0 != before
    }

    /// Interprets the refusal of a request with the fields `sent`. `sets_thinking` says that the
    /// user, not the default, set the thinking switch.
    pub fn interpret_refusal(
        &self,
        failure: &Failure,
        body: &Map<String, Value>,
        sent: FieldSet,
        sets_thinking: bool,
    ) -> Refusal {
        if failure.class != FailureClass::Refused {
            return Refusal::Other;
        }
        // A field that was accepted before is not the cause, even if the refusal quotes the whole
        // request.
        let mut unproven = sent.without(FieldSet(self.accepted.load(Ordering::Relaxed)));
        let switch = FieldSet::select(|name| name == TEMPLATE_KWARGS);
        let names_switch = failure.names_field(TEMPLATE_KWARGS) || failure.names_field("enable_thinking");
        if !sets_thinking && names_switch && !unproven.without(switch).eq(&unproven) {
            return Refusal::Of(switch);
        }
        if sets_thinking {
            unproven = unproven.without(switch);
        }
        let switched = body.contains_key(TEMPLATE_KWARGS) && !self.accepted_thinking.load(Ordering::Relaxed);
        if switched && names_switch {
            return Refusal::OfThinking;
        }
        let named = FieldSet::select(|name| failure.names_field(name));
        let named = unproven.without(unproven.without(named));
        if !named.is_empty() {
            return Refusal::Of(named);
        }
        if unproven.is_empty() { Refusal::Other } else { Refusal::Perhaps(unproven) }
    }
}

fn to_bytes(body: &Map<String, Value>) -> Vec<u8> {
    // A map of JSON values always serialises.
    serde_json::to_vec(body).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use reqwest::StatusCode;
    use reqwest::header::HeaderMap;
    use serde_json::json;

    fn body() -> Map<String, Value> {
        let Value::Object(body) =
            json!({"top_k": 3, "seed": 1, "temperature": 0, "chat_template_kwargs": {}})
        else {
            unreachable!()
        };
        body
    }

    fn refused(said: &str) -> Failure {
        Failure::status(StatusCode::UNPROCESSABLE_ENTITY, &HeaderMap::new(), said.into())
    }

    #[test]
    fn a_named_field_is_dropped_once() {
        let (server, body) = (Extensions::default(), body());
        let sent = server.fields_to_send(&body);
        assert_eq!(sent.names(), ["top_k", "seed"]);
        let Refusal::Of(fields) =
            server.interpret_refusal(&refused("unknown field `top_k`"), &body, sent, true)
        else {
            panic!()
        };
        assert_eq!(fields.names(), ["top_k"]);
        assert_eq!((server.drop(fields), server.drop(fields)), (true, false));
        let bytes = Extensions::body_with_fields(&body, server.fields_to_send(&body));
        let trimmed: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(trimmed, json!({"seed": 1, "temperature": 0, "chat_template_kwargs": {}}));
        // A field that was not sent cannot be the cause.
        let again = server.interpret_refusal(&refused("top_k"), &body, server.fields_to_send(&body), true);
        assert!(matches!(again, Refusal::Perhaps(_)));
    }

    #[test]
    fn fields_that_change_no_answer_are_suspected_first() {
        let mut body = body();
        body.extend(TOKEN_ID_FIELDS.map(|name| (name.to_string(), json!(true))));
        let names = |fields: FieldSet| fields.subsets_to_omit().map(FieldSet::names).collect::<Vec<_>>();
        let all = FieldSet::of(&body);
        assert_eq!(names(all), [TOKEN_ID_FIELDS.to_vec(), all.names()]);
        assert_eq!(names(all.without_token_id_fields()), [["top_k", "seed"]]);
        assert_eq!(names(all.without(all.without_token_id_fields())), [TOKEN_ID_FIELDS]);
    }

    #[test]
    fn a_refused_switch_is_never_dropped() {
        let (server, body) = (Extensions::default(), body());
        let both = refused("Unexpected: {'chat_template_kwargs', 'top_k'}");
        assert_eq!(
            server.interpret_refusal(&both, &body, server.fields_to_send(&body), true),
            Refusal::OfThinking
        );
    }

    #[test]
    fn a_switch_that_nobody_asked_for_is_left_out_where_it_is_refused() {
        let (server, mut body) = (Extensions::default(), body());
        body.insert(TEMPLATE_KWARGS.into(), json!({"enable_thinking": false}));
        let refused = refused("Unexpected: chat_template_kwargs");
        let Refusal::Of(fields) =
            server.interpret_refusal(&refused, &body, server.fields_to_send(&body), false)
        else {
            panic!()
        };
        assert_eq!(fields.names(), [TEMPLATE_KWARGS]);
        server.drop(fields);
        assert!(!server.fields_to_send(&body).names().contains(&TEMPLATE_KWARGS));
        // The thinking switch stays if a row turns it on.
        body.insert(TEMPLATE_KWARGS.into(), json!({"enable_thinking": true}));
        let trimmed = Extensions::body_with_fields(&body, server.fields_to_send(&body));
        assert!(String::from_utf8(trimmed).unwrap().contains("enable_thinking"));
        assert_eq!(
            server.interpret_refusal(&refused, &body, server.fields_to_send(&body), false),
            Refusal::OfThinking
        );
    }

    #[test]
    fn fields_that_were_accepted_are_not_suspected() {
        let (server, body) = (Extensions::default(), body());
        let sent = server.fields_to_send(&body);
        assert!(matches!(
            server.interpret_refusal(&refused("bad request"), &body, sent, true),
            Refusal::Perhaps(_)
        ));
        server.accept(&body, sent);
        assert_eq!(server.interpret_refusal(&refused("bad request"), &body, sent, true), Refusal::Other);
        let echo = refused(
            r#"{"detail": [{"msg": "bad tools", "input": {"top_k": 3, "chat_template_kwargs": {}}}]}"#,
        );
        assert_eq!(server.interpret_refusal(&echo, &body, sent, true), Refusal::Other);
        assert!(matches!(
            Extensions::default().interpret_refusal(&echo, &body, sent, true),
            Refusal::Perhaps(_)
        ));
        let passing = Failure { class: FailureClass::ServerError, ..refused("top_k") };
        assert_eq!(server.interpret_refusal(&passing, &body, sent, true), Refusal::Other);
    }
}
