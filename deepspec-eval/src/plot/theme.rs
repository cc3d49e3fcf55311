//! Colours, lines, fonts and markers.

use std::sync::Once;

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::register_font;

use super::backend::DualBackend;
use super::px;
use super::units::FONT;

/// Colours that colour-blind readers can tell apart (Okabe & Ito 2008).
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
    /// Colour of text.
    pub const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
    /// Colour of secondary text and axes.
    pub const GREY: RGBColor = RGBColor(0x66, 0x66, 0x66);
    /// Colour of grid lines.
    pub const FAINT: RGBColor = RGBColor(0xe4, 0xe4, 0xe4);
}

/// Fallback fonts for browsers without our own font.
const FONT_FAMILIES: &str = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif";
/// Font size of ticks, axes and legends, in pixels.
pub(crate) const SMALL_FONT_PIXELS: f64 = 11.0;
/// Font size of titles, in pixels.
pub(crate) const LARGE_FONT_PIXELS: f64 = 13.0;

/// Text style of `size` pixels. Plotters' size is 1.24 times the em.
pub(crate) fn text_style(size: f64, color: RGBColor) -> TextStyle<'static> {
    static REGISTERED: Once = Once::new();
    // With a damaged font, plotters reports the missing font when it measures a text.
    REGISTERED.call_once(|| {
        let _ = register_font(FONT_FAMILIES, FontStyle::Normal, FONT);
    });
    let size = 1.24 * f64::from(px(size));
    FontDesc::new(FontFamily::Name(FONT_FAMILIES), size, FontStyle::Normal).color(&color)
}

/// A line style of `width` pixels.
pub fn stroke(color: RGBColor, width: f64) -> ShapeStyle {
    color.stroke_width(px(width).unsigned_abs())
}

/// Marker of a value.
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

/// Colour and marker of a series.
#[derive(Debug, Clone, Copy)]
pub struct SeriesStyle(pub RGBColor, pub Marker);

impl SeriesStyle {
    /// Style of series number `index`: colours vary first, then markers.
    pub fn nth(index: usize) -> Self {
        use palette::{BLUE, GREEN, GREY, INK, ORANGE, PURPLE, VERMILION};
        const COLOURS: [RGBColor; 7] = [INK, VERMILION, BLUE, GREEN, ORANGE, PURPLE, GREY];
        const MARKERS: [Marker; 4] = [Marker::Disc, Marker::Square, Marker::Triangle, Marker::Diamond];
        Self(COLOURS[index % COLOURS.len()], MARKERS[index / COLOURS.len() % MARKERS.len()])
    }

    /// Draws the marker at `place`; the radius is in pixels.
    ///
    /// # Errors
    /// Fails if drawing fails.
    pub fn draw_marker<C: CoordTranslate>(
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
