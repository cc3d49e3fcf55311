//! Shared parts of plots: colours, fonts, axes, legends, and SVG and PNG output.
//!
//! `plotters` draws an SVG document and, through `tiny-skia`, a bitmap at the same time.
//!
//! [`Plot::draw`] provides a [`Canvas`]. [`draw_title_and_legend`] and [`draw_axes`] draw a title,
//! a legend and axes on it. The values of a chart are elements of plotters, or marked values that
//! [`draw_series`] draws.

mod axis;
mod backend;
mod canvas;
mod chart;
mod theme;
mod units;

pub use axis::{Axis, log2_coordinate};
pub use canvas::{Canvas, Plot};
pub use chart::{Chart, draw_axes, draw_point_labels, draw_series, draw_title_and_legend};
pub use theme::{Marker, SeriesStyle, palette, stroke};
pub use units::px;
