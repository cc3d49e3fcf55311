//! Aligned tables of plain text.

use crate::statistics::Interval;

/// Space between columns.
const GAP: &str = "  ";
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
        let cells = || std::iter::once(&self.header).chain(self.rows.iter().flatten());
        let mut widths: Vec<usize> = (0..self.header.len())
            .map(|column| cells().map(|row| width(&row[column])).max().unwrap_or(0))
            .collect();
        self.widen_for_titles(&mut widths);
        let rule = "─".repeat(span(&widths));
        let mut lines = vec![];
        if !self.titles.is_empty() {
            lines.push(self.title_line(&widths));
        }
        lines.push(line(&self.header, &widths));
        lines.push(rule.clone());
        lines.extend(
            self.rows.iter().map(|row| row.as_ref().map_or_else(|| rule.clone(), |row| line(row, &widths))),
        );
        lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
    }

    /// Gives the first column under a title what the title needs beyond its columns.
    fn widen_for_titles(&self, widths: &mut [usize]) {
        let mut start = 0;
        for (columns, title) in &self.titles {
            let under = &mut widths[start..start + columns];
            let missing = width(title).saturating_sub(span(under));
            if let Some(first) = under.first_mut() {
                *first += missing;
            }
            start += columns;
        }
    }

    fn title_line(&self, widths: &[usize]) -> String {
        let (mut parts, mut start) = (vec![], 0);
        for (columns, title) in &self.titles {
            parts.push(format!("{title:^total$}", total = span(&widths[start..start + columns])));
            start += columns;
        }
        parts.join(GAP)
    }
}

fn line(cells: &[String], widths: &[usize]) -> String {
    let padded = cells.iter().zip(widths).enumerate().map(|(column, (cell, &total))| {
        let blanks = " ".repeat(total - width(cell));
        if column == 0 { format!("{cell}{blanks}") } else { format!("{blanks}{cell}") }
    });
    padded.collect::<Vec<_>>().join(GAP)
}

fn span(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP.len() * widths.len().saturating_sub(1)
}

fn width(text: &str) -> usize {
    text.chars().count()
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
