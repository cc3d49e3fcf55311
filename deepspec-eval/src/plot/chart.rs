//! Titles, legends, axes and series of charts.

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::backend::DualBackend;
use super::palette::{FAINT, GREY, INK};
use super::theme::{LARGE_FONT_PIXELS, SMALL_FONT_PIXELS, text_style};
use super::{Axis, Canvas, SeriesStyle, px, stroke};

/// Axes with the series drawn between them.
pub type Chart<'a> = ChartContext<'a, DualBackend<'a>, Cartesian2d<Axis, Axis>>;

/// Draws a title with a legend below it, and returns the area below them.
///
/// # Errors
/// Fails if drawing fails.
pub fn draw_title_and_legend<'a>(
    area: &Canvas<'a>,
    title: &str,
    keys: &[(&str, SeriesStyle)],
) -> Result<Canvas<'a>> {
    area.draw_text(title, &text_style(LARGE_FONT_PIXELS, INK), (0, 0))?;
    let style = text_style(SMALL_FONT_PIXELS, INK);
    let (mut x, y) = (0, px(29.0));
    for (text, look) in keys {
        look.draw_marker(area, (x + px(5.0), y), 4.0)?;
        let beside = style.pos(Pos::new(HPos::Left, VPos::Center));
        area.draw_text(text, &beside, (x + px(14.0), y))?;
        x += px(32.0) + style.font.box_size(text)?.0 as i32;
    }
    let height = if keys.is_empty() { 24.0 } else { 48.0 };
    Ok(area.split_vertically(px(height)).1)
}

/// Draws axes with a grid; tick labels and axis labels also fit into `area`.
///
/// # Errors
/// Fails if drawing fails.
pub fn draw_axes<'a>(area: &Canvas<'a>, x: Axis, y: Axis) -> Result<Chart<'a>> {
    const TICK: f64 = 3.0;
    let of_label = |axis: &Axis, room: f64| if axis.label.is_empty() { 0 } else { px(room) };
    let left = px(f64::from(y.max_label_width()?) + 2.0 * TICK + 2.0) + of_label(&y, 20.0);
    let below = px(20.0) + of_label(&x, 15.0);
    let labels = (x.label, y.label);
    let mut chart =
        ChartBuilder::on(area).y_label_area_size(left).x_label_area_size(below).build_cartesian_2d(x, y)?;
    let mut mesh = chart.configure_mesh();
    mesh.bold_line_style(stroke(FAINT, 1.0)).axis_style(stroke(GREY, 1.0)).set_all_tick_mark_size(px(TICK));
    mesh.label_style(text_style(SMALL_FONT_PIXELS, GREY)).axis_desc_style(text_style(SMALL_FONT_PIXELS, INK));
    if !labels.0.is_empty() {
        mesh.x_desc(labels.0);
    }
    if !labels.1.is_empty() {
        mesh.y_desc(labels.1);
    }
    mesh.draw()?;
    Ok(chart)
}

/// Draws a text above and to the right of each value.
///
/// # Errors
/// Fails if drawing fails.
pub fn draw_point_labels(
    chart: &mut Chart,
    values: impl IntoIterator<Item = (f64, f64, String)>,
) -> Result<()> {
    let style = text_style(SMALL_FONT_PIXELS, GREY).pos(Pos::new(HPos::Left, VPos::Bottom));
    let finite = values.into_iter().filter(|(x, y, _)| x.is_finite() && y.is_finite());
    let texts = finite
        .map(|(x, y, text)| EmptyElement::at((x, y)) + Text::new(text, (px(4.0), px(-3.0)), style.clone()));
    chart.draw_series(texts)?;
    Ok(())
}

/// Draws values as a line with markers. Non-finite values are left out.
///
/// # Errors
/// Fails if drawing fails.
pub fn draw_series(
    chart: &mut Chart,
    values: impl IntoIterator<Item = (f64, f64)>,
    look: SeriesStyle,
) -> Result<()> {
    let values: Vec<_> = values.into_iter().filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
    chart.draw_series(LineSeries::new(values.iter().copied(), stroke(look.0, 1.8)))?;
    values.into_iter().try_for_each(|value| look.draw_marker(chart.plotting_area(), value, 3.5))
}
