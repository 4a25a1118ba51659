"""The matrix of traffic, fleets and errors on which the default is compared with simple rules.

A scene is one cell: a value on every axis. Arrivals "bursts" stand for a production trace: a fifth
of each 10 s at three times the rate of the rest. Sessions are played by users in a closed loop, so
arrivals are not an axis for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from cato.lab.studies import agents
from cato.sim.report import Setting

SESSIONS, SABER, CLOSED_LOOP = "sessions", "saber-w3", "closed loop"


@dataclass(frozen=True, slots=True)
class Scene:
    """`load` 1 is the fleet's throughput in full batches; for sessions, the number of users that
    sticky routing serves in time. `slowness`: believed service times as a multiple of the true
    ones.
    """

    traffic: str
    load: float
    replicas: int
    speeds: str = "equal"
    arrivals: str = "poisson"
    beliefs: str = "class"
    slowness: float = 1.0
    sla: str = "x 1"
    places: int = 128
    delays: str = "none"


AXES: Mapping[str, tuple[str | float, ...]] = MappingProxyType(
    {
        "load": (0.3, 0.5, 0.7, 0.9, 1.1, 1.5, 3.0),
        "traffic": ("64/20", "200/20", "800/40", "2000/200", "8000/500", SESSIONS),
        "replicas": (1, 4, 16, 64),
        "speeds": ("equal", "1/2.5/6"),
        "arrivals": ("poisson", "gamma", "bursts"),
        "beliefs": ("class", "exact", "+-30 %", "x 0.5", "x 2", "none"),
        "slowness": (1.0, 0.7, 1.3, 2.0),
        "sla": ("x 1", "x 0.7", "x 3", "half without"),
        "places": (1, 16, 128),
        "delays": ("none", "live"),
    }
)
BASES = (
    Scene("200/20", 0.7, 4),
    Scene(SABER, 0.8, 6),
    Scene(SESSIONS, 0.73, 4, arrivals=CLOSED_LOOP),
)
MOST_SESSION_REPLICAS = 16
SPEEDS: Mapping[str, tuple[float, ...]] = {"equal": (1.0,), "1/2.5/6": (1.0, 2.5, 6.0)}
"""Slowdown of each kind of replica relative to the first kind."""

OPEN_ARMS = (
    "least-wait",
    "power-of-two",
    "round-robin",
    "ray-serve",
    "sjf-bounded",
    "edf-bounded",
    "sjf",
    "edf",
    "static-cap",
    "sticky",
    "prefix-score",
    "block-cost",
    "plas",
    "plas-waiting",
    "tempo",
    "moore-smith",
    "saber",
    "annealing",
    "cato",
    "cato-batched",
)
"""Baselines for calls without sessions; the other rules behave like one of these there. Fastest to
simulate first: ties go to the first."""
SLOW_ARMS, MOST_SLOW_REPLICAS = ("saber", "annealing", "cato", "cato-batched"), 4
"""Rules that scan everything for every call; with more replicas one run takes minutes."""
SESSION_ARMS = (*agents.SESSION_RULES, "edf-bounded")
"""Rules for sessions; the others ignore caches and serve less than one user per accelerator."""


def axis_scenes(has_sessions: bool) -> list[Scene]:
    """For each base, each value of each axis with the others as in the base."""
    found: dict[Scene, None] = {}
    for base in BASES:
        for axis, values in AXES.items():
            if axis == "traffic" and base is not BASES[0]:
                continue
            for value in values:
                found[_possible(base, **{axis: value})] = None
    return [s for s in found if has_sessions or s.traffic != SESSIONS]


def random_scenes(count: int, draw: int, has_sessions: bool) -> list[Scene]:
    """`count` different scenes, with each axis drawn independently."""
    rng = np.random.default_rng([draw, 5])
    found: dict[Scene, None] = {}
    while len(found) < count:
        values = {axis: of[int(rng.integers(len(of)))] for axis, of in AXES.items()}
        scene = _possible(BASES[0], **values)
        if has_sessions or scene.traffic != SESSIONS:
            found[scene] = None
    return list(found)


def _possible(base: Scene, **changed: Any) -> Scene:
    """`base` with changes, made consistent: one replica has one speed; sessions have few replicas
    and arrive in a closed loop."""
    scene = replace(base, **changed)
    if scene.replicas == 1:
        scene = replace(scene, speeds="equal")
    if scene.traffic == SESSIONS:
        replicas = min(scene.replicas, MOST_SESSION_REPLICAS)
        scene = replace(scene, replicas=replicas, arrivals=CLOSED_LOOP)
    return scene


def words(setting: Setting) -> str:
    """A short name of the cell, without default values."""
    usual = asdict(BASES[0])
    always = f"{setting['traffic']} at {setting['load']:g} on {setting['replicas']}"
    others = list(usual)[3:]
    return ", ".join([always, *(f"{k} {setting[k]}" for k in others if setting[k] != usual[k])])
