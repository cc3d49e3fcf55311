//! Lengths and letters of drawings.

/// Units per pixel. Plotters counts in whole units: were they pixels, curves would have steps and discs few sizes.
pub(crate) const UNITS: u32 = 10;
/// Our letters, whatever fonts are installed. See `assets/LICENSE-DejaVu.txt`.
pub(crate) static FONT: &[u8] = include_bytes!("../../assets/DejaVuSans-subset.ttf");

/// How far the base line of a text lies below its middle, in em: so it is as high above that as below.
pub(crate) const MIDDLE: f32 = 0.36;

/// A length of so many pixels in units.
pub fn px(pixels: f64) -> i32 {
    (pixels * f64::from(UNITS)).round() as i32
}

/// Whether a character of a text is drawn: XML forbids the others.
pub(crate) fn is_shown(c: char) -> bool {
    !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}')
}
