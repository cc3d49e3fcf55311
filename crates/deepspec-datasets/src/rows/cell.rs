//! Column values, read in place from Arrow arrays.

use std::sync::LazyLock;

use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch};
use arrow_json::writer::{EncoderOptions, make_encoder};
use arrow_schema::{DataType, FieldRef};

/// Encoder options, which omit nulls by default.
static ENCODER_OPTIONS: LazyLock<EncoderOptions> = LazyLock::new(EncoderOptions::default);

/// A value of a column.
#[derive(Clone, Copy)]
pub struct Cell<'a> {
    field: &'a FieldRef,
    array: &'a dyn Array,
    row: usize,
}

impl<'a> Cell<'a> {
    /// The values of a row of a batch, with their column names.
    pub fn row_cells(batch: &'a RecordBatch, row: usize) -> impl Iterator<Item = (&'a str, Self)> {
        let columns = batch.schema_ref().fields().iter().zip(batch.columns());
        columns.map(move |(field, array)| (field.name().as_str(), Self { field, array, row }))
    }

    /// Checks that every column can be written as JSON.
    ///
    /// # Errors
    /// Fails with the type that cannot be written.
    pub fn check_writable(batch: &RecordBatch) -> anyhow::Result<()> {
        let mut columns = batch.schema_ref().fields().iter().zip(batch.columns());
        Ok(columns.try_for_each(|(field, array)| make_encoder(field, array, &ENCODER_OPTIONS).map(drop))?)
    }

    /// Whether the value is null.
    pub fn is_null(self) -> bool {
        self.array.is_null(self.row) || *self.array.data_type() == DataType::Null
    }

    /// A string; None for other types.
    pub fn text(self) -> Option<&'a str> {
        let Self { array, row, .. } = self;
        match array.data_type() {
            _ if self.is_null() => None,
            DataType::Utf8 => Some(array.as_string::<i32>().value(row)),
            DataType::LargeUtf8 => Some(array.as_string::<i64>().value(row)),
            DataType::Utf8View => Some(array.as_string_view().value(row)),
            _ => None,
        }
    }

    /// The items of a list; None for other types.
    pub fn items(self) -> Option<impl Iterator<Item = Self>> {
        let Self { array, row, .. } = self;
        let (field, values, rows) = match array.data_type() {
            _ if self.is_null() => return None,
            DataType::List(field) => {
                let list = array.as_list::<i32>();
                let [from, to] = [row, row + 1].map(|at| list.value_offsets()[at] as usize);
                (field, list.values(), from..to)
            }
            DataType::LargeList(field) => {
                let list = array.as_list::<i64>();
                let [from, to] = [row, row + 1].map(|at| list.value_offsets()[at] as usize);
                (field, list.values(), from..to)
            }
            DataType::FixedSizeList(field, size) => {
                let list = array.as_fixed_size_list();
                let from = list.value_offset_at(row);
                (field, list.values(), from..from + *size as usize)
            }
            _ => return None,
        };
        Some(rows.map(move |row| Self { field, array: values, row }))
    }

    /// The fields of a struct; None for other types.
    pub fn fields(self) -> Option<impl Iterator<Item = (&'a str, Self)>> {
        if self.is_null() {
            return None;
        }
        let (row, inner) = (self.row, self.array.as_struct_opt()?);
        let columns = inner.fields().iter().zip(inner.columns());
        Some(columns.map(move |(field, array)| (field.name().as_str(), Self { field, array, row })))
    }

    /// Appends the value as JSON. Without [`Self::check_writable`], a type that cannot be written
    /// becomes null.
    pub fn write(self, out: &mut Vec<u8>) {
        if let Some(text) = self.text() {
            // Writing a string to memory cannot fail.
            let _ = serde_json::to_writer(out, text);
            return;
        }
        match make_encoder(self.field, self.array, &ENCODER_OPTIONS) {
            Ok(mut encoder) if !encoder.is_null(self.row) => encoder.encode(self.row, out),
            _ => out.extend_from_slice(b"null"),
        }
    }
}
