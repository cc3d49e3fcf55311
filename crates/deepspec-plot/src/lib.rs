//! Charts as SVG and PNG, without a display, a browser or installed fonts.
//!
//! A [`Picture`] is a list of shapes; it is written as SVG ([`Picture::svg`], texts stay texts) or drawn as PNG
//! ([`Picture::png`], with a font of our own). A [`Panel`] puts axes on a part of a picture and places values in it.

mod axis;
mod font;
mod panel;
mod picture;
mod png;
mod svg;

pub use axis::Axis;
pub use font::width;
pub use panel::Panel;
pub use picture::{Align, Color, Marker, Picture, Shape, Text};

/// Colours that are told apart in colour-blind vision (Okabe & Ito 2008).
pub mod palette {
    use crate::Color;

    /// Blue.
    pub const BLUE: Color = Color(0x00, 0x72, 0xb2);
    /// Vermilion.
    pub const VERMILION: Color = Color(0xd5, 0x5e, 0x00);
    /// Bluish green.
    pub const GREEN: Color = Color(0x00, 0x9e, 0x73);
    /// Orange.
    pub const ORANGE: Color = Color(0xe6, 0x9f, 0x00);
    /// Reddish purple.
    pub const PURPLE: Color = Color(0xcc, 0x79, 0xa7);
    /// Text.
    pub const INK: Color = Color(0x22, 0x22, 0x22);
    /// Text of less weight, axes.
    pub const GREY: Color = Color(0x66, 0x66, 0x66);
    /// Grid lines.
    pub const FAINT: Color = Color(0xe4, 0xe4, 0xe4);
}
