//! What our charts share: colours, letters, axes, legends, and the way to SVG and PNG.
//!
//! `plotters` draws on an SVG document and, by `tiny-skia`, on a picture of it at once.
//!
//! [`Plot::draw`] gives a [`Canvas`] to draw on, [`heading`] and [`chart`] put a title, a legend and axes on
//! it, and a chart's values are plotters' own elements, or [`series`] of marked ones.

mod axis;
mod canvas;
mod chart;
mod paper;
mod theme;
mod units;

pub use axis::{Axis, doubling};
pub use canvas::{Canvas, Plot};
pub use chart::{Chart, chart, heading, point_labels, series};
pub use theme::{Marker, SeriesStyle, palette, stroke};
pub use units::px;
