"""1,000 bursts of keystrokes from 50 editors: what superseding spares, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fleet_kit import POOL, SCHEDULERS, a_fleet

from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.events import Event
from cato.core.ids import TaskName
from cato.core.orchestrator import PoolOrchestrator
from cato.core.slo import SloMetric
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of
from cato.profiles.load import load_profile_file
from cato.sim.replay import differences, replay_core
from cato.sim.tasks import Outcome, SimNode, SimTask
from cato.telemetry.event_log import EventLog, read_log

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
CARD = load_profile_file(PROFILES / "reference-7b@gpu-32gb.yaml").to_profile()
EDITORS, BURSTS, KEYSTROKES, REPLICAS, PLACES = 50, 20, 6, 4, 16
# Between two keystrokes, a brisk typist; after a burst people read, then think.
KEY_S, READ_S, THINK_S = 0.05, 3.0, 5.0


@dataclass(frozen=True, slots=True)
class Typed:
    """`wasted`: part of the generated tokens that were for text that is no longer there."""

    wasted: float
    last_ttft_p95_s: float
    last_finished: int


def typing(*, supersedes: bool) -> list[SimTask]:
    """A completion at every keystroke, without waiting for the last answer."""
    rng = np.random.default_rng(0)
    tasks = []
    for editor in range(EDITORS):
        at_s = float(rng.uniform(0, READ_S + THINK_S))
        for burst in range(BURSTS):
            for key in range(KEYSTROKES):
                prompt, output = int(rng.integers(300, 1200)), int(rng.integers(16, 64))
                tasks.append(
                    SimTask(
                        f"{editor}.{burst}.{key}",
                        TaskName("code-completion"),
                        at_s,
                        SloMetric.TTFT,
                        0.2,
                        (SimNode(POOL, prompt, output, output),),
                        (float(rng.random()),),
                        buffer=f"editor-{editor}" if supersedes else "",
                    )
                )
                at_s += float(rng.gamma(4, KEY_S / 4))
            at_s += READ_S + float(rng.exponential(THINK_S))
    return sorted(tasks, key=lambda t: t.arrived_at_s)


def is_last(outcome: Outcome) -> bool:
    return outcome.task.id.endswith(f".{KEYSTROKES - 1}")


def tokens(outcomes: Sequence[Outcome]) -> int:
    return sum(o.task.nodes[0].output_tokens if o.is_finished else o.lost_tokens for o in outcomes)


def typed(*, supersedes: bool) -> Typed:
    fleet = a_fleet(SCHEDULERS["foresight"], replicas=REPLICAS, max_running=PLACES, profile=CARD)
    outcomes = fleet.run(typing(supersedes=supersedes))
    assert fleet.unfinished == 0
    last = [o for o in outcomes if is_last(o)]
    ttft_s = [o.ttft_s for o in last if o.is_finished]
    wasted = tokens([o for o in outcomes if not is_last(o)]) / tokens(outcomes)
    return Typed(wasted, float(np.quantile(ttft_s, 0.95)), len(ttft_s))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_superseding_spares_the_engines_and_serves_the_last_keystroke_sooner(
    capsys: pytest.CaptureFixture[str],
) -> None:
    without, with_it = typed(supersedes=False), typed(supersedes=True)
    with capsys.disabled():
        print(f"\nsimulated, without supersede: {without}\nsimulated, with supersede: {with_it}")
    assert with_it.wasted <= 0.05
    assert with_it.last_ttft_p95_s <= without.last_ttft_p95_s / 2
    assert with_it.last_finished >= 0.9 * EDITORS * BURSTS


def test_what_superseded_what_is_in_the_log_and_replays(tmp_path: Path) -> None:
    names = PoolPolicies("foresight")
    fleet = a_fleet(policies_of(names, CARD), max_running=PLACES, profile=CARD)
    pool = fleet.pools[POOL]
    log = EventLog(tmp_path / "log.jsonl", POOL, names, CARD)
    orchestrator = PoolOrchestrator(POOL, policies_of(names, CARD))

    def handle(event: Event) -> tuple[Command, ...]:
        commands = orchestrator.handle(event)
        log.write(event, commands)
        return commands

    pool.orchestrator = SimpleNamespace(handle=handle)  # type: ignore[assignment]
    for host in pool.replicas.values():  # told before the log began
        pool._report(host)
    fleet.run(typing(supersedes=True)[:300])
    log.close()
    recording = read_log(tmp_path / "log.jsonl")
    assert differences(recording, replay_core(recording)) == []
    ended = [c for s in recording.steps for c in s.commands if not isinstance(c, Dispatch)]
    assert {type(c) for c in ended if c.superseded} == {Refuse, Preempt}
