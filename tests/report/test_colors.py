"""Class colors of the map, as readers with each kind of color blindness see them."""

import re
from itertools import combinations
from math import atan2, cos, degrees, exp, hypot, radians, sin, sqrt

import numpy as np
import pytest

from nearkin.report.page.html import STYLE

LEAST = 15
"""What is promised: the CIEDE2000 difference of any two classes, and of a class from "unknown"."""
NUM_COLORS = 10
SEEN_BY = {
    "all cones": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
"""Machado, Oliveira and Fernandes (2009), severity 1: of linear sRGB."""
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)


def linear(color):
    values = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    t = XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(axis=1)
    x, y, z = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def ciede2000(one, two):
    """Sharma, Wu and Dalal (2005)."""
    (l1, a1, b1), (l2, a2, b2) = one, two
    c7 = ((hypot(a1, b1) + hypot(a2, b2)) / 2) ** 7
    stretch = 1 + 0.5 * (1 - sqrt(c7 / (c7 + 25**7)))
    c1, c2 = hypot(a1 * stretch, b1), hypot(a2 * stretch, b2)
    h1 = degrees(atan2(b1, a1 * stretch)) % 360
    h2 = degrees(atan2(b2, a2 * stretch)) % 360
    turn = (h2 - h1 + 180) % 360 - 180
    lightness, chroma, hue = (l1 + l2) / 2, (c1 + c2) / 2, h1 + turn / 2
    t = (
        1
        - 0.17 * cos(radians(hue - 30))
        + 0.24 * cos(radians(2 * hue))
        + 0.32 * cos(radians(3 * hue + 6))
        - 0.20 * cos(radians(4 * hue - 63))
    )
    middle = (lightness - 50) ** 2
    dl = (l2 - l1) / (1 + 0.015 * middle / sqrt(20 + middle))
    dc = (c2 - c1) / (1 + 0.045 * chroma)
    dh = 2 * sqrt(c1 * c2) * sin(radians(turn / 2)) / (1 + 0.015 * chroma * t)
    spread = 30 * exp(-(((hue % 360 - 275) / 25) ** 2))
    rotation = -2 * sqrt(chroma**7 / (chroma**7 + 25**7)) * sin(radians(2 * spread))
    return sqrt(dl**2 + dc**2 + dh**2 + rotation * dc * dh)


def test_the_difference_is_that_of_the_paper():
    """Pairs 1, 17 and 25 of its table 1."""
    for one, two, expected in (
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ):
        assert ciede2000(one, two) == pytest.approx(expected, abs=1e-4)
        assert ciede2000(two, one) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_any_two_classes_can_be_told_apart_by_color_alone(theme):
    by_day, by_night = STYLE.split("@media (prefers-color-scheme: dark)")
    style = by_day if theme == "light" else by_night
    found = dict(re.findall(r"--(class\d|quiet): (#[0-9a-f]{6})", style))
    assert len(found) == NUM_COLORS + 1
    for who, matrix in SEEN_BY.items():
        seen = {name: lab(np.array(matrix) @ linear(color)) for name, color in found.items()}
        for one, two in combinations(seen, 2):
            assert ciede2000(seen[one], seen[two]) > LEAST, (who, one, two)
