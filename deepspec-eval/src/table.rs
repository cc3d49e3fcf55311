//! Aligned tables of plain text.

use tabled::builder::Builder;
use tabled::grid::config::HorizontalLine;
use tabled::settings::object::Columns;
use tabled::settings::span::Span;
use tabled::settings::themes::Theme;
use tabled::settings::{Alignment, Padding, Style};

use crate::statistics::Interval;

/// Blanks between columns.
const GAP: usize = 2;
/// Stands for a value that does not exist.
const NOTHING: &str = "–";

/// Rows under a header; the first column is flush left, the others flush right.
pub struct Table {
    header: Vec<String>,
    /// Titles over several columns each: how many columns, and the title.
    titles: Vec<(usize, String)>,
    rows: Vec<Option<Vec<String>>>,
}

impl Table {
    /// A table of these columns.
    pub fn new(header: Vec<String>) -> Self {
        Self { header, titles: vec![], rows: vec![] }
    }

    /// Puts a title over the next `columns` columns.
    pub fn title(&mut self, columns: usize, title: &str) {
        self.titles.push((columns, title.to_string()));
    }

    /// Appends a row, one cell per column.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.header.len());
        self.rows.push(Some(cells));
    }

    /// Appends a line between rows.
    pub fn rule(&mut self) {
        self.rows.push(None);
    }

    /// The whole table with a final newline.
    pub fn render(&self) -> String {
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
        table.with(theme).with(Padding::new(0, GAP, 0, 0));
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
    value.map_or_else(|| NOTHING.into(), |value| format!("{value:.digits$}"))
}

/// A rate of things per second: decimals only where they say something.
pub fn rate(value: Option<f64>) -> String {
    number(value, if value.is_some_and(|value| value < 99.5) { 1 } else { 0 })
}

/// An interval, or a dash.
pub fn range(interval: Option<Interval>) -> String {
    interval.map_or_else(|| NOTHING.into(), |Interval { low, high }| format!("{low:.2} … {high:.2}"))
}

/// A factor, or a dash.
pub fn factor(value: Option<f64>) -> String {
    value.map_or_else(|| NOTHING.into(), |value| format!("{value:.2}×"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_under_their_titles() {
        let mut table = Table::new(["suite", "@1", "@2"].map(String::from).to_vec());
        table.title(1, "");
        table.title(2, "position");
        table.row(vec!["a".into(), number(Some(0.5), 2), number(None, 2)]);
        table.rule();
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
}
