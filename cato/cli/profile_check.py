"""The check of a profile: a mixed run, as predicted and as measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from cato.cli.bars import Counting

if TYPE_CHECKING:
    from cato.control.measured_replica import ReplicaCaller
    from cato.core.profile import Profile
    from cato.measure.check import EngineSteps


# A median error above this gets a warning. R2 is not used: a few samples with a pause of the
# machine, which the fit leaves out, ruin it.
ROUGH = 0.15

console = Console(markup=False)


async def check_profile(
    caller: ReplicaCaller, profile: Profile, steps: EngineSteps, seed: int
) -> bool:
    """Measure a mixed run that the profile was not fitted to, and compare it with the simulator's
    prediction; True when the profile predicts it."""
    from cato.measure.check import Verdict, check, mixed_run

    calls = mixed_run(profile, seed, shares=steps.block_tokens > 0)
    with Counting(console) as bar:
        task = bar.add_task("a mixed run, twice", total=2 * len(calls))
        checked = await check(caller, profile, steps, calls, seed, lambda: bar.advance(task))
    console.print(
        f"A mixed run of {len(calls)} calls, twice (seed {seed}); E2E, median errors:",
        highlight=False,
    )
    cold = [c for c in checked if not c.call.shared_tokens]
    warm = [c for c in checked if c.call.shared_tokens]
    verdicts = []
    for what, some in (("without cache hits", cold), ("with cache hits", warm)):
        if not some:
            continue
        verdict = Verdict.of(some)
        verdicts.append(verdict)
        console.print(
            f"  {what}: {verdict.calls} calls, predicted {verdict.error:.1%} off "
            f"({verdict.bias:+.1%} on average); the second run is {verdict.repeat_error:.1%} off "
            f"the first",
            style=None if verdict.is_good else "yellow",
            highlight=False,
        )
    if warm:
        console.print(
            f"  cached tokens: {sum(c.measured.cached_tokens for c in warm)} by the engine's "
            f"count, {sum(c.predicted.cached_tokens for c in warm)} predicted",
            highlight=False,
        )
    is_good = all(v.is_good for v in verdicts)
    is_rough = max(v.repeat_error for v in verdicts) > ROUGH
    if not is_good:
        said = "The profile is off: measure it again when the machine is quiet."
    elif is_rough:
        said = (
            "The two runs of the same calls differ too much to judge the profile: check again when "
            "the machine is quiet."
        )
    else:
        said = "The profile predicts this engine."
    console.print(said, style="yellow" if is_rough or not is_good else None, highlight=False)
    return is_good
