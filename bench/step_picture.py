"""Draws a step of a trace (step_trace.py) as an SVG: a row a lane, what was measured above what was planned."""

import math
from xml.sax.saxutils import escape

from step_trace import LANES, covered

# Distinguishable with any colour vision (Okabe and Ito), as in `ferry plan --svg`.
COLOURS = {"forward": "#0072b2", "read": "#0072b2", "gather weights": "#0072b2",
           "weight gradients": "#f0e442",
           "backward": "#e69f00", "exchange gradients": "#e69f00", "gather gradients": "#e69f00",
           "head and loss": "#009e73", "verify": "#009e73",
           "update": "#d55e00", "write": "#d55e00",
           "update (speculative)": "#cc79a7", "round and norm": "#cc79a7", "sum, round and norm": "#cc79a7", "seal": "#cc79a7"}
OTHER = "#56b4e9"
STYLE = """<style>
  .ground { fill: #ffffff } text { fill: #24292f; font: 12px sans-serif }
  .title { font-size: 16px; font-weight: bold } .faint { fill: #6a737d } .grid { stroke: #d8dee4 } .planned { opacity: 0.6 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #161b22 } text { fill: #e6edf3 } .faint { fill: #9aa4af } .grid { stroke: #30363d }
  }
</style>"""
LEFT, TOP, WIDTH, RIGHT = 90, 56, 1000, 150
ROW, BAR, PLANNED = 46, 22, 9  # heights
LETTER = 7  # about the width of one


def picture(trace, title):
    """The trace's last whole step: an SVG's text."""
    begin, end, measured, planned = trace.last_step()
    lanes = [lane for lane in LANES if any(one.lane == lane for one in [*measured, *planned])]
    return drawn(lanes, begin, end, measured, planned, title)


def drawn(lanes, begin, end, measured, planned, title):
    """These rows of a step, which slices name as their lanes."""
    bottom = TOP + ROW * len(lanes)
    lines = axis(end - begin, bottom)
    for number, lane in enumerate(lanes):
        y = TOP + ROW * number
        lines.append(f'<text x="{LEFT - 8}" y="{y + BAR - 6}" text-anchor="end">{lane}</text>')
        for slices, at, height, what in ((measured, y, BAR, "measured"), (planned, y + BAR + 2, PLANNED, "planned")):
            of_lane = [one for one in slices if one.lane == lane]
            if not slices:
                continue
            busy = 100 * covered(of_lane, begin, end) / (end - begin)
            lines.append(f'<text class="faint" x="{LEFT + WIDTH + 8}" y="{at + height / 2 + 4:.0f}">{busy:.0f} % {what}'
                         '</text>')
            lines += [f'<g class="{what}">', *bars(of_lane, begin, end, at, height), "</g>"]
    height, key = legend([*measured, *planned], bottom + 44)
    heading = f'<text class="title" x="{LEFT}" y="30">{escape(title)}: {seconds_text(end - begin)}</text>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" '
                      f'width="{LEFT + WIDTH + RIGHT}" height="{height}">', STYLE,
                      '<rect class="ground" width="100%" height="100%"/>', heading, *lines, *key, "</svg>\n"])


def bars(slices, begin, end, y, height):
    scale = WIDTH / (end - begin)
    for one in merged(slices, (end - begin) / WIDTH):
        x, until = (LEFT + scale * (min(max(at, begin), end) - begin) for at in (one.begin, one.end))
        yield (f'<rect x="{x:.1f}" y="{y}" width="{max(0.3, until - x):.1f}" height="{height}" fill="{colour(one.name)}">'
               f"<title>{escape(one.name)}: {seconds_text(one.begin - begin)} to {seconds_text(one.end - begin)}</title>"
               "</rect>")


def axis(seconds, bottom):
    """Vertical lines, at most five and one at 0, each with its time."""
    step, lines = tick_for(seconds), []
    for number in range(math.floor(seconds / step + 1e-9) + 1):
        x = LEFT + WIDTH * number * step / seconds
        lines += [f'<path class="grid" d="M{x:.1f} {TOP - 6}V{bottom}"/>',
                  f'<text class="faint" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{seconds_text(number * step)}'
                  '</text>']
    return lines


def tick_for(most):
    """1, 2 or 5 times a power of ten: at most five of them reach `most`."""
    power = 10.0 ** math.floor(math.log10(most / 5))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * 5 >= most * (1 - 1e-9))


def seconds_text(seconds):
    return f"{seconds:.4g} s" if abs(seconds) >= 1 or seconds == 0 else f"{seconds * 1e3:.4g} ms"


def legend(slices, y):
    """A square a colour with the names that have it, below each other where a line is full. Returns the height of
    the picture and the elements."""
    names = {}
    for name in sorted({one.name for one in slices}):
        names.setdefault(colour(name), []).append(name)
    x, lines = LEFT, []
    for fill in sorted(names, key=[*COLOURS.values(), OTHER].index):
        text = ", ".join(names[fill])
        if x > LEFT and x + LETTER * len(text) > LEFT + WIDTH:
            x, y = LEFT, y + 20
        lines += [f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{fill}"/>',
                  f'<text x="{x + 16}" y="{y}">{escape(text)}</text>']
        x += 40 + LETTER * len(text)
    return y + 20, lines


def colour(name):
    return COLOURS.get(name, OTHER)


def merged(slices, gap):
    """Neighbours of one name, less than `gap` apart, as one: thousands of rectangles would show no more."""
    few = []
    for one in sorted(slices, key=lambda one: one.begin):
        if few and few[-1].name == one.name and one.begin - few[-1].end <= gap:
            few[-1] = few[-1]._replace(end=max(few[-1].end, one.end))
        else:
            few.append(one)
    return few
