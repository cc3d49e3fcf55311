"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#3366cc", "#dc6b19", "#109618", "#990099", "#0099aa", "#b8860b", "#aa2222", "#777777"];

// Numbers of an axis: round ones between `low` and `high`, powers of two on a logarithmic axis.
function ticks(low, high, isLog) {
  if (isLog) {
    const found = [];
    for (let at = 2 ** Math.ceil(Math.log2(low)); at <= high * 1.0001; at *= 2) found.push(at);
    const every = Math.ceil(found.length / 8);
    return found.filter((_, index) => index % every === 0);
  }
  const step = 10 ** Math.floor(Math.log10((high - low) / 4 || 1));
  const wide = [1, 2, 5, 10].map((factor) => factor * step).find((each) => (high - low) / each <= 6) || step;
  const found = [];
  for (let at = Math.ceil(low / wide) * wide; at <= high + wide * 1e-6; at += wide) found.push(Number(at.toPrecision(12)));
  return found;
}

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

function escaped(text) {
  return String(text).replace(/[&<>"]/g, (mark) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[mark]);
}

// Draws lines into `element`. Series are {name, points: [[x, y], …], dots}; options are {x, y, title, logX, fromZero, markX}.
function lineChart(element, series, options) {
  const [width, height, left, right, top, bottom] = [560, 320, 62, 14, 34, 44];
  const drawable = ([x, y]) => Number.isFinite(x) && Number.isFinite(y);
  const shown = series.map((each) => ({ ...each, points: each.points.filter(drawable) })).filter((each) => each.points.length > 0);
  const points = shown.flatMap((each) => each.points);
  if (points.length === 0) {
    element.innerHTML = `<p>${escaped(options.title)}: no values.</p>`;
    return;
  }
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  let [lowX, highX] = [Math.min(...xs), Math.max(...xs)];
  let [lowY, highY] = [options.fromZero ? 0 : Math.min(...ys), Math.max(...ys)];
  if (highX === lowX) [lowX, highX] = options.logX ? [lowX / 2, highX * 2] : [lowX - 1, highX + 1];
  if (highY === lowY) [lowY, highY] = [Math.min(lowY, 0), highY + (Math.abs(highY) || 1) * 0.1];
  const alongX = options.logX ? Math.log2 : (x) => x;
  const toX = (x) => left + ((alongX(x) - alongX(lowX)) / (alongX(highX) - alongX(lowX))) * (width - left - right);
  const toY = (y) => height - bottom - ((y - lowY) / (highY - lowY)) * (height - top - bottom);
  let drawn = "";
  for (const tick of ticks(lowY, highY, false)) {
    drawn += `<line class="grid" x1="${left}" x2="${width - right}" y1="${toY(tick)}" y2="${toY(tick)}"/>`;
    drawn += `<text x="${left - 6}" y="${toY(tick) + 4}" text-anchor="end">${short(tick)}</text>`;
  }
  for (const tick of ticks(lowX, highX, options.logX)) {
    drawn += `<text x="${toX(tick)}" y="${height - bottom + 18}" text-anchor="middle">${short(tick)}</text>`;
  }
  if (options.markX !== undefined) {
    const x = toX(Math.min(Math.max(options.markX, lowX), highX));
    drawn += `<line class="grid" stroke-dasharray="4" x1="${x}" x2="${x}" y1="${top}" y2="${height - bottom}"/>`;
  }
  shown.forEach((each, index) => {
    const colour = COLOURS[index % COLOURS.length];
    if (each.points.length > 1 && !each.dots) {
      const path = each.points.map(([x, y]) => `${toX(x).toFixed(1)},${toY(y).toFixed(1)}`).join(" ");
      drawn += `<polyline fill="none" stroke="${colour}" stroke-width="2" points="${path}"/>`;
    }
    if (each.dots || each.points.length === 1) {
      for (const [x, y] of each.points) drawn += `<circle cx="${toX(x)}" cy="${toY(y)}" r="3.5" fill="${colour}"/>`;
    }
  });
  let at = left;
  shown.forEach((each, index) => {
    drawn += `<rect x="${at}" y="${top - 18}" width="10" height="10" fill="${COLOURS[index % COLOURS.length]}"/>`;
    drawn += `<text x="${at + 14}" y="${top - 9}">${escaped(each.name)}</text>`;
    at += 26 + 6.6 * each.name.length;
  });
  drawn += `<text class="soft" x="${(left + width - right) / 2}" y="${height - 8}" text-anchor="middle">${escaped(options.x)}</text>`;
  drawn += `<text class="soft" x="14" y="${(top + height - bottom) / 2}" text-anchor="middle" transform="rotate(-90 14 ${(top + height - bottom) / 2})">${escaped(options.y)}</text>`;
  element.innerHTML = `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${escaped(options.title)}">${drawn}</svg><figcaption>${escaped(options.title)}</figcaption>`;
}
