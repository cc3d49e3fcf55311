//! Shapes on a white ground.

/// Red, green, blue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Color(pub u8, pub u8, pub u8);

/// Where a text's place lies along it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// At its beginning.
    Start,
    /// In its middle.
    Middle,
    /// At its end.
    End,
}

/// A line of text.
#[derive(Debug, Clone, PartialEq)]
pub struct Text {
    /// x, and y of the baseline.
    pub at: (f64, f64),
    /// What it says.
    pub text: String,
    /// Height of the letters' square.
    pub size: f64,
    /// Which part of it is at `at`.
    pub align: Align,
    /// Its colour.
    pub color: Color,
    /// Whether it runs upwards.
    pub upwards: bool,
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

/// Something drawn; lengths are in pixels from the upper left corner.
#[derive(Debug, Clone, PartialEq)]
pub enum Shape {
    /// Joined lines.
    Line {
        /// Corners.
        points: Vec<(f64, f64)>,
        /// Its colour.
        color: Color,
        /// Its width.
        width: f64,
        /// Whether it is dashed.
        dashed: bool,
    },
    /// A filled polygon.
    Area {
        /// Corners.
        points: Vec<(f64, f64)>,
        /// Its colour.
        color: Color,
    },
    /// A disc.
    Disc {
        /// Its centre.
        at: (f64, f64),
        /// Its radius.
        radius: f64,
        /// Its colour.
        color: Color,
    },
    /// A line of text.
    Text(Text),
}

/// Shapes, drawn one over the other.
#[derive(Debug, Clone, PartialEq)]
pub struct Picture {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// What it shows, for those who cannot see it.
    pub title: String,
    /// What is drawn.
    pub shapes: Vec<Shape>,
}

impl Picture {
    /// An empty picture.
    pub fn new(width: u32, height: u32, title: &str) -> Self {
        Self { width, height, title: title.to_string(), shapes: vec![] }
    }

    /// Draws joined lines. Points that are not finite are left out.
    pub fn line(&mut self, points: &[(f64, f64)], color: Color, width: f64, dashed: bool) {
        let points: Vec<_> = points.iter().copied().filter(finite).collect();
        self.shapes.push(Shape::Line { points, color, width, dashed });
    }

    /// Fills a rectangle between two corners.
    pub fn rectangle(&mut self, from: (f64, f64), to: (f64, f64), color: Color) {
        if finite(&from) && finite(&to) {
            let points = vec![from, (to.0, from.1), to, (from.0, to.1)];
            self.shapes.push(Shape::Area { points, color });
        }
    }

    /// Writes a text.
    pub fn text(&mut self, at: (f64, f64), text: &str, size: f64, align: Align, color: Color) {
        let text = text.to_string();
        self.shapes.push(Shape::Text(Text { at, text, size, align, color, upwards: false }));
    }

    /// Writes a text that runs upwards.
    pub fn text_upwards(&mut self, at: (f64, f64), text: &str, size: f64, align: Align, color: Color) {
        let text = text.to_string();
        self.shapes.push(Shape::Text(Text { at, text, size, align, color, upwards: true }));
    }

    /// Marks a place.
    pub fn marker(&mut self, marker: Marker, (x, y): (f64, f64), radius: f64, color: Color) {
        if !finite(&(x, y)) {
            return;
        }
        let r = radius;
        match marker {
            Marker::Disc => self.shapes.push(Shape::Disc { at: (x, y), radius, color }),
            Marker::Square => self.rectangle((x - 0.9 * r, y - 0.9 * r), (x + 0.9 * r, y + 0.9 * r), color),
            Marker::Triangle => {
                let points = vec![(x, y - 1.2 * r), (x + 1.1 * r, y + 0.8 * r), (x - 1.1 * r, y + 0.8 * r)];
                self.shapes.push(Shape::Area { points, color });
            }
            Marker::Diamond => {
                let r = 1.3 * r;
                self.line(&[(x, y - r), (x + r, y), (x, y + r), (x - r, y), (x, y - r)], color, 1.5, false);
            }
        }
    }
}

fn finite(point: &(f64, f64)) -> bool {
    point.0.is_finite() && point.1.is_finite()
}
