"""What `cato profile` says once all is measured."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from cato.cli.profile_check import ROUGH

if TYPE_CHECKING:
    from cato.measure.evaluation import Measured, SweepResult
    from cato.measure.sweep import AdapterStep

console = Console(markup=False)


def tell_problems(measured: Measured) -> None:
    for line in dict.fromkeys(measured.skipped):
        console.print(f"skipped: {line}", style="dim", highlight=False)
    if measured.disturbed:
        console.print(
            f"The replica held other work at {measured.disturbed} of {measured.points} "
            "measurements; measure again when it is quiet.",
            style="yellow",
        )


def tell_file(path: Path, backup: Path | None, used: str | None) -> None:
    kept = f" (the old one is {backup.name})" if backup else ""
    console.print(f"Wrote {path}{kept}.", highlight=False)
    if used != path.stem:
        console.print(
            f"The deployment file says `profile: {used or 'nothing'}`; to use this one: "
            f"`profile: {path.stem}`.",
            highlight=False,
        )
    console.print("Deploy the application `engines` again to use the file.", highlight=False)


def adapter_line(cost: AdapterStep) -> str:
    """A line of the report."""
    kinds = {"no adapter": cost.none_s, "one": cost.one_s, "all, mixed": cost.mixed_s}
    times = (f"{kind} {s * 1000:.2f} ms" for kind, s in kinds.items() if s is not None)
    return f"decode step of {cost.batch} calls: " + (", ".join(times) or "not measured")


def report(result: SweepResult) -> None:
    profile = result.profile
    table = Table("", "batch", "tokens", "samples", "measured ms", "predicted ms", "error")
    table.title = "What the profile predicts"
    for c in result.comparisons:
        style = "" if abs(c.error) < 0.25 else "yellow"
        table.add_row(
            c.what,
            str(c.batch),
            str(c.tokens),
            str(c.samples),
            f"{c.measured_s * 1000:.2f}",
            f"{c.predicted_s * 1000:.2f}",
            f"{c.error:+.0%}",
            style=style,
        )
    console.print(table)
    console.print(
        f"step = {_us(profile.decode_base_s)} us"
        f" + {_us(profile.decode_per_request_s)} us x b"
        f" + {_us(profile.decode_per_context_token_s)} us x h"
        f" + {_us(profile.prefill_per_request_s)} us x prompts that end + the larger of\n"
        f"       {_us(profile.weights_read_s)} us + {_us(profile.kv_read_token_s)} us x h and"
        f" {_us(profile.prompt_token_s)} us x n"
        f" + {_us(profile.prefill_per_attended_token_s)} us x positions before\n"
        f"R2 {result.prefill_r2:.3f} of first tokens, {result.decode_r2:.3f} of decode steps; "
        f"latency {_us(profile.latency_s)} us beside the engine's steps\n"
        f"{profile.chars_per_token:.2f} characters a token, load {profile.load_s:.2f} s, "
        f"context {profile.context_tokens}, KV cache {profile.kv_capacity_tokens} tokens in "
        f"blocks of {profile.block_tokens}, {profile.step_tokens} tokens a step",
        highlight=False,
    )
    for what in dict.fromkeys(c.what for c in result.comparisons):
        errors = [abs(c.error) for c in result.comparisons if c.what == what]
        if (typical := statistics.median(errors)) > ROUGH:
            console.print(
                f"The fit of the {what} is rough ({typical:.0%} off in the median): other load on "
                "the machine, or non-linear times; measure again when it is quiet.",
                style="yellow",
            )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.4g}"
