"""Colour and line style of each policy, the same in all plots."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakKeyDictionary

from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

COLORS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's palette: distinguishable with any kind of colour vision."""
_BLACK, _BLUE, _ORANGE, _GREEN, _PINK, _SKY, _RED = COLORS
_GRAY, _BROWN, _PURPLE, _WINE = "#888888", "#8C564B", "#6A3D9A", "#882255"

PAPER_END = ", paper"
"""Suffix of the policy name in rows with a paper's own numbers."""
_CAP = "static-cap-"


class Look(NamedTuple):
    color: str
    line: str
    marker: str = "o"
    is_hollow: bool = False


_FIXED: Mapping[str, Look] = MappingProxyType(
    {
        "foresight": Look(_BLACK, "-"),
        "foresight, told lengths": Look(_BLACK, ":"),
        "upper bound": Look(_GRAY, "--"),
        "clairvoyant search": Look(_GRAY, ":"),
        "free preemption": Look(_GRAY, "-", is_hollow=True),
        "free preemption, known lengths": Look(_GRAY, "-."),
        "cato": Look(_BLUE, "-"),
        "cato, line 24 as printed": Look(_BLUE, "--"),
        "cato, late work last": Look(_BLUE, ":"),
        "cato-batched": Look(_BLUE, "-."),
        "ray-serve": Look(_ORANGE, "-"),
        "round-robin": Look(_GREEN, "-"),
        "least-wait": Look(_GREEN, "--"),
        "power-of-two": Look(_PINK, "-"),
        "edf-bounded": Look(_RED, "-"),
        "sjf-bounded": Look(_RED, "--"),
        "edf": Look(_RED, ":"),
        "sjf": Look(_RED, "-."),
        "plas": Look(_SKY, "-"),
        "plas-waiting": Look(_SKY, "--"),
        "fcfs": Look(_GRAY, "-"),
        "saber": Look(_BROWN, "-"),
        "saber, refreshed speeds": Look(_BROWN, "--"),
        "annealing": Look(_PURPLE, "-"),
        "slo-sa": Look(_PURPLE, "--"),
        "moore-smith": Look(_PURPLE, ":"),
        "tempo": Look(_WINE, "-"),
        "jitserve": Look(_WINE, "--"),
        # Router and scaling.
        "foresight + forecast": Look(_BLACK, "-"),
        "cato + cato": Look(_BLUE, "-"),
        "cato + cato, line 24 as printed": Look(_BLUE, ":"),
        "cato + cato, read literally": Look(_BLUE, "--"),
        "ray-serve + queue-length": Look(_ORANGE, "-"),
        "ray-serve + queue-length, up at once": Look(_ORANGE, "--"),
        "round-robin + queue-length": Look(_GREEN, "-"),
        "power-of-two + queue-length": Look(_PINK, "-"),
        # Eviction.
        "lru": Look(_ORANGE, "-"),
        "lfu": Look(_GREEN, "-"),
        "cace": Look(_BLUE, "-"),
        "belady": Look(_GRAY, "--"),
    }
)
_ALL_COLORS = (*COLORS[1:], _BROWN, _PURPLE, _WINE)
_OTHERS = tuple(
    look
    for marker, line, color in product("os^", ("-", "--", ":", "-."), _ALL_COLORS)
    if (look := Look(color, line, marker)) not in _FIXED.values()
)
_given: WeakKeyDictionary[Figure, dict[str, Look]] = WeakKeyDictionary()


def look_of(figure: Figure, policy: str) -> Look:
    """The policy's look, unique within the figure.

    A paper's own numbers are hollow diamonds in the colour of their method.
    """
    if policy.endswith(PAPER_END):
        own = look_of(figure, policy.removesuffix(PAPER_END))
        return Look(own.color, ":", "D", is_hollow=True)
    if policy in _FIXED:
        return _FIXED[policy]
    if policy.startswith(_CAP) and policy.removeprefix(_CAP).isdigit():
        share = min(100, int(policy.removeprefix(_CAP))) / 100
        return Look(to_hex(colormaps["YlGn"](0.3 + 0.6 * share)), "-")
    given = _given.setdefault(figure, {})
    if policy not in given:
        given[policy] = _OTHERS[len(given) % len(_OTHERS)]
    return given[policy]
