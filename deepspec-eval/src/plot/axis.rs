//! Axes of plots.

use std::ops::Range;

use anyhow::Result;
use plotters::coord::ranged1d::{KeyPointHint, KeyPointWeight, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;

use super::palette::GREY;
use super::theme::{SMALL_FONT_PIXELS, text_style};
use super::units::UNITS_PER_PIXEL;

/// A range of values with ticks, which plotters uses as a coordinate.
#[derive(Clone)]
pub struct Axis {
    /// Label of the axis, with the unit.
    pub label: &'static str,
    scale: RangedCoordf64,
    /// Labelled tick values.
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// An axis with at most `count` ticks at round values. An empty or non-finite range becomes 0
    /// to 1.
    pub fn linear(label: &'static str, range: Range<f64>, count: usize) -> Self {
        let span = range.end - range.start;
        let sound = span.is_finite() && span > 1e-9;
        let scale = RangedCoordf64::from(if sound { range } else { 0.0..1.0 });
        let values = scale.key_points(count);
        let step = if let [first, second, ..] = values[..] { second - first } else { 1.0 };
        let digits = -(step.log10() + 1e-9).floor().min(0.0) as usize;
        let ticks = values.into_iter().map(|value| (value, format!("{value:.digits$}"))).collect();
        Self { label, scale, ticks }
    }

    /// A logarithmic axis of counts from 1 to `most`. Its ticks are at powers of two, labelled with
    /// the count.
    pub fn log2_counts(label: &'static str, most: f64) -> Self {
        let most = most.max(2.0).log2().ceil();
        let ticks = (0..=most as u32).map(|power| (f64::from(power), (1u64 << power).to_string())).collect();
        Self { label, scale: (0.0..most).into(), ticks }
    }

    /// Like [`Axis::log2_counts`], with a tick for 0 before the tick for 1. [`log2_coordinate`]
    /// returns the coordinates.
    pub fn log2_counts_and_zero(label: &'static str, most: f64) -> Self {
        let Self { label, mut ticks, .. } = Self::log2_counts(label, most);
        let last = ticks.last().map_or(1.0, |(at, _)| *at);
        ticks.insert(0, (ZERO_COORDINATE, "0".into()));
        Self { label, scale: (ZERO_COORDINATE..last).into(), ticks }
    }

    /// The integers from 1 to `count`, each in the middle of its cell.
    pub fn integers(label: &'static str, count: usize) -> Self {
        let ticks = (1..=count).step_by(count / 16 + 1).map(|k| (k as f64, k.to_string())).collect();
        Self { label, scale: (0.5..count.max(1) as f64 + 0.5).into(), ticks }
    }

    /// One row per name, from top to bottom, with the middles at 0, 1, 2, …
    pub fn categories<'n>(names: impl IntoIterator<Item = &'n str>) -> Self {
        let names = names.into_iter().enumerate();
        let ticks: Vec<_> = names.map(|(row, name)| (row as f64, name.to_string())).collect();
        Self { label: "", scale: (ticks.len().max(1) as f64 - 0.5..-0.5).into(), ticks }
    }

    /// Width of the widest tick label, in pixels.
    ///
    /// # Errors
    /// Fails if the font cannot be used.
    pub fn max_label_width(&self) -> Result<u32> {
        let font = text_style(SMALL_FONT_PIXELS, GREY).font;
        let mut widest = 0;
        for (_, text) in &self.ticks {
            // Characters that our font lacks are drawn in another font, which may be as wide as
            // high.
            let text = text.replace(|c: char| !c.is_ascii(), "W");
            widest = widest.max(font.box_size(&text)?.0);
        }
        Ok(widest.div_ceil(UNITS_PER_PIXEL))
    }
}

/// Coordinate of 0 on the logarithmic axis of counts.
const ZERO_COORDINATE: f64 = -1.0;

/// Coordinate of a count from 0 on [`Axis::log2_counts_and_zero`].
pub fn log2_coordinate(count: f64) -> f64 {
    if count < 1.0 { ZERO_COORDINATE } else { count.log2() }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.scale.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match hint.weight() {
            KeyPointWeight::Bold => self.ticks.iter().map(|(value, _)| *value).collect(),
            KeyPointWeight::Any => vec![], // no finer grid
        }
    }

    fn range(&self) -> Range<f64> {
        self.scale.range()
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        self.ticks.iter().find(|(at, _)| at == value).map_or_else(String::new, |(_, text)| text.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        let texts = |axis: Axis| axis.ticks.into_iter().map(|(_, text)| text).collect::<Vec<_>>();
        let values = |range| texts(Axis::linear("", range, 6));
        assert_eq!(values(0.0..1.0), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(values(0.0..6.2), ["0", "2", "4", "6"]);
        assert_eq!(values(0.0..0.034), ["0.00", "0.01", "0.02", "0.03"]);
        assert_eq!(values(0.9..2.5), ["1.0", "1.5", "2.0", "2.5"]);
        for end in [f64::NAN, f64::INFINITY, 0.0, -1.0, 1e-300] {
            assert_eq!(values(0.0..end), values(0.0..1.0));
        }
        assert_eq!(values(0.0..1e300).len(), 6);
        assert_eq!(texts(Axis::integers("", 3)), ["1", "2", "3"]);
        assert!(texts(Axis::integers("", 40)).len() < 17 && texts(Axis::integers("", 0)).is_empty());
        let rows = |names: &[&'static str]| Axis::categories(names.iter().copied()).range();
        assert_eq!((rows(&["a", "b"]).start, rows(&["a", "b"]).end), (1.5, -0.5));
        assert_eq!(rows(&[]).start, 0.5);
    }
}
