"""Where the labels of a log-log figure go: each at the first of its spots that covers no earlier label, marker or line.

Geometry only, in pixels, without matplotlib: a figure is drawn once, so widths of texts are estimated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["LABEL_POINTS", "Box", "Frame", "Label", "Spot", "place_labels"]

LABEL_POINTS = 8.5
"""Size of a label's letters [point]."""

Box = tuple[float, float, float, float]
"""Left, bottom, right, top [pixels]."""

Spot = tuple[float, float]
"""Centre of a label [pixels]."""

COVERS_TEXT, COVERS_LINE = 10, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Axes at a fixed place of a figure, both logarithmic.

    Attributes
    ----------
    left, bottom, right, top : float
        The axes [pixels].
    x_limits, y_limits : tuple of float
        In data.
    pixels_per_point : float
    """

    left: float
    bottom: float
    right: float
    top: float
    x_limits: tuple[float, float]
    y_limits: tuple[float, float]
    pixels_per_point: float

    def to_pixels(self, x: float, y: float) -> Spot:
        """Position of a point."""
        return (
            self.left + (self.right - self.left) * _log_share(x, self.x_limits),
            self.bottom + (self.top - self.bottom) * _log_share(y, self.y_limits),
        )

    def x_at(self, share: float, start: float | None = None, end: float | None = None) -> float:
        """The x at a share of the way from `start` to `end` (the limits by default)."""
        low, high = start or self.x_limits[0], end or self.x_limits[1]
        return float(low * (high / low) ** share)

    @property
    def slope_deg(self) -> float:
        """Angle at which y = c * x is drawn [degree]."""
        x0, y0 = self.to_pixels(self.x_limits[0], self.y_limits[0])
        x1, y1 = self.to_pixels(self.x_limits[0] * 10, self.y_limits[0] * 10)
        return math.degrees(math.atan2(y1 - y0, x1 - x0))

    def extent(self, text: str) -> tuple[float, float]:
        """Width and height of a label before it is turned [pixels]."""
        return _text_width(text) * self.pixels_per_point, LABEL_POINTS * 1.25 * self.pixels_per_point


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A text, and where it may go, best spot first; `angle` in degrees."""

    text: str
    colour: str
    angle: float
    spots: tuple[Spot, ...]

    @staticmethod
    def along_slope(frame: Frame, text: str, colour: str, *, slope: float, end: float, above: bool) -> Label:
        """On y = slope * x up to x = end, on the given side if possible."""
        width, height = frame.extent(text)
        start = max(frame.x_limits[0], frame.y_limits[0] / slope)
        turn, gap = math.radians(frame.slope_deg), 2.5 * frame.pixels_per_point + height / 2
        spots = []
        for across in (gap, -gap) if above else (-gap, gap):
            for step in range(1, 26):
                x = frame.x_at(step * 0.03, start, end)
                px, py = frame.to_pixels(x, slope * x)
                along_x, along_y = math.cos(turn) * width / 2, math.sin(turn) * width / 2
                spots.append((px + along_x - math.sin(turn) * across, py + along_y + math.cos(turn) * across))
        return Label(text=text, colour=colour, angle=frame.slope_deg, spots=tuple(spots))

    @staticmethod
    def along_flat(frame: Frame, text: str, colour: str, *, y: float) -> Label:
        """On a horizontal line, at its right end if possible."""
        width, height = frame.extent(text)
        gap = 2.0 * frame.pixels_per_point + height / 2
        spots = []
        for step in range(20):
            px, py = frame.to_pixels(frame.x_at(0.995 - step * 0.045), y)
            spots += [(px - width / 2, py + gap), (px - width / 2, py - gap)]
        return Label(text=text, colour=colour, angle=0.0, spots=tuple(spots))

    @staticmethod
    def along_vertical(frame: Frame, text: str, colour: str, *, x: float) -> Label:
        """On a vertical line, at its foot if possible."""
        width, height = frame.extent(text)
        gap = 2.0 * frame.pixels_per_point + height / 2
        spots = []
        for step in range(12):
            up = frame.bottom + (frame.top - frame.bottom) * (0.015 + step * 0.075) + width / 2
            px = frame.to_pixels(x, frame.y_limits[0])[0]
            spots += [(px - gap, up), (px + gap, up)]
        return Label(text=text, colour=colour, angle=90.0, spots=tuple(spots))

    @staticmethod
    def at_point(frame: Frame, text: str, colour: str, *, x: float, y: float) -> Label:
        """Beside a marker: below left if possible."""
        width, height = frame.extent(text)
        gap = 6.5 * frame.pixels_per_point
        px, py = frame.to_pixels(x, y)
        spots = [
            (px + side * (gap + width / 2), py + up * (gap * 0.4 + height / 2)) for side in (-1, 1) for up in (-1, 1)
        ]
        spots += [(px, py + up * (gap * 1.3 + height / 2)) for up in (-1, 1)]
        return Label(text=text, colour=colour, angle=0.0, spots=tuple(spots))

    def boxes(self, frame: Frame, centre: Spot) -> list[Box]:
        """What the label covers at a spot: a chain of squares along it."""
        width, height = frame.extent(self.text)
        tilted = self.angle not in (0.0, 90.0)
        count = max(1, math.ceil(width / height * (1.5 if tilted else 1.0)))
        turn, half = math.radians(self.angle), height * (0.65 if tilted else 0.5)
        boxes = []
        for index in range(count):
            along = ((index + 0.5) / count - 0.5) * width
            x, y = centre[0] + math.cos(turn) * along, centre[1] + math.sin(turn) * along
            boxes.append((x - half, y - half, x + half, y + half))
        return boxes


def place_labels(
    frame: Frame, labels: Iterable[Label], *, markers: Sequence[Box], lines: Sequence[Box]
) -> Iterator[tuple[Label, Spot]]:
    """Give every label the first spot that covers nothing, else the one that covers least.

    Parameters
    ----------
    frame : Frame
    labels : iterable of Label
        Those that can move least go first.
    markers, lines : sequence of Box
        What labels should not cover; a line is better covered than a marker or a text.

    Yields
    ------
    tuple of Label and Spot
        In the order placed.
    """
    taken = list(markers)
    for label in sorted(labels, key=lambda each: len(each.spots)):
        best: tuple[int, Spot, list[Box]] | None = None
        for spot in label.spots:
            boxes = label.boxes(frame, spot)
            cost = COVERS_TEXT * (_overlaps(boxes, taken) + _outside(boxes, frame)) + COVERS_LINE * _overlaps(
                boxes, lines
            )
            if best is None or cost < best[0]:
                best = (cost, spot, boxes)
            if cost == 0:
                break
        if best is not None:
            taken.extend(best[2])
            yield label, best[1]


def _overlaps(boxes: Sequence[Box], others: Sequence[Box]) -> int:
    return sum(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3] for a in boxes for b in others)


def _outside(boxes: Sequence[Box], frame: Frame) -> int:
    return sum(
        x0 < frame.left or y0 < frame.bottom or x1 > frame.right + 2 or y1 > frame.top for x0, y0, x1, y1 in boxes
    )


def _log_share(value: float, limits: tuple[float, float]) -> float:
    return math.log(value / limits[0]) / math.log(limits[1] / limits[0])


def _text_width(text: str) -> float:
    """Width of a label [points], rounded up: letters of DejaVu Sans by kind, in em."""
    narrow = sum(letter in " .,:;il/|'" for letter in text)
    wide = sum(letter.isupper() or letter in "=m" for letter in text)
    return LABEL_POINTS * (0.37 * narrow + 0.8 * wide + 0.64 * (len(text) - narrow - wide))
