//! The letters of PNG pictures, and how wide they are.

use std::sync::OnceLock;

use tiny_skia::{Path, PathBuilder, Transform};
use ttf_parser::{Face, OutlineBuilder};

/// See `assets/LICENSE-DejaVu.txt`.
static FONT: &[u8] = include_bytes!("../assets/DejaVuSans-subset.ttf");

fn face() -> Option<&'static Face<'static>> {
    static FACE: OnceLock<Option<Face>> = OnceLock::new();
    FACE.get_or_init(|| Face::parse(FONT, 0).ok()).as_ref()
}

/// How wide a text of this size is, in pixels.
pub fn width(text: &str, size: f64) -> f64 {
    let Some(face) = face() else { return 0.0 };
    let units: f64 = text.chars().map(|character| advance(face, character)).sum();
    units * size / f64::from(face.units_per_em())
}

fn advance(face: &Face, character: char) -> f64 {
    let glyph = face.glyph_index(character).unwrap_or_default();
    face.glyph_hor_advance(glyph).map_or(0.0, f64::from)
}

/// Outline of a text that begins at the origin, with y downwards.
pub fn outline(text: &str, size: f64) -> Option<Path> {
    let face = face()?;
    let scale = (size / f64::from(face.units_per_em())) as f32;
    let mut outline = Outline { builder: PathBuilder::new(), x: 0.0 };
    for character in text.chars() {
        face.outline_glyph(face.glyph_index(character).unwrap_or_default(), &mut outline);
        outline.x += advance(face, character) as f32;
    }
    outline.builder.finish()?.transform(Transform::from_scale(scale, -scale))
}

struct Outline {
    builder: PathBuilder,
    /// Where the glyph begins.
    x: f32,
}

impl OutlineBuilder for Outline {
    fn move_to(&mut self, x: f32, y: f32) {
        self.builder.move_to(self.x + x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        self.builder.line_to(self.x + x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        self.builder.quad_to(self.x + x1, y1, self.x + x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        self.builder.cubic_to(self.x + x1, y1, self.x + x2, y2, self.x + x, y);
    }

    fn close(&mut self) {
        self.builder.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_have_width_and_outline() {
        assert!(width("accepted length τ", 10.0) > 60.0 && width("", 10.0) == 0.0);
        assert!((width("mm", 20.0) - 4.0 * width("m", 10.0)).abs() < 1e-9);
        let bounds = outline("τ≤0.5", 10.0).unwrap().bounds();
        assert!(bounds.top() < -4.0 && bounds.bottom() < 1.0, "letters stand on the line: {bounds:?}");
        assert!(outline(" ", 10.0).is_none());
    }
}
