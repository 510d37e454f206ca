"""Reads what `ferry train --trace` wrote: how busy a lane was, where it waited, and a picture of one step."""

import json
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

LANES = ("compute", "h2d", "d2h", "team", "check", "nvme read", "nvme write")
# Distinguishable with any colour vision (Okabe and Ito), as in `ferry plan --svg`.
COLOURS = {"forward": "#0072b2", "backward": "#e69f00", "head and loss": "#009e73", "update": "#d55e00",
           "update (bet)": "#cc79a7", "round and norm": "#cc79a7", "read": "#0072b2", "write": "#d55e00",
           "verify": "#009e73", "seal": "#cc79a7"}
OTHER = "#56b4e9"


class Slice(NamedTuple):
    lane: str
    name: str
    begin: float  # seconds
    end: float
    step: int


class Wait(NamedTuple):
    seconds: float
    after: str  # what had just ended
    before: str  # what then began
    meanwhile: str  # the lane that was busiest, "nothing" if none was


def covered(slices, begin, end):
    """Seconds of the window in which at least one of the slices ran."""
    total, reached = 0.0, begin
    for one in sorted(slices, key=lambda one: one.begin):
        total += max(0.0, min(one.end, end) - max(one.begin, reached))
        reached = max(reached, min(one.end, end))
    return total


class Trace:
    """The measured slices of a run's steps from `first` on, and the window that they fill."""

    def __init__(self, file, first):
        events = json.loads(Path(file).read_text(encoding="utf-8"))["traceEvents"]
        groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.slices = [Slice(rows[e["pid"], e["tid"]], e["name"], e["ts"] * 1e-6, (e["ts"] + e["dur"]) * 1e-6,
                             e["args"].get("step", -1))
                       for e in events if e["ph"] == "X" and groups[e["pid"]] == "measured"]
        begins = self.step_begins()
        steps = [step for step in sorted(begins) if step >= first]
        # A step begins with its first kernel; the last one's end would be the drain's.
        self.begin, self.end = begins[steps[0]], begins[steps[-1]]
        self.steps = len(steps) - 1

    def step_begins(self):
        begins = {}
        for one in self.slices:
            if one.lane == "compute" and one.step > 0:
                begins[one.step] = min(one.begin, begins.get(one.step, one.begin))
        return begins

    def of(self, lane):
        return [one for one in self.slices if one.lane == lane and one.end > self.begin and one.begin < self.end]

    def busy(self, lane):
        """The share of the window in which the lane worked."""
        return covered(self.of(lane), self.begin, self.end) / (self.end - self.begin)

    def waits(self, lane, most=3):
        """The longest times that the lane stood still, from a microsecond on: the next things to remove."""
        slices, found = sorted(self.of(lane), key=lambda one: one.begin), []
        reached, last = self.begin, "the step before"
        for one in slices:
            if one.begin > reached + 1e-6:
                found.append((one.begin - reached, reached, last, one.name))
            if one.end > reached:
                reached, last = one.end, one.name
        if self.end > reached:
            found.append((self.end - reached, reached, last, "the next step"))
        longest = sorted(found, reverse=True)[:most]
        return [Wait(seconds, after, before, self._busiest(lane, at, at + seconds))
                for seconds, at, after, before in longest]

    def _busiest(self, waiting, begin, end):
        busy = {lane: covered(self.of(lane), begin, end) for lane in LANES if lane != waiting}
        lane = max(busy, key=busy.get)
        return f"{lane} {100 * busy[lane] / (end - begin):.0f} %" if busy[lane] > 0 else "nothing"

    def picture(self, title):
        """One steady step, the last whole one, lane by lane: an SVG's text."""
        begins = sorted(begin for begin in self.step_begins().values() if begin <= self.end)
        begin, end = begins[-2], begins[-1]
        left, top, row, width = 90, 40, 34, 1000
        height = top + row * len(LANES)
        lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 70} {height + 30}" '
                 'font-family="sans-serif" font-size="13">',
                 f'<rect width="100%" height="100%" fill="white"/><text x="{left}" y="22">{escape(title)}: '
                 f'{end - begin:.4g} s</text>']
        for number, lane in enumerate(LANES):
            y = top + row * number
            slices = [one for one in self.of(lane) if one.end > begin and one.begin < end]
            busy = 100 * covered(slices, begin, end) / (end - begin)
            lines.append(f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{lane}</text>'
                         f'<text x="{left + width + 8}" y="{y + 17}">{busy:.0f} %</text>')
            for one in merged(slices, (end - begin) / width):
                x = left + width * (max(one.begin, begin) - begin) / (end - begin)
                wide = max(0.3, width * (min(one.end, end) - max(one.begin, begin)) / (end - begin))
                lines.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="24" '
                             f'fill="{COLOURS.get(one.name, OTHER)}"><title>{escape(one.name)}</title></rect>')
        return "\n".join([*lines, "</svg>\n"])


def merged(slices, gap):
    """Neighbours of one name, less than `gap` apart, as one: thousands of rectangles would show no more."""
    few = []
    for one in sorted(slices, key=lambda one: one.begin):
        if few and few[-1].name == one.name and one.begin - few[-1].end <= gap:
            few[-1] = few[-1]._replace(end=max(few[-1].end, one.end))
        else:
            few.append(one)
    return few
