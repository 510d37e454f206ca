"""Reads what `ferry train --trace` wrote: how busy a lane was, where it waited, and which step a picture shows."""

import json
from pathlib import Path
from typing import NamedTuple

LANES = ("compute", "h2d", "d2h", "team", "check", "comm", "nvme read", "nvme write")


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


def step_begins(slices):
    """When each step's first kernel began."""
    begins = {}
    for one in slices:
        if one.lane == "compute" and one.step > 0:
            begins[one.step] = min(one.begin, begins.get(one.step, one.begin))
    return begins


class Trace:
    """The measured slices of a run's steps from `first` on, and the window that they fill; beside them the planned
    ones, where the run had a bound measured."""

    def __init__(self, file, first):
        events = json.loads(Path(file).read_text(encoding="utf-8"))["traceEvents"]
        # Seconds of the host's clock at which the trace begins.
        self.origin = next((e["args"]["origin_ns"] * 1e-9 for e in events if e["name"] == "clock"), 0.0)
        groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}

        def slices_of(group):
            return [Slice(rows[e["pid"], e["tid"]], e["name"], e["ts"] * 1e-6, (e["ts"] + e["dur"]) * 1e-6,
                          e["args"].get("step", -1))
                    for e in events if e["ph"] == "X" and groups[e["pid"]] == group]
        self.slices, self.planned = slices_of("measured"), slices_of("planned")
        begins = step_begins(self.slices)
        steps = [step for step in sorted(begins) if step >= first]
        # A step begins with its first kernel; the last one's end would be the drain's.
        self.begin, self.end = begins[steps[0]], begins[steps[-1]]
        self.steps = len(steps) - 1

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

    def last_step(self):
        """The last whole step: its begin and end, what was measured in it, and what was planned: each step's plan is
        laid so that its first kernel begins when the measured one did."""
        begins, planned = step_begins(self.slices), step_begins(self.planned)
        begin, end = sorted(at for at in begins.values() if at <= self.end)[-2:]

        def within(slices):
            return [one for one in slices if one.end > begin and one.begin < end]
        late = {step: begins[step] - at for step, at in planned.items() if step in begins}
        return begin, end, within(self.slices), within(
            [one._replace(begin=one.begin + late[one.step], end=one.end + late[one.step])
             for one in self.planned if one.step in late])
