//! What our charts share: colours, letters, axes, legends, and the way to SVG and PNG.
//!
//! `plotters` draws. [`Plot::draw`] gives a [`Canvas`] to draw on, [`heading`] and [`chart`] put a title, a legend and axes on
//! it, and a chart's values are plotters' own elements, or [`series`] of marked ones.

mod axis;
mod chart;
mod look;
mod plot;

pub use axis::Axis;
pub use chart::{Chart, chart, heading, series};
pub use look::{Marker, SeriesStyle, palette, stroke};
pub use plot::{Canvas, Plot, px};
