//! Renders a drawing as SVG and PNG.

use anyhow::{Context, Result, ensure};
use plotters::coord::Shift;
use plotters::prelude::*;
use tiny_skia::Pixmap;

use super::backend::DualBackend;
use super::units::{BASELINE_OFFSET_EM, UNITS_PER_PIXEL, is_drawable_char, px};

/// PNG pixels per pixel of the drawing, in each direction, so that plots are sharp on dense
/// screens.
const PNG_SCALE: u32 = 2;
/// Maximum width and height of a drawing in pixels.
const MAX_PIXELS: u32 = 16_384;
/// Margin at each edge, in pixels.
const MARGIN_PIXELS: f64 = 16.0;

/// Drawing area; lengths on it are [`super::px`].
pub type Canvas<'a> = DrawingArea<DualBackend<'a>, Shift>;

/// A finished drawing.
pub struct Plot {
    /// Title of the plot, also for screen readers.
    pub title: &'static str,
    svg: String,
    picture: Pixmap,
}

impl Plot {
    /// Draws on a white background of `size` pixels, within a margin.
    ///
    /// # Errors
    /// Errors of `paint`, or a size that is zero or too large, with the plot's title.
    pub fn draw(
        title: &'static str,
        size: (u32, u32),
        paint: impl FnOnce(&Canvas) -> Result<()>,
    ) -> Result<Self> {
        let (svg, picture) =
            draw_svg_and_bitmap(title, size, paint).with_context(|| format!("drawing the plot `{title}`"))?;
        Ok(Self { title, svg, picture })
    }

    /// The plot as an SVG document, which can be embedded in HTML and loads nothing.
    pub fn svg(&self) -> &str {
        &self.svg
    }

    /// The plot as a PNG file with `PNG_SCALE` times the pixels in each direction.
    ///
    /// # Errors
    /// Fails if the PNG encoder fails.
    pub fn png(&self) -> Result<Vec<u8>> {
        self.picture.encode_png().with_context(|| format!("writing the plot `{}` as PNG", self.title))
    }
}

fn draw_svg_and_bitmap(
    title: &str,
    size: (u32, u32),
    paint: impl FnOnce(&Canvas) -> Result<()>,
) -> Result<(String, Pixmap)> {
    let (width, height) = size;
    let mut drawn = String::new();
    let problem = || format!("{width} x {height} pixels are none, or more than {MAX_PIXELS} either way");
    ensure!(width.max(height) <= MAX_PIXELS, problem());
    let mut picture = Pixmap::new(width * PNG_SCALE, height * PNG_SCALE).with_context(problem)?;
    {
        let canvas = DualBackend::new(&mut drawn, &mut picture, size)?.into_drawing_area();
        canvas.fill(&WHITE)?;
        let margin = px(MARGIN_PIXELS);
        paint(&canvas.margin(margin, margin, margin, margin))?;
        canvas.present()?;
    }
    // Set the outer size in pixels, add a title, and centre texts vertically.
    let (_, shapes) = drawn.split_once('>').context("an SVG without a tag")?;
    let shapes = shapes.replace(" dy=\"0.5ex\" ", &format!(" dy=\"{BASELINE_OFFSET_EM}em\" "));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {} {}\" role=\"img\"><title>{title}</title>{shapes}",
        width * UNITS_PER_PIXEL,
        height * UNITS_PER_PIXEL
    );
    svg.retain(|c| c == '\n' || is_drawable_char(c));
    Ok((svg, picture))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::palette::BLUE;
    use crate::plot::{Axis, draw_axes, draw_title_and_legend};

    fn pixels(plot: &Plot) -> Pixmap {
        Pixmap::decode_png(&plot.png().unwrap()).unwrap()
    }

    #[test]
    fn names_are_no_markup() {
        let name = "</text>\u{1}\"&\u{ffff}";
        let plot = Plot::draw("names", (300, 100), |canvas| {
            draw_axes(canvas, Axis::linear("", 0.0..1.0, 3), Axis::categories([name]))?;
            Ok(())
        });
        let plot = plot.unwrap();
        assert!(plot.svg().contains("&lt;/text&gt;&quot;&amp;\n"), "{}", plot.svg());
        assert!(plot.svg().contains("<title>names</title>") && plot.png().is_ok());
    }

    #[test]
    fn a_png_shows_what_the_svg_says() {
        let plot = Plot::draw("square", (40, 36), |canvas| {
            canvas.draw(&Rectangle::new([(0, 0), (px(4.0), px(4.0))], BLUE.filled()))?;
            draw_title_and_legend(&canvas.split_vertically(px(4.0)).1, "τ", &[])?;
            Ok(())
        });
        let plot = plot.unwrap();
        let pixels = pixels(&plot);
        let pixel = |x: u32, y: u32| pixels.pixel(x, y).map(|p| (p.red(), p.green(), p.blue())).unwrap();
        assert_eq!((pixels.width(), pixels.height()), (80, 72));
        assert_eq!((pixel(36, 36), pixel(0, 0)), ((0x00, 0x72, 0xb2), (255, 255, 255)));
        assert!((32..60).any(|x| (42..72).any(|y| pixel(x, y).0 < 100)), "the letter is there");
        let none = |_: &Canvas| Ok(());
        assert!(Plot::draw("none", (0, 36), none).is_err());
        assert!(Plot::draw("too many", (100_000, 100_000), none).is_err());
    }

    #[test]
    fn what_stands_beside_an_axis_has_its_room() {
        let name = "W".repeat(40);
        let plot = Plot::draw("long", (600, 160), |canvas| {
            draw_axes(canvas, Axis::linear("x", 0.0..1.0, 3), Axis::categories([name.as_str(), "τ"]))?;
            Ok(())
        });
        let pixels = pixels(&plot.unwrap());
        let blank =
            |x: u32| (0..pixels.height()).all(|y| pixels.pixel(x, y).is_some_and(|p| p.green() > 250));
        assert!((0..32).all(blank), "the margin is free");
        assert!((32..160).any(|x| !blank(x)), "and the name begins beside it");
    }
}
