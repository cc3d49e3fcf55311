//! Aligned plain-text tables.

use tabled::builder::Builder;
use tabled::grid::config::HorizontalLine;
use tabled::settings::object::Columns;
use tabled::settings::span::Span;
use tabled::settings::themes::Theme;
use tabled::settings::{Alignment, Padding, Style};

use crate::statistics::Interval;

/// Terminal width in characters. Wider tables continue below, with the first column repeated.
const MAX_WIDTH: usize = 80;
/// Spaces between columns.
const COLUMN_GAP: usize = 2;
/// Cell of a missing value.
const MISSING_VALUE: &str = "–";

/// Rows under a header; the first column is left-aligned, and all other columns are right-aligned.
pub struct Table {
    header: Vec<String>,
    /// Titles over several columns: the number of columns, and the title.
    titles: Vec<(usize, String)>,
    rows: Vec<Option<Vec<String>>>,
}

impl Table {
    /// An empty table with these columns.
    pub fn new(header: Vec<String>) -> Self {
        Self { header, titles: vec![], rows: vec![] }
    }

    /// Adds a title over the next `columns` columns.
    pub fn add_title(&mut self, columns: usize, title: &str) {
        self.titles.push((columns, title.to_string()));
    }

    /// Appends a row, one cell per column.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.header.len());
        self.rows.push(Some(cells));
    }

    /// Appends a horizontal line.
    pub fn add_rule(&mut self) {
        self.rows.push(None);
    }

    /// The table as text with a final newline, split into parts if it is wider than a terminal.
    pub fn render(&self) -> String {
        let parts: Vec<String> =
            self.split_columns().iter().map(|columns| self.render_columns(columns)).collect();
        parts.join("\n")
    }

    /// Columns of each part; every part begins with the first column.
    fn split_columns(&self) -> Vec<Vec<usize>> {
        let width = |column: usize| {
            let rows = self.rows.iter().flatten().chain([&self.header]);
            rows.map(|cells| cells[column].chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.header.len()).map(width).collect();
        let Some(first) = widths.first() else { return vec![vec![]] };
        // Columns under one title stay together if they fit.
        let mut groups = vec![0; widths.len()];
        let mut from = 0;
        for (count, _) in &self.titles {
            if let Some(group) = groups.get_mut(from) {
                *group = widths.iter().skip(from).take(*count).map(|width| COLUMN_GAP + width).sum();
            }
            from += count;
        }
        let (mut parts, mut taken) = (vec![vec![0]], *first);
        for (column, width) in widths.iter().enumerate().skip(1) {
            let part = parts.len() - 1;
            let group = if first + groups[column] <= MAX_WIDTH { groups[column] } else { 0 };
            if taken + group.max(COLUMN_GAP + width) > MAX_WIDTH && parts[part].len() > 1 {
                parts.push(vec![0, column]);
                taken = first + COLUMN_GAP + width;
            } else {
                parts[part].push(column);
                taken += COLUMN_GAP + width;
            }
        }
        parts
    }

    /// A table of the given columns.
    fn render_columns(&self, columns: &[usize]) -> String {
        let chosen =
            |cells: &[String]| columns.iter().map(|&column| cells[column].clone()).collect::<Vec<_>>();
        let (mut titles, mut from) = (vec![], 0);
        for (count, title) in &self.titles {
            let within = columns.iter().filter(|&&column| (from..from + count).contains(&column)).count();
            titles.extend((within > 0).then(|| (within, title.clone())));
            from += count;
        }
        let rows = self.rows.iter().map(|row| row.as_deref().map(chosen)).collect();
        Self { header: chosen(&self.header), titles, rows }.render_grid()
    }

    fn render_grid(&self) -> String {
        let (mut grid, mut theme) = (Builder::new(), Theme::from_style(Style::empty()));
        if !self.titles.is_empty() {
            let cells = |(columns, title): &(usize, String)| {
                let rest = std::iter::repeat_n(String::new(), columns.saturating_sub(1));
                std::iter::once(title.clone()).chain(rest)
            };
            grid.push_record(self.titles.iter().flat_map(cells));
        }
        grid.push_record(&self.header);
        let line = HorizontalLine::new(Some('─'), None, None, None);
        let mut rule = |row: usize| theme.insert_horizontal_line(row, line);
        rule(grid.count_records());
        for row in &self.rows {
            match row {
                Some(cells) => grid.push_record(cells),
                None => rule(grid.count_records()),
            }
        }
        let mut table = grid.build();
        table.with(theme).with(Padding::new(0, COLUMN_GAP, 0, 0));
        table.modify(Columns::new(1..), Alignment::right()).modify(Columns::last(), Padding::zero());
        let mut column = 0;
        for (columns, _) in &self.titles {
            let place = (0, column);
            table.modify(place, (Span::column(*columns as isize), Alignment::center()));
            column += columns;
            if column == self.header.len() {
                table.modify(place, Padding::zero());
            }
        }
        table.to_string().lines().map(|line| format!("{}\n", line.trim_end())).collect()
    }
}

/// A number with `digits` decimals, or a dash.
pub fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| MISSING_VALUE.into(), |value| format!("{value:.digits$}"))
}

/// A rate per second, with one decimal below 99.5.
pub fn rate(value: Option<f64>) -> String {
    number(value, if value.is_some_and(|value| value < 99.5) { 1 } else { 0 })
}

/// An interval, or a dash.
pub fn range(interval: Option<Interval>) -> String {
    interval.map_or_else(|| MISSING_VALUE.into(), |Interval { low, high }| format!("{low:.2} … {high:.2}"))
}

/// A factor, or a dash.
pub fn factor(value: Option<f64>) -> String {
    value.map_or_else(|| MISSING_VALUE.into(), |value| format!("{value:.2}×"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_under_their_titles() {
        let mut table = Table::new(["suite", "@1", "@2"].map(String::from).to_vec());
        table.add_title(1, "");
        table.add_title(2, "position");
        table.row(vec!["a".into(), number(Some(0.5), 2), number(None, 2)]);
        table.add_rule();
        table.row(vec!["overall".into(), rate(Some(1234.5)), factor(Some(2.0))]);
        let expected = "
          position
suite      @1     @2
────────────────────
a        0.50      –
────────────────────
overall  1234  2.00×
";
        assert_eq!(format!("\n{}", table.render()), expected);
    }

    #[test]
    fn wide_tables_go_on_below_under_their_first_column() {
        let mut table = Table::new((0..30).map(|column| format!("column {column}")).collect());
        table.add_title(1, "");
        table.add_title(29, "numbers");
        table.row((0..30).map(|column| column.to_string()).collect());
        let text = table.render();
        assert!(text.lines().all(|line| line.chars().count() <= MAX_WIDTH), "{text}");
        assert!(
            (1..30).all(|column| text.matches(&format!("column {column}\n")).count()
                + text.matches(&format!("column {column} ")).count()
                == 1),
            "{text}"
        );
        assert!(text.matches("column 0 ").count() > 3 && text.matches("numbers").count() > 3, "{text}");
    }
}
