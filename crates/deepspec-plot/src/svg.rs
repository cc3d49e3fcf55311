//! A picture as SVG: nothing in it is fetched from elsewhere.

use std::fmt::Write;

use crate::picture::{Align, Color, Picture, Shape, Text};

/// Where our own font is not installed, a like one is taken.
const FONTS: &str = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif";

impl Picture {
    /// The picture as an SVG document, which can stand in an HTML page too.
    pub fn svg(&self) -> String {
        let (w, h, title) = (self.width, self.height, escaped(&self.title));
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{h}\" viewBox=\"0 0 {w} {h}\" role=\"img\" \
             font-family=\"{FONTS}\"><title>{title}</title>\n<rect width=\"{w}\" height=\"{h}\" fill=\"#ffffff\"/>\n"
        );
        for shape in &self.shapes {
            svg.push_str(&element(shape));
            svg.push('\n');
        }
        svg + "</svg>\n"
    }
}

fn element(shape: &Shape) -> String {
    match shape {
        Shape::Line { points, color, width, dashed } => {
            let dashes = if *dashed { " stroke-dasharray=\"5 4\"" } else { "" };
            format!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\"{dashes}/>",
                list(points),
                hex(*color)
            )
        }
        Shape::Area { points, color } => {
            format!("<polygon points=\"{}\" fill=\"{}\"/>", list(points), hex(*color))
        }
        Shape::Disc { at: (x, y), radius, color } => {
            format!("<circle cx=\"{x:.2}\" cy=\"{y:.2}\" r=\"{radius:.2}\" fill=\"{}\"/>", hex(*color))
        }
        Shape::Text(text) => text_element(text),
    }
}

fn text_element(Text { at: (x, y), text, size, align, color, upwards }: &Text) -> String {
    let anchor = match align {
        Align::Start => "start",
        Align::Middle => "middle",
        Align::End => "end",
    };
    let turn = if *upwards { format!(" transform=\"rotate(-90 {x:.2} {y:.2})\"") } else { String::new() };
    format!(
        "<text x=\"{x:.2}\" y=\"{y:.2}\" font-size=\"{size}\" text-anchor=\"{anchor}\" fill=\"{}\"{turn}>{}</text>",
        hex(*color),
        escaped(text)
    )
}

fn list(points: &[(f64, f64)]) -> String {
    let mut list = String::new();
    for (x, y) in points {
        let _ = write!(list, "{x:.2},{y:.2} ");
    }
    list.trim_end().to_string()
}

fn hex(Color(red, green, blue): Color) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// Text that cannot be taken for markup; control characters, which XML forbids, are left out.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::palette::INK;

    #[test]
    fn texts_are_no_markup() {
        let mut picture = Picture::new(10, 10, "a<b");
        picture.text((1.0, 2.0), "</text>\u{1}\"&", 9.0, Align::End, INK);
        let svg = picture.svg();
        assert!(svg.contains("<title>a&lt;b</title>"));
        assert!(svg.contains(">&lt;/text&gt;&quot;&amp;</text>"), "{svg}");
    }
}
