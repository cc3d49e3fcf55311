//! Units and font of drawings.

/// Units per pixel. Plotters has integer coordinates, so that whole pixels would make curves
/// jagged.
pub(crate) const UNITS_PER_PIXEL: u32 = 10;
/// Our font, independent of installed fonts. See `assets/LICENSE-DejaVu.txt`.
pub(crate) static FONT: &[u8] = include_bytes!("../../assets/DejaVuSans-subset.ttf");

/// Distance of a text's base line below its vertical middle, in em.
pub(crate) const BASELINE_OFFSET_EM: f32 = 0.36;

/// Converts pixels to units.
pub fn px(pixels: f64) -> i32 {
    (pixels * f64::from(UNITS_PER_PIXEL)).round() as i32
}

/// Whether a character of a text is drawn; XML forbids all other characters.
pub(crate) fn is_drawable_char(c: char) -> bool {
    !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}')
}
