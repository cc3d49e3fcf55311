"""Draws tables of docs/ablations.md as SVG, in the looks of deepspec-eval's charts.

A module of scripts/ablations.py; `scripts/ablations.py plots` draws them.
"""

import html
import math
import re

WIDTH, MARGIN, RIGHT = 720, 16, 704
# Colours that are told apart in colour-blind vision (Okabe & Ito 2008).
BLUE, VERMILION = "#0072B2", "#D55E00"
INK, GREY, PALE, FAINT = "#222222", "#666666", "#999999", "#E4E4E4"
FONTS = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
# Heights of a title's letters and of all others.
LARGE, SMALL = 13, 11


class NoTable(Exception):
    """The page has no such table, or another one than is drawn."""


def table(page, heading, columns):
    """The rows of the table below a heading."""
    section = re.search(rf"(?ms)^## {re.escape(heading)}$(.*?)(?=^## |\Z)", page)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"(?m)^\|.*\|$", section[1] if section else "")]
    if len(rows) < 3 or rows[0] != columns or any(len(row) != len(columns) for row in rows):
        raise NoTable(f"no table `{heading}` with the columns {', '.join(columns)}")
    return rows[2:]


def number(cell):
    try:
        return float(cell)
    except ValueError:
        raise NoTable(f"`{cell}` is no number") from None


def with_error(cell):
    """A difference and the half width of its interval."""
    found = re.fullmatch(r"([+-]\d+\.\d+) ± (\d+\.\d+)", cell)
    if not found:
        raise NoTable(f"`{cell}` is no difference with its interval")
    return float(found[1]), float(found[2])


def scale(values, pixels):
    """Where a value of a range stands between two edges."""
    (low, high), (start, end) = values, pixels
    return lambda value: start + (value - low) / (high - low) * (end - start)


class Drawing:
    """Shapes on a white ground; lengths are pixels."""

    def __init__(self, title, height, keys):
        self.title, self.height = title, height
        self.shapes = [f'<rect width="{WIDTH}" height="{height}" fill="#FFFFFF"/>']
        self.text(MARGIN, MARGIN + 5, title, size=LARGE)
        x = MARGIN + 5
        for words, color in keys:
            self.disc(x, 45, color)
            self.text(x + 9, 45, words)
            x += 30 + 6.2 * len(words)

    def add(self, tag, content=None, **attributes):
        shown = (f"{value:.1f}" if isinstance(value, float) else str(value) for value in attributes.values())
        told = " ".join(f'{name.replace("_", "-")}="{html.escape(value)}"' for name, value in zip(attributes, shown))
        self.shapes.append(f"<{tag} {told}/>" if content is None else f"<{tag} {told}>{html.escape(content)}</{tag}>")

    def text(self, x, y, words, anchor="start", color=INK, size=SMALL, **more):
        """Words whose middle is at this height."""
        self.add("text", words, x=x, y=y, dy="0.36em", text_anchor=anchor, font_family=FONTS, font_size=size, fill=color, **more)

    def value(self, x, y, words, color):
        """A number in the plot, free of the grid behind it."""
        self.add("rect", x=x - 14, y=y - 5.5, width=28, height=11, fill="#FFFFFF")
        self.text(x, y, words, "middle", color)

    def line(self, x1, y1, x2, y2, color, width=1):
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=color, stroke_width=width)

    def disc(self, x, y, color):
        self.add("circle", cx=x, cy=y, r=4, fill=color)

    def svg(self):
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}" role="img">'
        return "\n".join([f"{head}<title>{html.escape(self.title)}</title>", *self.shapes, "</svg>\n"])


def lengths(page):
    """Accepted length by steps of training, and how far the two drafters are apart."""
    rows = table(page, "DSpark and DFlash as training lengthens", ["steps", "DSpark τ", "DFlash τ", "difference", "in proportion"])
    top, bottom, left = 66, 328, 62
    steps = [number(row[0]) for row in rows]
    taus = {"DSpark": ([number(row[1]) for row in rows], BLUE, -12), "DFlash": ([number(row[2]) for row in rows], VERMILION, 13)}
    keys = [(name, color) for name, (_, color, _) in taus.items()]
    drawing = Drawing("Accepted length of DSpark and DFlash, by steps of training", 380, keys)

    # A token comes of every pass, whatever is drafted. Half a tick is free above the largest.
    most = math.ceil(2 * max(taus["DSpark"][0] + taus["DFlash"][0]) + 0.5) / 2
    height = scale((1, most), (bottom, top))
    across = scale((math.log2(steps[0]) - 0.25, math.log2(steps[-1]) + 0.75), (left, RIGHT))
    for tick in range(2, round(2 * most) + 1):
        drawing.line(left, height(tick / 2), RIGHT, height(tick / 2), FAINT)
        drawing.text(left - 6, height(tick / 2), f"{tick / 2:.1f}", "end", GREY)
    drawing.line(left, top, left, bottom, GREY)
    drawing.line(left, bottom, RIGHT, bottom, GREY)
    places = [across(math.log2(count)) for count in steps]
    for x, row in zip(places, rows):
        drawing.line(x, bottom, x, bottom + 3, GREY)
        drawing.text(x, bottom + 12, row[0], "middle", GREY)
    drawing.text((left + RIGHT) / 2, bottom + 32, "steps, each length a run of its own", "middle")
    middle = (top + bottom) / 2
    drawing.text(MARGIN + 5, middle, "accepted length τ", "middle", transform=f"rotate(-90 {MARGIN + 5} {middle:.0f})")

    for x, row, first, second in zip(places, rows, taus["DSpark"][0], taus["DFlash"][0]):
        drawing.line(x, height(first), x, height(second), PALE)
        drawing.text(x + 6, (height(first) + height(second)) / 2, row[3], color=GREY)
    for values, color, beside in taus.values():
        points = [(x, height(value)) for x, value in zip(places, values)]
        drawing.add("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), fill="none", stroke=color, stroke_width=1.8)
        for (x, y), value in zip(points, values):
            drawing.disc(x, y, color)
            drawing.value(x, y + beside, f"{value:.2f}", color)
    return drawing.svg()


def variants(page):
    """What one change of the recipe does to the accepted length."""
    base, *rows = table(page, "One change at a time", ["variant", "τ", "difference"])
    changes = [with_error(row[2]) for row in rows]
    top, left, right, step = 66, 134, 586, 26
    bottom = top + step * len(rows)
    keys = [("the interval is on one side of 0", BLUE), ("it holds 0", PALE)]
    drawing = Drawing("What one change of DSpark's recipe does to the accepted length", bottom + 52, keys)

    # Ticks are a tenth apart; the outermost ones are beyond 0 and every whisker.
    low = math.floor(10 * min(0, *(mean - error for mean, error in changes)))
    high = math.ceil(10 * max(0, *(mean + error for mean, error in changes)))
    across = scale((low / 10, high / 10), (left, right))
    for tick in range(low, high + 1):
        drawing.line(across(tick / 10), top, across(tick / 10), bottom, FAINT)
        drawing.text(across(tick / 10), bottom + 12, f"{tick / 10:+.1f}" if tick else "0", "middle", GREY)
    for line, (row, (mean, error)) in enumerate(zip(rows, changes)):
        y = top + step * (line + 0.5)
        start, end = sorted((across(0), across(mean)))
        drawing.text(left - 8, y, row[0], "end")
        drawing.add("rect", x=start, y=y - 7, width=end - start, height=14, fill=BLUE if abs(mean) > error else PALE)
        for at in (across(mean - error), across(mean + error)):
            drawing.line(at, y - 4, at, y + 4, INK)
        drawing.line(across(mean - error), y, across(mean + error), y, INK)
        drawing.text(RIGHT, y, row[2], "end")
    drawing.line(across(0), top, across(0), bottom, GREY)
    drawing.text((left + right) / 2, bottom + 32, f"difference in τ from {base[1]}, that of the {base[0]}", "middle")
    return drawing.svg()


def drawings(page):
    """The plots of the page, by their files' names."""
    return {"ablations-lengths.svg": lengths(page), "ablations-variants.svg": variants(page)}


if __name__ == "__main__":
    print(__doc__)
