//! A picture as PNG.

use std::io::Write;

use flate2::Compression;
use flate2::write::ZlibEncoder;
use tiny_skia::{
    Color as Ink, FillRule, LineCap, LineJoin, Paint, Path, PathBuilder, Pixmap, Stroke, StrokeDash,
    Transform,
};

use crate::font;
use crate::picture::{Align, Color, Picture, Shape, Text};

impl Picture {
    /// The picture as a PNG file of `scale` times its size. None for a picture without area or of absurd size.
    pub fn png(&self, scale: f32) -> Option<Vec<u8>> {
        let size = |pixels: u32| (pixels as f32 * scale).round() as u32;
        let mut pixmap = Pixmap::new(size(self.width), size(self.height))?;
        pixmap.fill(Ink::WHITE);
        for shape in &self.shapes {
            draw(&mut pixmap, shape, Transform::from_scale(scale, scale));
        }
        Some(encode(&pixmap))
    }
}

fn draw(pixmap: &mut Pixmap, shape: &Shape, place: Transform) {
    match shape {
        Shape::Line { points, color, width, dashed } => {
            let stroke = Stroke {
                width: *width as f32,
                line_cap: LineCap::Butt,
                line_join: LineJoin::Round,
                dash: if *dashed { StrokeDash::new(vec![5.0, 4.0], 0.0) } else { None },
                ..Stroke::default()
            };
            if let Some(path) = path(points, false) {
                pixmap.stroke_path(&path, &paint(*color), &stroke, place, None);
            }
        }
        Shape::Area { points, color } => fill(pixmap, path(points, true), *color, place),
        Shape::Disc { at: (x, y), radius, color } => {
            let disc = PathBuilder::from_circle(*x as f32, *y as f32, *radius as f32);
            fill(pixmap, disc, *color, place);
        }
        Shape::Text(text) => letters(pixmap, text, place),
    }
}

fn letters(pixmap: &mut Pixmap, text: &Text, place: Transform) {
    let width = font::width(&text.text, text.size);
    let back = match text.align {
        Align::Start => 0.0,
        Align::Middle => width / 2.0,
        Align::End => width,
    };
    let (x, y) = text.at;
    let turn = if text.upwards { Transform::from_rotate(-90.0) } else { Transform::identity() };
    let place = place.pre_translate(x as f32, y as f32).pre_concat(turn).pre_translate(-back as f32, 0.0);
    fill(pixmap, font::outline(&text.text, text.size), text.color, place);
}

fn fill(pixmap: &mut Pixmap, path: Option<Path>, color: Color, place: Transform) {
    if let Some(path) = path {
        pixmap.fill_path(&path, &paint(color), FillRule::Winding, place, None);
    }
}

fn path(points: &[(f64, f64)], close: bool) -> Option<Path> {
    let mut points = points.iter().map(|&(x, y)| (x as f32, y as f32));
    let mut builder = PathBuilder::new();
    let (x, y) = points.next()?;
    builder.move_to(x, y);
    points.for_each(|(x, y)| builder.line_to(x, y));
    if close {
        builder.close();
    }
    builder.finish()
}

fn paint(Color(red, green, blue): Color) -> Paint<'static> {
    let mut paint = Paint { anti_alias: true, ..Paint::default() };
    paint.set_color_rgba8(red, green, blue, 255);
    paint
}

/// Nothing is transparent on a white ground, so that three bytes per pixel are enough.
fn encode(pixmap: &Pixmap) -> Vec<u8> {
    let (width, height) = (pixmap.width(), pixmap.height());
    let mut pixels = Vec::with_capacity((width * height * 3 + height) as usize);
    for row in pixmap.data().chunks_exact(width as usize * 4) {
        pixels.push(0); // no filter
        pixels.extend(row.chunks_exact(4).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]));
    }
    let mut header = [width.to_be_bytes(), height.to_be_bytes()].concat();
    header.extend([8, 2, 0, 0, 0]); // bits, RGB, and the only methods there are
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    chunk(&mut file, b"IHDR", &header);
    chunk(&mut file, b"IDAT", &deflated(&pixels));
    chunk(&mut file, b"IEND", &[]);
    file
}

fn deflated(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(vec![], Compression::default());
    let written = encoder.write_all(bytes).and_then(|()| encoder.finish());
    written.unwrap_or_default() // memory does not refuse
}

fn chunk(file: &mut Vec<u8>, kind: &[u8; 4], data: &[u8]) {
    file.extend((data.len() as u32).to_be_bytes());
    let start = file.len();
    file.extend(kind);
    file.extend(data);
    let mut crc = flate2::Crc::new();
    crc.update(&file[start..]);
    file.extend(crc.sum().to_be_bytes());
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;
    use crate::palette::{BLUE, INK};

    #[test]
    fn a_png_holds_the_pixels() {
        let mut picture = Picture::new(20, 10, "");
        picture.rectangle((0.0, 0.0), (10.0, 10.0), BLUE);
        picture.text((12.0, 9.0), "τ", 10.0, Align::Start, INK);
        picture.line(&[(0.0, f64::NAN), (3.0, 1.0)], INK, 1.0, true);
        let png = picture.png(2.0).unwrap();
        assert_eq!(png[..8], *b"\x89PNG\r\n\x1a\n");
        assert_eq!(png[16..24], [0, 0, 0, 40, 0, 0, 0, 20]);
        let length = u32::from_be_bytes(png[33..37].try_into().unwrap()) as usize;
        let mut pixels = vec![];
        flate2::read::ZlibDecoder::new(&png[41..41 + length]).read_to_end(&mut pixels).unwrap();
        assert_eq!(pixels.len(), 20 * (1 + 40 * 3));
        let pixel = |x: usize, y: usize| pixels[y * 121 + 1 + 3 * x..][..3].to_vec();
        assert_eq!((pixel(5, 5), pixel(39, 0)), (vec![0x00, 0x72, 0xb2], vec![255; 3]));
        assert!((24..40).any(|x| (0..20).any(|y| pixel(x, y)[0] < 100)), "the letter is there");
        assert!(Picture::new(0, 10, "").png(1.0).is_none());
    }
}
