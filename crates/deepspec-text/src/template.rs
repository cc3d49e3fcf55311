//! Renders the tokenizer's chat template with the results of transformers.

use std::borrow::Cow;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use chrono::{DateTime, Utc};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Serde, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::Map;

use crate::error::TextError;
use crate::generation;
use crate::json::tojson;
use crate::message::{Message, REASONING_FIELDS, Role};
use crate::rendering::{self, MAX_WIDTH, too_wide_error};

/// Inputs of a rendering besides the messages.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// Whether to end with the header of the next answer.
    pub add_generation_prompt: bool,
    /// The `chat_template_kwargs` of a request, such as `enable_thinking`.
    pub kwargs: Map<String, serde_json::Value>,
    /// The tools, in the form that the template expects.
    pub tools: Option<serde_json::Value>,
}

/// Name of the default template. A request with tools uses the template `tool_use` instead, if the
/// tokenizer has it.
pub(crate) const DEFAULT_TEMPLATE: &str = "default";
const TOOL_USE_TEMPLATE: &str = "tool_use";
/// Maximum number of instructions of a rendering. A conversation of ten thousand messages takes
/// about a million.
const MAX_INSTRUCTIONS: u64 = 4_000_000;

/// Maximum count of numbers from all `range` calls of a rendering. [`MAX_INSTRUCTIONS`] does not
/// count the work of filters over them.
const MAX_RANGE_NUMBERS: u64 = 1_000_000;

/// Jinja's `range`, limited to `most` numbers in all calls together.
fn limited_range(
    most: u64,
) -> impl Fn(i64, Option<i64>, Option<i64>) -> Result<Vec<i64>, Error> + Send + Sync + 'static {
    let given = AtomicU64::new(0);
    move |first, end, step| {
        let (start, end, step) = (end.map_or(0, |_| first), end.unwrap_or(first), step.unwrap_or(1));
        if step == 0 {
            return Err(Error::new(ErrorKind::InvalidOperation, "range with a step of 0"));
        }
        let span = if step > 0 { end.saturating_sub(start) } else { start.saturating_sub(end) };
        let count = span.max(0).unsigned_abs().div_ceil(step.unsigned_abs());
        if given.fetch_add(count, Ordering::Relaxed).saturating_add(count) > most {
            return Err(ErrorKind::OutOfFuel.into());
        }
        Ok((0..count as i64).map(|place| start + place * step).collect())
    }
}

/// Names under which the original filters of the template engine stay available.
const UNBOUNDED_INDENT: &str = "unbounded_indent";
const UNBOUNDED_FORMAT: &str = "unbounded_format";

/// Wraps the template engine's filter `own` so that widths above [`MAX_WIDTH`] are errors. A width
/// may be a number, `width=`, or part of a format.
fn limit_filter_width(
    own: &'static str,
) -> impl Fn(&mut State, Rest<ValueOrKwargs>) -> Result<Value, Error> + Send + Sync + 'static {
    move |state, arguments| {
        let arguments = arguments.into_values();
        let widths = arguments.iter().skip(1).filter_map(|value| match Kwargs::try_from(value.clone()) {
            Ok(named) => named.get::<Option<i64>>("width").ok().flatten(),
            Err(_) => value.as_i64().filter(|_| own == UNBOUNDED_INDENT),
        });
        let text =
            arguments.first().and_then(Value::as_str).filter(|_| own == UNBOUNDED_FORMAT).unwrap_or_default();
        let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
        let numbers = numbers.map(|digits| digits.parse().unwrap_or(i64::MAX));
        match widths.chain(numbers).find(|&width| width > MAX_WIDTH) {
            Some(width) => Err(too_wide_error(width)),
            None => state.apply_filter(own, &arguments),
        }
    }
}

/// The compiled templates of one tokenizer.
pub(crate) struct JinjaTemplates {
    environment: Arc<Environment<'static>>,
    origin: PathBuf,
    has_generation_tags: bool,
    /// Names of the templates that read reasoning from `message.thinking` alone, as that of gpt-oss.
    thinking_readers: Vec<String>,
}

/// The expression by which templates read reasoning that others call `reasoning_content`.
const THINKING: &str = "message.thinking";

/// Whether a template reads reasoning from [`THINKING`], and not from `reasoning_content`.
fn reads_thinking(template: &str) -> bool {
    template.contains(THINKING) && !template.contains(REASONING_FIELDS[0])
}

/// Whether an assistant's message has text and reasoning beside tool calls.
fn has_both_beside_calls(message: &Message) -> bool {
    !message.content.is_empty() && message.reasoning_content.is_some() && !message.tool_calls().is_empty()
}

impl JinjaTemplates {
    /// Compiles `(name, template)` pairs from the file `origin`; one must be called `default`.
    pub fn compile(templates: Vec<(String, String)>, origin: &Path) -> Result<Self, TextError> {
        let syntax = |source| TextError::Syntax { path: origin.to_path_buf(), source };
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(syntax)?,
        );
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_filter(UNBOUNDED_INDENT, filters::indent);
        environment.add_filter("indent", limit_filter_width(UNBOUNDED_INDENT));
        environment.add_filter(UNBOUNDED_FORMAT, filters::format);
        environment.add_filter("format", limit_filter_width(UNBOUNDED_FORMAT));
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "raise_exception")
                .with_source(RaisedException(message)))
        });
        environment.add_filter(generation::FILTER_NAME, |text: String, marks: Value| {
            generation::insert_marks(&text, &marks)
        });
        let mut has_generation_tags = false;
        let thinking_readers = templates.iter().filter(|(_, template)| reads_thinking(template));
        let thinking_readers = thinking_readers.map(|(name, _)| name.clone()).collect();
        for (name, template) in templates {
            let (template, found) = generation::replace_generation_tags(&template);
            has_generation_tags |= found && name == DEFAULT_TEMPLATE;
            environment.add_template_owned(name, template).map_err(syntax)?;
        }
        let (environment, origin) = (Arc::new(environment), origin.to_path_buf());
        Ok(Self { environment, origin, has_generation_tags, thinking_readers })
    }

    /// Whether the default template has `{% generation %}` tags.
    pub fn has_generation_tags(&self) -> bool {
        self.has_generation_tags
    }

    /// Fails unless [`JinjaTemplates::has_generation_tags`].
    pub fn require_generation_tags(&self) -> Result<(), TextError> {
        match self.has_generation_tags {
            true => Ok(()),
            false => Err(TextError::NoGenerationTags { path: self.origin.clone() }),
        }
    }

    /// Renders `messages`. `tokens` are the special tokens by their names in the config
    /// (`bos_token`, …); `now` is the time for `strftime_now`.
    pub fn render(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        tokens: &[(&'static str, String)],
        now: DateTime<Utc>,
    ) -> Result<String, TextError> {
        self.render_with_marks(messages, options, tokens, now, None)
    }

    /// Renders `messages` and returns the text with the byte ranges between generation tags. A
    /// second rendering with markers finds the ranges. Without the markers, its text must equal
    /// that of the first rendering.
    pub fn render_generations(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        tokens: &[(&'static str, String)],
        now: DateTime<Utc>,
    ) -> Result<(String, Vec<(usize, usize)>), TextError> {
        self.require_generation_tags()?;
        let plain = self.render_with_marks(messages, options, tokens, now, None)?;
        let moved = || TextError::GenerationMoved { path: self.origin.clone() };
        let marks = generation::pick_unused_marks(&plain).ok_or_else(moved)?;
        let marked = self.render_with_marks(messages, options, tokens, now, Some(marks))?;
        let (text, places) = generation::remove_marks(&marked, marks).ok_or_else(moved)?;
        if text == plain { Ok((plain, places)) } else { Err(moved()) }
    }

    /// [`JinjaTemplates::render`] with marks around generation ranges. The template of gpt-oss refuses
    /// messages with text and reasoning beside tool calls. If their reasoning is the cause of a
    /// refusal, the error names the first of them.
    fn render_with_marks(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        tokens: &[(&'static str, String)],
        now: DateTime<Utc>,
        marks: Option<[char; 2]>,
    ) -> Result<String, TextError> {
        let rendered = self.render_once(messages, options, tokens, now, marks);
        let Err(TextError::Refused { path, message }) = rendered else { return rendered };
        let mut assistants = messages.iter().filter(|message| message.role == Role::Assistant);
        let Some(place) = assistants.position(has_both_beside_calls) else {
            return Err(TextError::Refused { path, message });
        };
        let mut without_reasoning = messages.to_vec();
        for message in without_reasoning.iter_mut().filter(|message| has_both_beside_calls(message)) {
            message.reasoning_content = None;
        }
        let hint = match self.render_once(&without_reasoning, options, tokens, now, marks) {
            Ok(_) => format!(
                " (assistant message {} has `content` and reasoning beside `tool_calls`; remove one of the two)",
                place + 1
            ),
            Err(_) => String::new(),
        };
        Err(TextError::Refused { path, message: message + &hint })
    }

    fn render_once(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        tokens: &[(&'static str, String)],
        now: DateTime<Utc>,
        marks: Option<[char; 2]>,
    ) -> Result<String, TextError> {
        let has_tools = options.tools.is_some() && self.environment.get_template(TOOL_USE_TEMPLATE).is_ok();
        let template = if has_tools { TOOL_USE_TEMPLATE } else { DEFAULT_TEMPLATE };
        let mut messages = Cow::Borrowed(messages);
        if self.thinking_readers.iter().any(|name| name == template) {
            for message in messages.to_mut() {
                let thinking =
                    message.reasoning_content.clone().map(|thinking| ("thinking".into(), thinking.into()));
                message.extra.extend(thinking);
            }
        }
        let tokens = tokens.iter().map(|(name, token)| (*name, Value::from(token.as_str())));
        let kwargs = options.kwargs.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        let ours = [
            ("range", Value::from_function(limited_range(MAX_RANGE_NUMBERS))),
            ("strftime_now", Value::from_function(move |format: String| strftime(now, &format))),
            ("messages", Value::from(Serde(&messages))),
            ("tools", Value::from(Serde(&options.tools))),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(options.add_generation_prompt)),
        ];
        let marks = marks.map(|marks| (generation::MARKS_VARIABLE, Value::from(String::from_iter(marks))));
        let context = Value::from_pairs(tokens.chain(kwargs).chain(ours).chain(marks));
        rendering::render(&self.environment, template, context).map_err(|source| self.to_text_error(source))
    }

    /// The error of a rendering: refused by the template, out of instructions, or failed.
    fn to_text_error(&self, source: Error) -> TextError {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&source);
        while let Some(error) = cause {
            if let Some(RaisedException(message)) = error.downcast_ref() {
                return TextError::Refused { path: self.origin.clone(), message: message.clone() };
            }
            cause = error.source();
        }
        if source.kind() == ErrorKind::OutOfFuel {
            return TextError::Endless { path: self.origin.clone(), steps: MAX_INSTRUCTIONS };
        }
        TextError::Render { path: self.origin.clone(), source }
    }
}

/// The message of a template's `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedException(String);

fn strftime(now: DateTime<Utc>, format: &str) -> Result<String, Error> {
    let mut text = String::new();
    write!(text, "{}", now.format(format)).map_err(|_| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now cannot read the format {format:?}"))
    })?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(template: &str, options: &RenderOptions) -> Result<String, TextError> {
        let templates = vec![(DEFAULT_TEMPLATE.to_owned(), template.to_owned())];
        let messages = [Message::new(Role::User, "<hi> & 'you'")];
        let now = DateTime::from_timestamp(1_700_000_000, 0).unwrap();
        JinjaTemplates::compile(templates, Path::new("a/chat_template.jinja"))?.render(
            &messages,
            options,
            &[("bos_token", "<s>".into())],
            now,
        )
    }

    fn plain(template: &str) -> String {
        render(template, &RenderOptions::default()).unwrap()
    }

    /// The text with brackets around its generation ranges.
    fn generations(template: &str, content: &str) -> Result<String, TextError> {
        let templates = vec![(DEFAULT_TEMPLATE.to_owned(), template.to_owned())];
        let jinja = JinjaTemplates::compile(templates, Path::new("a/chat_template.jinja"))?;
        let messages = [Message::new(Role::User, content)];
        let options = RenderOptions::default();
        let (mut text, places) = jinja.render_generations(&messages, &options, &[], DateTime::UNIX_EPOCH)?;
        assert_eq!(text, jinja.render(&messages, &options, &[], DateTime::UNIX_EPOCH)?);
        for (start, end) in places.into_iter().rev() {
            text.insert(end, ']');
            text.insert(start, '[');
        }
        Ok(text)
    }

    #[test]
    fn templates_see_what_transformers_gives_them() {
        assert_eq!(plain("{{ bos_token }}{{ eos_token }}|{{ messages[0].content }}"), "<s>|<hi> & 'you'");
        assert_eq!(
            plain("{{ tools is none }} {{ tools is defined }} {{ add_generation_prompt }}"),
            "True True False"
        );
        assert_eq!(plain("{{ strftime_now('%d %b %Y') }}"), "14 Nov 2023");
        assert_eq!(plain("{% macro day() %}{{ strftime_now('%d') }}{% endmacro %}{{ day() }}"), "14");
        assert_eq!(
            plain("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"),
            "01"
        );
        assert_eq!(
            plain("{% if enable_thinking is defined and enable_thinking is false %}off{% endif %}"),
            ""
        );
        let kwargs = Map::from_iter([("enable_thinking".to_owned(), json!(false))]);
        let options = RenderOptions { kwargs, ..RenderOptions::default() };
        assert_eq!(render("{{ enable_thinking is false }}", &options).unwrap(), "True");
    }

    #[test]
    fn tools_reach_the_prompt_unsorted_and_unescaped() {
        let tools = json!([{"type": "function", "function": {"name": "<add>", "description": "it's"}}]);
        let options = RenderOptions { tools: Some(tools), ..RenderOptions::default() };
        assert_eq!(
            render("{% for tool in tools %}{{ tool | tojson }}{% endfor %}", &options).unwrap(),
            r#"{"type": "function", "function": {"name": "<add>", "description": "it's"}}"#
        );
        assert_eq!(render("{{ [1] | tojson(indent=1) }}", &options).unwrap(), "[\n 1\n]");
        let templates = [(DEFAULT_TEMPLATE, "plain"), (TOOL_USE_TEMPLATE, "with tools")]
            .map(|(n, t)| (n.to_owned(), t.to_owned()));
        let jinja = JinjaTemplates::compile(templates.to_vec(), Path::new("x")).unwrap();
        assert_eq!(jinja.render(&[], &options, &[], Utc::now()).unwrap(), "with tools");
        assert_eq!(jinja.render(&[], &RenderOptions::default(), &[], Utc::now()).unwrap(), "plain");
    }

    #[test]
    fn generation_tags_do_nothing() {
        assert_eq!(plain("a \n{%- generation -%}\n b {% endgeneration %}\nc"), "ab c");
        assert_eq!(plain("a\n  {% generation %}\nb\n  {%- endgeneration +%}\nc"), "a\nb\nc");
        assert_eq!(
            plain("{{ 'generation' }}{% if 1 %}{{ add_generation_prompt }}{% endif %}"),
            "generationFalse"
        );
    }

    #[test]
    fn generations_are_found_wherever_they_are_written() {
        let found = |template: &str| generations(template, "hi \u{F0000}\u{F0001}").unwrap();
        assert_eq!(found("a \n{%- generation -%}\n b {% endgeneration %}\nc"), "a[b ]c");
        assert_eq!(found("a\n  {% generation %}\nb\n  {%- endgeneration +%}\nc"), "a\n[b]\nc");
        assert_eq!(
            found("{% generation %}{{ messages[0].content }}{% endgeneration %}!"),
            "[hi \u{F0000}\u{F0001}]!"
        );
        let say = "{% macro say(x) %}<{% generation %}{{ x }}{% endgeneration %}>{% endmacro %}";
        assert_eq!(
            found(&format!("{say}{{% for i in range(3) %}}{{{{ say(i) }}}}{{% endfor %}}")),
            "<[0]><[1]><[2]>"
        );
        assert_eq!(
            found("{% set x %}a{% generation %}b{% endgeneration %}{% endset %}{{ x }}|{{ x }}"),
            "a[b]|a[b]"
        );
        assert_eq!(
            found(
                "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}{% generation %}{% endgeneration %}"
            ),
            "[ab]"
        );
        assert_eq!(found("{% if false %}{% generation %}{% endgeneration %}{% endif %}x"), "x");
    }

    #[test]
    fn generations_that_cannot_be_told_are_errors() {
        let none = generations("{{ messages[0].content }}", "hi").unwrap_err();
        assert!(none.to_string().contains("no {% generation %}"), "{none}");
        let rewritten = "{% set x %}{% generation %} b {% endgeneration %}{% endset %}{{ x | trim }}";
        let moved = generations(rewritten, "hi").unwrap_err();
        assert!(matches!(moved, TextError::GenerationMoved { .. }), "{moved:?}");
    }

    #[test]
    fn a_refusal_and_a_failure_name_the_template() {
        let refused = render(
            "{% macro no() %}{{ raise_exception('no system, please') }}{% endmacro %}{{ no() }}",
            &RenderOptions::default(),
        );
        let refused = refused.unwrap_err();
        assert!(
            matches!(&refused, TextError::Refused { message, .. } if message == "no system, please"),
            "{refused:?}"
        );
        assert!(
            refused.to_string().starts_with("the chat template of a/chat_template.jinja refuses"),
            "{refused}"
        );
        let failed = render("\n{{ missing.field }}", &RenderOptions::default()).unwrap_err();
        assert!(matches!(failed, TextError::Render { .. }));
        assert!(
            failed.to_string().contains("chat_template.jinja") && failed.to_string().contains(":2"),
            "{failed}"
        );
        let broken = render("{% if %}", &RenderOptions::default()).unwrap_err();
        assert!(matches!(broken, TextError::Syntax { .. }), "{broken:?}");
    }

    #[test]
    fn costly_instructions_end_too() {
        let options = RenderOptions::default();
        for endless in [
            "{% set ns = namespace(l=range(900000)) %}{% for i in range(90000) %}{% if -1 in ns.l %}a{% endif %}{% endfor %}",
            "{% set l = range(900000) %}{% for i in range(90000) %}{% set m = l|sort(reverse=true) %}{% endfor %}",
        ] {
            let error = render(endless, &options).unwrap_err();
            assert!(matches!(error, TextError::Endless { .. }), "{error}");
        }
        for wide in [
            "{{ 'x'|indent(3000000000, true) }}",
            "{{ 'x'|indent(width=3000000000) }}",
            "{{ '%3000000000d'|format(3) }}",
            "{{ {'a': [1]}|tojson(indent=70000) }}",
        ] {
            let error = render(wide, &options).unwrap_err();
            assert!(error.to_string().contains("at most 1000"), "{error}");
        }
        for (template, text) in
            [("{{ 'a\nb'|indent(2, true) }}", "  a\n  b"), ("{{ '%03d %s'|format(3, 'x') }}", "003 x")]
        {
            assert_eq!(render(template, &options).unwrap(), text);
        }
    }
}
