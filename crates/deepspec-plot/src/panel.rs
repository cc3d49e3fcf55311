//! Axes on a part of a picture.

use crate::palette::{FAINT, GREY, INK};
use crate::{Align, Axis, Color, Marker, Picture};

/// Size of the letters at ticks and axes.
const SMALL: f64 = 11.0;
/// Size of the letters of a title.
const LARGE: f64 = 13.0;

/// A rectangle in which values are placed.
pub struct Panel<'p> {
    /// What is drawn on.
    pub picture: &'p mut Picture,
    /// Left, top, right and bottom edge.
    edges: [f64; 4],
    x: Axis,
    y: Axis,
}

impl<'p> Panel<'p> {
    /// Draws grid, ticks, labels and title; `edges` (left, top, right, bottom) are those of the field itself.
    pub fn new(picture: &'p mut Picture, edges: [f64; 4], title: &str, x: Axis, y: Axis) -> Self {
        let mut panel = Self { picture, edges, x, y };
        let [left, top, right, bottom] = edges;
        panel.horizontal();
        panel.vertical();
        panel.picture.line(&[(left, top), (left, bottom), (right, bottom)], GREY, 1.0, false);
        panel.picture.text((left, top - 10.0), title, LARGE, Align::Start, INK);
        panel
    }

    fn horizontal(&mut self) {
        let [left, top, right, bottom] = self.edges;
        for (value, text) in self.x.ticks.clone() {
            let x = self.place(value, self.y.low).0;
            self.picture.line(&[(x, top), (x, bottom)], FAINT, 1.0, false);
            self.picture.text((x, bottom + 16.0), &text, SMALL, Align::Middle, GREY);
        }
        let label = self.x.label.clone();
        self.picture.text(((left + right) / 2.0, bottom + 34.0), &label, SMALL, Align::Middle, INK);
    }

    fn vertical(&mut self) {
        let [left, top, right, bottom] = self.edges;
        let mut widest: f64 = 0.0;
        for (value, text) in self.y.ticks.clone() {
            let y = self.place(self.x.low, value).1;
            self.picture.line(&[(left, y), (right, y)], FAINT, 1.0, false);
            self.picture.text((left - 6.0, y + 4.0), &text, SMALL, Align::End, GREY);
            widest = widest.max(crate::width(&text, SMALL));
        }
        let at = (left - widest - 16.0, (top + bottom) / 2.0);
        let label = self.y.label.clone();
        self.picture.text_upwards(at, &label, SMALL, Align::Middle, INK);
    }

    /// Where a pair of values lies in the picture.
    pub fn place(&self, x: f64, y: f64) -> (f64, f64) {
        let [left, top, right, bottom] = self.edges;
        (left + self.x.share(x) * (right - left), bottom - self.y.share(y) * (bottom - top))
    }

    /// Joins values by a line and marks each of them.
    pub fn series(&mut self, values: &[(f64, f64)], color: Color, marker: Marker) {
        self.curve(values, color, false);
        let places: Vec<_> = values.iter().map(|&(x, y)| self.place(x, y)).collect();
        places.into_iter().for_each(|place| self.picture.marker(marker, place, 3.5, color));
    }

    /// Joins values by a line.
    pub fn curve(&mut self, values: &[(f64, f64)], color: Color, dashed: bool) {
        let places: Vec<_> = values.iter().map(|&(x, y)| self.place(x, y)).collect();
        self.picture.line(&places, color, 1.8, dashed);
    }
}

impl Picture {
    /// A row of keys from `at` to the right.
    pub fn legend(&mut self, (mut x, y): (f64, f64), keys: &[(&str, Color, Marker)]) {
        for (text, color, marker) in keys {
            self.marker(*marker, (x + 5.0, y - 4.0), 4.0, *color);
            self.text((x + 14.0, y), text, SMALL, Align::Start, INK);
            x += 14.0 + crate::width(text, SMALL) + 20.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_lie_between_the_edges() {
        let mut picture = Picture::new(300, 200, "");
        let (x, y) = (Axis::new("x", 0.0, 10.0, 5), Axis::new("y", 0.0, 1.0, 5));
        let panel = Panel::new(&mut picture, [50.0, 20.0, 250.0, 120.0], "title", x, y);
        assert_eq!(panel.place(0.0, 0.0), (50.0, 120.0));
        assert_eq!(panel.place(10.0, 1.0), (250.0, 20.0));
        assert_eq!(panel.place(5.0, 0.25), (150.0, 95.0));
    }
}
