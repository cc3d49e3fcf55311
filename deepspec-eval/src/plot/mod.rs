//! Shared parts of plots: colours, fonts, axes, legends, and SVG and PNG output.
//!
//! `plotters` draws an SVG document and, through `tiny-skia`, a bitmap at the same time.
//!
//! [`Plot::draw`] provides a [`Canvas`]. [`heading`] and [`chart()`] draw a title, a legend and axes
//! on it. The values of a chart are elements of plotters, or a [`series`] of marked values.

mod axis;
mod backend;
mod canvas;
mod chart;
mod theme;
mod units;

pub use axis::{Axis, doubling};
pub use canvas::{Canvas, Plot};
pub use chart::{Chart, chart, heading, point_labels, series};
pub use theme::{Marker, SeriesStyle, palette, stroke};
pub use units::px;
