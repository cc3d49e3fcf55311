//! Rows that come as columns: texts are read where they lie, only what we do not know goes through JSON.

use std::borrow::Cow;
use std::ops::Range;

use arrow::array::{
    Array, ArrayRef, AsArray, LargeListArray, LargeStringArray, ListArray, RecordBatch, StringArray,
    StringViewArray, StructArray,
};
use arrow::datatypes::DataType;

use super::conversation::{Conversation, Id, Kind, Problem, Said, calls_in_text};
use super::json_rows;
use super::roles::{Roles, Shape};
use deepspec_rows::{MESSAGE_KEYS, Table, json_lines, objects};

/// Checks that a table has messages in a form that we know.
///
/// # Errors
/// With the columns found and what was expected.
pub fn check(table: &Table) -> anyhow::Result<()> {
    let (path, schema) = (table.path().display(), table.schema());
    let found: Vec<_> = MESSAGE_KEYS.iter().filter_map(|key| schema.field_with_name(key).ok()).collect();
    anyhow::ensure!(
        !found.is_empty(),
        "{path}: no column `conversations` or `messages`; the columns are {}",
        table.columns()
    );
    let has = |data_type: &DataType, keys: [&str; 2]| match data_type {
        DataType::Struct(fields) => keys.iter().all(|key| fields.iter().any(|field| field.name() == key)),
        _ => false,
    };
    let known = |data_type: &DataType| match data_type {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            has(item.data_type(), ["from", "value"]) || has(item.data_type(), ["role", "content"])
        }
        _ => false,
    };
    anyhow::ensure!(
        found.iter().any(|field| known(field.data_type())),
        "{path}: messages must be a list of struct<from, value> or of struct<role, content>; the columns are {}",
        table.columns()
    );
    Ok(())
}

/// Calls `each` with every wanted row of a batch, in order, as a conversation or the reason why it is none.
///
/// # Errors
/// If a column has a type that JSON has no form for.
pub fn each_row(
    batch: &RecordBatch,
    roles: &Roles,
    wanted: impl Fn(usize) -> bool,
    mut each: impl FnMut(usize, Result<Conversation<'_>, Problem>),
) -> anyhow::Result<()> {
    let Some(messages) = Messages::find(batch) else {
        for (index, row) in objects(batch)?.into_iter().enumerate().filter(|&(index, _)| wanted(index)) {
            each(index, json_rows::conversation(row, roles));
        }
        return Ok(());
    };
    let ids = Ids::find(batch)?;
    let (rest, message_rest) = (Rest::of_rows(batch, messages.key)?, messages.rest()?);
    let conversation = |row: usize| {
        let range = messages
            .lists
            .range(row)
            .ok_or_else(|| Kind::NoMessages.because("no `conversations` or `messages`"))?;
        let mut out = Conversation::new(ids.get(row)?, rest.get(row));
        for (position, at) in range.enumerate() {
            let said = messages.get(at, &message_rest, roles).and_then(|said| out.say(said, roles));
            said.map_err(|problem| json_rows::at(messages.key, position, problem))?;
        }
        out.check()
    };
    (0..batch.num_rows()).filter(|&row| wanted(row)).for_each(|row| each(row, conversation(row)));
    Ok(())
}

/// A column of strings.
enum Strings<'a> {
    Small(&'a StringArray),
    Large(&'a LargeStringArray),
    View(&'a StringViewArray),
}

impl<'a> Strings<'a> {
    fn of(array: &'a ArrayRef) -> Option<Self> {
        match array.data_type() {
            DataType::Utf8 => Some(Self::Small(array.as_string())),
            DataType::LargeUtf8 => Some(Self::Large(array.as_string())),
            DataType::Utf8View => Some(Self::View(array.as_string_view())),
            _ => None,
        }
    }

    fn get(&self, at: usize) -> Option<&'a str> {
        match self {
            Self::Small(array) => array.is_valid(at).then(|| array.value(at)),
            Self::Large(array) => array.is_valid(at).then(|| array.value(at)),
            Self::View(array) => array.is_valid(at).then(|| array.value(at)),
        }
    }
}

/// A column of lists.
enum Lists<'a> {
    Small(&'a ListArray),
    Large(&'a LargeListArray),
}

impl<'a> Lists<'a> {
    fn of(array: &'a ArrayRef) -> Option<Self> {
        match array.data_type() {
            DataType::List(_) => Some(Self::Small(array.as_list())),
            DataType::LargeList(_) => Some(Self::Large(array.as_list())),
            _ => None,
        }
    }

    fn values(&self) -> &'a ArrayRef {
        match self {
            Self::Small(lists) => lists.values(),
            Self::Large(lists) => lists.values(),
        }
    }

    /// Where a row's items lie among the values.
    fn range(&self, row: usize) -> Option<Range<usize>> {
        match self {
            Self::Small(lists) => lists.is_valid(row).then(|| {
                let ends = lists.value_offsets();
                ends[row] as usize..ends[row + 1] as usize
            }),
            Self::Large(lists) => lists.is_valid(row).then(|| {
                let ends = lists.value_offsets();
                ends[row] as usize..ends[row + 1] as usize
            }),
        }
    }

    /// Where all rows' items lie.
    fn span(&self) -> Range<usize> {
        match self {
            Self::Small(lists) => span(lists.value_offsets(), |&end| end as usize),
            Self::Large(lists) => span(lists.value_offsets(), |&end| end as usize),
        }
    }
}

fn span<T>(ends: &[T], number: impl Fn(&T) -> usize) -> Range<usize> {
    ends.first().map_or(0, &number)..ends.last().map_or(0, &number)
}

/// The messages of a batch, where their speakers and texts are columns of strings.
struct Messages<'a> {
    key: &'static str,
    lists: Lists<'a>,
    messages: &'a StructArray,
    shape: Shape,
    speakers: Strings<'a>,
    texts: Strings<'a>,
    tool_calls: Option<&'a ArrayRef>,
    function_call: Option<&'a ArrayRef>,
}

impl<'a> Messages<'a> {
    /// None for schemas that only JSON is flexible enough for.
    fn find(batch: &'a RecordBatch) -> Option<Self> {
        let mut columns = MESSAGE_KEYS.iter().filter_map(|&key| Some((key, batch.column_by_name(key)?)));
        let ((key, column), None) = (columns.next()?, columns.next()) else { return None };
        let lists = Lists::of(column)?;
        let messages = lists.values().as_struct_opt()?;
        let shape = match (messages.column_by_name("role"), messages.column_by_name("from")) {
            (Some(_), None) => Shape::OpenAi,
            (None, Some(_)) => Shape::ShareGpt,
            _ => return None,
        };
        let (speaker, text) = shape.keys();
        let strings = |name| messages.column_by_name(name).and_then(Strings::of);
        Some(Self {
            key,
            speakers: strings(speaker)?,
            texts: strings(text)?,
            lists,
            messages,
            shape,
            tool_calls: messages.column_by_name("tool_calls"),
            function_call: messages.column_by_name("function_call"),
        })
    }

    fn get<'b>(&self, at: usize, rest: &'b Rest, roles: &Roles) -> Result<Said<'b>, Problem>
    where
        'a: 'b,
    {
        if self.messages.is_null(at) {
            return Err(Kind::Message.because("expected an object, found null"));
        }
        let Some(speaker) = self.speakers.get(at) else {
            return Err(Kind::Message.because("neither `role` nor `from`"));
        };
        let role = roles.role(self.shape, speaker);
        let text = role.and_then(|_| self.texts.get(at));
        let calls = role.is_some() && self.calls(at)?;
        let (speaker, text) = (Cow::Borrowed(speaker), text.map(Cow::Borrowed));
        Ok(Said { shape: self.shape, speaker, text, calls, rest: rest.get(at) })
    }

    /// Whether a message calls tools.
    fn calls(&self, at: usize) -> Result<bool, Problem> {
        let called = match self.tool_calls.map(|column| (column, Strings::of(column))) {
            Some((_, Some(texts))) => texts.get(at).map_or(Ok(false), calls_in_text)?,
            Some((column, None)) => is_call(column, at),
            None => false,
        };
        // The older form: one call.
        Ok(called || self.function_call.is_some_and(|column| is_call(column, at)))
    }

    /// What the messages say besides speaker and text.
    fn rest(&self) -> anyhow::Result<Rest> {
        let (speaker, text) = self.shape.keys();
        let kept = |name: &str| ![speaker, text, "content"].contains(&name);
        let span = self.lists.span();
        let messages = self.messages.slice(span.start, span.len());
        let mut rest = Rest::of(&RecordBatch::from(&messages_without_nulls(&messages)), kept)?;
        rest.first = span.start;
        Ok(rest)
    }
}

/// The same fields as rows of a batch, which cannot be null; where a message was null nobody looks.
fn messages_without_nulls(messages: &StructArray) -> StructArray {
    let (fields, columns, _) = messages.clone().into_parts();
    StructArray::new(fields, columns, None)
}

/// Whether what is not null calls anything.
fn is_call(column: &ArrayRef, at: usize) -> bool {
    if column.is_null(at) {
        return false;
    }
    match (Lists::of(column), Strings::of(column)) {
        (Some(lists), _) => lists.range(at).is_some_and(|range| !range.is_empty()),
        (_, Some(strings)) => strings.get(at).is_some_and(|text| !text.is_empty()),
        _ => true,
    }
}

/// Fields that travel along, as the insides of JSON objects.
#[derive(Default)]
struct Rest {
    text: Vec<u8>,
    lines: Vec<Range<usize>>,
    /// Index of the first line's row or message.
    first: usize,
}

impl Rest {
    fn of_rows(batch: &RecordBatch, messages: &str) -> anyhow::Result<Self> {
        Self::of(batch, |name| name != messages && name != "id")
    }

    /// The columns whose name is `kept`.
    fn of(batch: &RecordBatch, kept: impl Fn(&str) -> bool) -> anyhow::Result<Self> {
        let schema = batch.schema();
        let names = schema.fields().iter().enumerate();
        let columns: Vec<usize> = names.filter(|(_, field)| kept(field.name())).map(|(at, _)| at).collect();
        if columns.is_empty() || batch.num_rows() == 0 {
            return Ok(Self::default());
        }
        let text = json_lines(&batch.project(&columns)?)?;
        let (mut lines, mut start) = (Vec::with_capacity(batch.num_rows()), 0);
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            // Between the braces.
            lines.push(start + 1..start + line.trim_ascii_end().len() - 1);
            start += line.len();
        }
        anyhow::ensure!(
            lines.len() == batch.num_rows(),
            "{} rows became {} lines",
            batch.num_rows(),
            lines.len()
        );
        Ok(Self { text, lines, first: 0 })
    }

    fn get(&self, at: usize) -> Cow<'_, [u8]> {
        match self.lines.get(at.wrapping_sub(self.first)) {
            Some(line) => Cow::Borrowed(&self.text[line.clone()]),
            None => Cow::Borrowed(&[]),
        }
    }
}

/// The ids of a batch.
enum Ids<'a> {
    None,
    Text(Strings<'a>),
    /// `"id":…`, or nothing where it is null.
    Json(Rest),
}

impl<'a> Ids<'a> {
    fn find(batch: &'a RecordBatch) -> anyhow::Result<Self> {
        let Some(column) = batch.column_by_name("id") else { return Ok(Self::None) };
        match Strings::of(column) {
            Some(strings) => Ok(Self::Text(strings)),
            None => Rest::of(batch, |name| name == "id").map(Self::Json),
        }
    }

    fn get(&self, row: usize) -> Result<Id<'_>, Problem> {
        match self {
            Self::None => Ok(Id::Index),
            Self::Text(strings) => match strings.get(row) {
                Some("") => json_rows::id("".into()),
                Some(id) => Ok(Id::Text(id.into())),
                None => Ok(Id::Index),
            },
            Self::Json(rest) => {
                let text = rest.get(row);
                let value = text.strip_prefix(b"\"id\":").unwrap_or(b"null");
                json_rows::id(serde_json::from_slice(value).unwrap_or_default())
            }
        }
    }
}
