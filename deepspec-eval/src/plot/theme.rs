//! Colours, lines, letters and marks.

use std::sync::Once;

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::register_font;

use super::paper::DualBackend;
use super::px;
use super::units::FONT;

/// Colours that are told apart in colour-blind vision (Okabe & Ito 2008).
pub mod palette {
    use plotters::style::RGBColor;

    /// Blue.
    pub const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
    /// Vermilion.
    pub const VERMILION: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
    /// Bluish green.
    pub const GREEN: RGBColor = RGBColor(0x00, 0x9e, 0x73);
    /// Orange.
    pub const ORANGE: RGBColor = RGBColor(0xe6, 0x9f, 0x00);
    /// Reddish purple.
    pub const PURPLE: RGBColor = RGBColor(0xcc, 0x79, 0xa7);
    /// Text.
    pub const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
    /// Text of less weight, axes.
    pub const GREY: RGBColor = RGBColor(0x66, 0x66, 0x66);
    /// Grid lines.
    pub const FAINT: RGBColor = RGBColor(0xe4, 0xe4, 0xe4);
}

/// Where our own font is not installed, a browser takes a like one.
const FAMILIES: &str = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif";
/// Pixels of the letters at ticks, axes and keys.
pub(crate) const SMALL: f64 = 11.0;
/// Pixels of the letters of a title.
pub(crate) const LARGE: f64 = 13.0;

/// Letters of so many pixels. What plotters calls the size is 1.24 times the em.
pub(crate) fn letters(size: f64, color: RGBColor) -> TextStyle<'static> {
    static REGISTERED: Once = Once::new();
    // Were the font damaged, plotters would not find it where it measures a text, and say so.
    REGISTERED.call_once(|| {
        let _ = register_font(FAMILIES, FontStyle::Normal, FONT);
    });
    let size = 1.24 * f64::from(px(size));
    FontDesc::new(FontFamily::Name(FAMILIES), size, FontStyle::Normal).color(&color)
}

/// A line of so many pixels.
pub fn stroke(color: RGBColor, width: f64) -> ShapeStyle {
    color.stroke_width(px(width).unsigned_abs())
}

/// How a value is marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marker {
    /// A disc.
    Disc,
    /// A square.
    Square,
    /// A triangle.
    Triangle,
    /// A diamond, hollow.
    Diamond,
}

/// How values of one kind are shown.
#[derive(Debug, Clone, Copy)]
pub struct SeriesStyle(pub RGBColor, pub Marker);

impl SeriesStyle {
    /// One of many: colours first, then markers.
    pub fn nth(index: usize) -> Self {
        use palette::{BLUE, GREEN, GREY, INK, ORANGE, PURPLE, VERMILION};
        const COLOURS: [RGBColor; 7] = [INK, VERMILION, BLUE, GREEN, ORANGE, PURPLE, GREY];
        const MARKERS: [Marker; 4] = [Marker::Disc, Marker::Square, Marker::Triangle, Marker::Diamond];
        Self(COLOURS[index % COLOURS.len()], MARKERS[index / COLOURS.len() % MARKERS.len()])
    }

    /// Marks a value at `place`; the radius is in pixels.
    ///
    /// # Errors
    /// Drawing fails.
    pub fn mark<C: CoordTranslate>(
        self,
        area: &DrawingArea<DualBackend, C>,
        place: C::From,
        radius: f64,
    ) -> Result<()> {
        let Self(color, marker) = self;
        let corner = |(right, down): (f64, f64)| (px(right * radius), px(down * radius));
        let place = EmptyElement::at(place);
        match marker {
            Marker::Disc => area.draw(&(place + Circle::new((0, 0), px(radius), color.filled())))?,
            Marker::Square => {
                let corners = [(-0.9, -0.9), (0.9, 0.9)].map(corner);
                area.draw(&(place + Rectangle::new(corners, color.filled())))?;
            }
            Marker::Triangle => {
                let corners = [(0.0, -1.2), (1.1, 0.8), (-1.1, 0.8)].map(corner);
                area.draw(&(place + Polygon::new(corners, color)))?;
            }
            Marker::Diamond => {
                let corners = [(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0), (0.0, -1.3)].map(corner);
                area.draw(&(place + PathElement::new(corners, stroke(color, 1.5))))?;
            }
        }
        Ok(())
    }
}
