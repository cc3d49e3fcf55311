//! Backend of plotters that draws an SVG document and a bitmap.

use std::io;

use ab_glyph::{Font, FontRef, OutlineCurve};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};
use plotters_backend::{BackendColor, BackendCoord, BackendStyle, BackendTextStyle, DrawingErrorKind};
use tiny_skia::{FillRule, LineJoin, Paint, Path, PathBuilder, Pixmap, Rect, Stroke, Transform};

use super::units::{BASELINE_OFFSET_EM, FONT, UNITS_PER_PIXEL, is_drawable_char};

type DrawResult = Result<(), DrawingErrorKind<io::Error>>;

/// A backend of plotters that draws everything twice. Coordinates are in units, [`UNITS_PER_PIXEL`]
/// of them per pixel of the document.
pub struct DualBackend<'a> {
    document: SVGBackend<'a>,
    picture: &'a mut Pixmap,
    /// Transform from units to pixels of the bitmap.
    to_pixels: Transform,
    letters: FontRef<'static>,
}

impl<'a> DualBackend<'a> {
    /// An empty document of `width` × `height` pixels, and the bitmap `picture`, whose pixels can
    /// be denser.
    ///
    /// # Errors
    /// Fails if the font cannot be read.
    pub fn new(
        document: &'a mut String,
        picture: &'a mut Pixmap,
        (width, height): (u32, u32),
    ) -> anyhow::Result<Self> {
        let scale = picture.width() as f32 / (width * UNITS_PER_PIXEL) as f32;
        Ok(Self {
            document: SVGBackend::with_string(document, (width * UNITS_PER_PIXEL, height * UNITS_PER_PIXEL)),
            picture,
            to_pixels: Transform::from_scale(scale, scale),
            letters: FontRef::try_from_slice(FONT)?,
        })
    }

    fn fill(&mut self, path: Option<Path>, color: BackendColor, transform: Transform) {
        if let Some(path) = path {
            self.picture.fill_path(&path, &solid_paint(color), FillRule::Winding, transform, None);
        }
    }

    fn stroke(&mut self, path: Option<Path>, style: &impl BackendStyle) {
        let width = style.stroke_width() as f32;
        if let Some(path) = path.filter(|_| width > 0.0) {
            let stroke = Stroke { width, line_join: LineJoin::Miter, ..Stroke::default() };
            self.picture.stroke_path(&path, &solid_paint(style.color()), &stroke, self.to_pixels, None);
        }
    }

    fn fill_or_stroke(&mut self, path: Option<Path>, style: &impl BackendStyle, fill: bool) {
        match fill {
            true => self.fill(path, style.color(), self.to_pixels),
            false => self.stroke(path, style),
        }
    }

    /// Outlines of a text with letters of `em` units, and its width. It begins at 0 on the base
    /// line, without kerning.
    fn text_outline(&self, text: &str, em: f32) -> (Option<Path>, f32) {
        let scale = em / self.letters.units_per_em().unwrap_or(2048.0);
        let (mut path, mut at) = (PathBuilder::new(), 0.0);
        for letter in text.chars().filter(|&letter| is_drawable_char(letter)) {
            let glyph = self.letters.glyph_id(letter);
            let place = |point: ab_glyph::Point| (at + point.x * scale, -point.y * scale);
            let mut last = None;
            for curve in self.letters.outline(glyph).into_iter().flat_map(|outline| outline.curves) {
                let (OutlineCurve::Line(from, to)
                | OutlineCurve::Quad(from, _, to)
                | OutlineCurve::Cubic(from, _, _, to)) = curve;
                if last != Some(from) {
                    let (x, y) = place(from);
                    path.move_to(x, y);
                }
                let (x, y) = place(to);
                match curve {
                    OutlineCurve::Line(..) => path.line_to(x, y),
                    OutlineCurve::Quad(_, by, _) => path.quad_to(place(by).0, place(by).1, x, y),
                    OutlineCurve::Cubic(_, a, b, _) => {
                        path.cubic_to(place(a).0, place(a).1, place(b).0, place(b).1, x, y);
                    }
                }
                last = Some(to);
            }
            at += self.letters.h_advance_unscaled(glyph) * scale;
        }
        (path.finish(), at)
    }
}

fn solid_paint(color: BackendColor) -> Paint<'static> {
    let (red, green, blue) = color.rgb;
    let mut paint = Paint { anti_alias: true, ..Paint::default() };
    paint.set_color_rgba8(red, green, blue, (color.alpha * 255.0).round() as u8);
    paint
}

fn polyline(points: &[BackendCoord]) -> PathBuilder {
    let mut path = PathBuilder::new();
    for (index, &(x, y)) in points.iter().enumerate() {
        match index {
            0 => path.move_to(x as f32, y as f32),
            _ => path.line_to(x as f32, y as f32),
        }
    }
    path
}

impl DrawingBackend for DualBackend<'_> {
    type ErrorType = io::Error;

    fn get_size(&self) -> (u32, u32) {
        self.document.get_size()
    }

    fn ensure_prepared(&mut self) -> DrawResult {
        self.document.ensure_prepared()
    }

    fn present(&mut self) -> DrawResult {
        self.document.present()
    }

    fn draw_pixel(&mut self, point: BackendCoord, color: BackendColor) -> DrawResult {
        let square = Rect::from_xywh(point.0 as f32, point.1 as f32, 1.0, 1.0);
        self.fill(square.map(PathBuilder::from_rect), color, self.to_pixels);
        self.document.draw_pixel(point, color)
    }

    fn draw_line<S: BackendStyle>(&mut self, from: BackendCoord, to: BackendCoord, style: &S) -> DrawResult {
        self.stroke(polyline(&[from, to]).finish(), style);
        self.document.draw_line(from, to, style)
    }

    fn draw_rect<S: BackendStyle>(
        &mut self,
        from: BackendCoord,
        to: BackendCoord,
        style: &S,
        fill: bool,
    ) -> DrawResult {
        let corners = Rect::from_ltrb(from.0 as f32, from.1 as f32, to.0 as f32, to.1 as f32);
        let path = corners.map(PathBuilder::from_rect);
        self.fill_or_stroke(path, style, fill);
        self.document.draw_rect(from, to, style, fill)
    }

    fn draw_path<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(
        &mut self,
        path: I,
        style: &S,
    ) -> DrawResult {
        let points: Vec<_> = path.into_iter().collect();
        self.stroke(polyline(&points).finish(), style);
        self.document.draw_path(points, style)
    }

    fn draw_circle<S: BackendStyle>(
        &mut self,
        center: BackendCoord,
        radius: u32,
        style: &S,
        fill: bool,
    ) -> DrawResult {
        let path = PathBuilder::from_circle(center.0 as f32, center.1 as f32, radius as f32);
        self.fill_or_stroke(path, style, fill);
        self.document.draw_circle(center, radius, style, fill)
    }

    fn fill_polygon<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(
        &mut self,
        corners: I,
        style: &S,
    ) -> DrawResult {
        let corners: Vec<_> = corners.into_iter().collect();
        let mut path = polyline(&corners);
        path.close();
        self.fill(path.finish(), style.color(), self.to_pixels);
        self.document.fill_polygon(corners, style)
    }

    /// Draws the text as the SVG document does: plotters' size is 1.24 em, and `at` is the text's
    /// start, middle or end.
    fn draw_text<S: BackendTextStyle>(&mut self, text: &str, style: &S, at: BackendCoord) -> DrawResult {
        let em = (style.size() / 1.24) as f32;
        let (path, width) = self.text_outline(text, em);
        let right = match style.anchor().h_pos {
            HPos::Left => 0.0,
            HPos::Center => -width / 2.0,
            HPos::Right => -width,
        };
        let down = match style.anchor().v_pos {
            VPos::Top => 0.76 * em,
            VPos::Center => BASELINE_OFFSET_EM * em,
            VPos::Bottom => -0.27 * em,
        };
        let turned = match style.transform() {
            FontTransform::Rotate90 => 90.0,
            FontTransform::Rotate180 => 180.0,
            FontTransform::Rotate270 => 270.0,
            _ => 0.0,
        };
        let placed = self.to_pixels.pre_translate(at.0 as f32, at.1 as f32);
        let placed = placed.pre_concat(Transform::from_rotate(turned)).pre_translate(right, down);
        self.fill(path, style.color(), placed);
        self.document.draw_text(text, style, at)
    }

    fn estimate_text_size<S: BackendTextStyle>(
        &self,
        text: &str,
        style: &S,
    ) -> Result<(u32, u32), DrawingErrorKind<io::Error>> {
        self.document.estimate_text_size(text, style)
    }
}

#[cfg(test)]
mod tests {
    use plotters::style::text_anchor::Pos;

    use super::*;
    use crate::plot::palette::INK;
    use crate::plot::theme::{LARGE_FONT_PIXELS, text_style};
    use crate::plot::{Plot, px};

    /// Extent of the dark pixels around a text drawn at the middle of a picture: left, top, right
    /// and bottom.
    fn reach(pos: Pos, transform: FontTransform) -> [i64; 4] {
        let plot = Plot::draw("text", (200, 200), |canvas| {
            let (width, height) = canvas.dim_in_pixel();
            let style = text_style(LARGE_FONT_PIXELS, INK).pos(pos).transform(transform.clone());
            canvas.draw_text("HHHH", &style, (width as i32 / 2, height as i32 / 2))?;
            Ok(())
        });
        let picture = Pixmap::decode_png(&plot.unwrap().png().unwrap()).unwrap();
        let middle = i64::from(picture.width()) / 2;
        let dark = picture.pixels().iter().enumerate().filter(|(_, pixel)| pixel.red() < 128);
        let width = picture.width() as usize;
        let places = dark.map(|(i, _)| ((i % width) as i64 - middle, (i / width) as i64 - middle));
        places.fold([i64::MAX, i64::MAX, i64::MIN, i64::MIN], |[left, top, right, bottom], (x, y)| {
            [left.min(x), top.min(y), right.max(x + 1), bottom.max(y + 1)]
        })
    }

    #[test]
    fn texts_stand_at_their_anchors() {
        let at = |h, v| reach(Pos::new(h, v), FontTransform::None);
        // Four letters of 13 pixels, doubled in the PNG: capitals are 0.73 em high and 0.75 em
        // wide.
        let em = 2 * i64::from(px(LARGE_FONT_PIXELS)) / i64::from(UNITS_PER_PIXEL);
        let near =
            |found: i64, expected: f64| (found as f64 - expected * em as f64).abs() <= 0.15 * em as f64;
        let [left, top, right, bottom] = at(HPos::Left, VPos::Top);
        assert!(near(left, 0.1) && near(right, 2.9), "{left} to {right} of {em}");
        assert!(near(top, 0.03) && near(bottom, 0.76), "{top} to {bottom} of {em}");
        let [left, top, right, bottom] = at(HPos::Center, VPos::Center);
        assert!(near(left, -1.4) && near(right, 1.4) && near(top, -0.37) && near(bottom, 0.36));
        let [left, _, right, bottom] = at(HPos::Right, VPos::Bottom);
        assert!(near(left, -2.9) && near(right, -0.1) && near(bottom, -0.27));
    }

    #[test]
    fn turned_texts_turn_about_their_place() {
        let pos = Pos::new(HPos::Left, VPos::Top);
        let [left, top, right, bottom] = reach(pos, FontTransform::None);
        // A turn by 90, 180 or 270 degrees permutes the four extents.
        let expected = [
            (FontTransform::Rotate90, [-bottom, left, -top, right]),
            (FontTransform::Rotate180, [-right, -bottom, -left, -top]),
            (FontTransform::Rotate270, [top, -right, bottom, -left]),
        ];
        for (transform, expected) in expected {
            let found = reach(pos, transform);
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 1), "{found:?} {expected:?}");
        }
    }
}
