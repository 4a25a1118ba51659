"""Shared by `cato simulate` and `cato plan`: options, a progress bar, and reports as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cato.cli.bars import Counting
from cato.config.lines import with_lines
from cato.core.errors import ConfigError, UnknownNameError
from cato.core.words import counted, did_you_mean
from cato.sim.experiment import Progress
from cato.sim.report import Report, Setting, Target, setting_words
from cato.sim.seeds import parse_seeds

if TYPE_CHECKING:
    from cato.sim.scenario import Scenario

SEEDS_HELP = (
    "Number of seeds from 0, or a range such as 100-129. Constants were chosen on 0-9; "
    "results are reported on 100-129."
)
# The metrics that people look at first; the report's JSON has all.
HEADLINES = ("slo_attainment", "ttft_s_mean", "e2e_s_p95")
COLUMNS = 4
WIDEST = 10_000  # characters; more than any table has
INDENT = (0, 0, 0, 2)
MET, MISSED = Text("met", style="bold green"), Text("missed", style="bold red")


def scenario_of(path: Path) -> Scenario:
    """The scenario in the file; raise `ConfigError` with the line of each problem."""
    from cato.sim.scenario_file import load_scenario

    try:
        return load_scenario(path)
    except ConfigError as error:
        raise ConfigError(with_lines(error.problems)) from error


def check_scheduler(name: str, known: Iterable[str]) -> None:
    """Raise `typer.BadParameter` for an unknown scheduler."""
    names = tuple(known)
    if name not in names:
        raise typer.BadParameter(str(UnknownNameError("scheduler", name, names)))


def seeds_of(text: str) -> tuple[int, ...]:
    """`parse_seeds` for a command-line option."""
    try:
        return parse_seeds(text)
    except ValueError as error:
        raise typer.BadParameter(f"--seeds {text!r}: {error}") from error


def kinds_of(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Profiles and the cards of one replica of each: `NAME`, or `NAME:2`. Answers are by profile,
    so each is named once; raise `typer.BadParameter`."""
    kinds = [_kind_of(text) for text in texts]
    names = [name for name, _ in kinds]
    for name in names:
        if names.count(name) > 1:
            raise typer.BadParameter(
                f"--profile {name!r} is there twice; measure each way to serve the model as a "
                "profile of its own"
            )
    return kinds


def _kind_of(text: str) -> tuple[str, int]:
    name, colon, cards = text.rpartition(":")
    if not colon:
        return text, 1
    if not (cards.isascii() and cards.isdigit()) or int(cards) < 1:
        raise typer.BadParameter(
            f"--profile {text!r}: give the cards per replica after the colon, such as NAME:2"
        )
    return name, int(cards)


def finite(value: float | None) -> float | None:
    """Callback of an option: `value`, unless it is infinite, which no lower bound refuses; raise
    `typer.BadParameter`."""
    if value is not None and not isfinite(value):
        raise typer.BadParameter(f"{value:g} is no number")
    return value


def all_finite(values: list[float] | None) -> list[float] | None:
    """As `finite`, for an option that may be repeated."""
    for value in values or ():
        finite(value)
    return values


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A progress bar on stderr that is erased at the end; in a file a line a minute."""
    with Counting(Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def tables(report: Report, metrics: Sequence[str] = (), usual: Sequence[str] = ()) -> list[Table]:
    """Means, paired differences and targets; without `metrics` those of the `usual` ones, or of
    the headline metrics, that the report has.

    Raise `typer.BadParameter` for one of `metrics` that the report does not have.
    """
    shown = _shown(report, metrics, usual or HEADLINES)
    seeds = counted(len(report.seeds), "seed")
    found = [
        _pivot(
            f"{report.experiment}, simulated, {seeds}: mean ± standard error",
            [(m.setting, m.policy, m.metric, _value(m.mean, m.stderr)) for m in report.means],
            shown,
        )
    ]
    differences = [
        (d.setting, f"{d.policy} - {d.baseline}", d.metric, _value(d.mean, d.stderr, "+"))
        for d in report.differences
        if d.metric in shown
    ]
    if differences:
        found.append(_pivot("Differences, paired by seed", differences, shown))
    if report.targets:
        found.append(targets_table(report.targets))
    return found


def metrics_in(report: Report) -> tuple[str, ...]:
    return tuple(dict.fromkeys(m.metric for m in report.means))


def check_metrics(metrics: Sequence[str], known: Sequence[str]) -> None:
    """Raise `typer.BadParameter` for one of `metrics` that is not `known`."""
    for name in metrics:
        if name not in known:
            raise typer.BadParameter(
                f"no metric {name!r} in this report{did_you_mean(name, known)}; "
                f"it has {', '.join(known)}"
            )


def _shown(report: Report, metrics: Sequence[str], usual: Sequence[str]) -> tuple[str, ...]:
    known = metrics_in(report)
    check_metrics(metrics, known)
    chosen = tuple(metrics) or tuple(m for m in usual if m in known)
    return chosen or known[:COLUMNS]


def _pivot(
    title: str, cells: Sequence[tuple[Setting, str, str, str]], metrics: Sequence[str]
) -> Table:
    """A table with a block of rows per setting, a row per policy and a column per metric."""
    blocks: dict[str, dict[str, dict[str, str]]] = {}
    for setting, policy, metric, value in cells:
        if metric in metrics:
            rows = blocks.setdefault(setting_words(setting), {})
            rows.setdefault(policy, {})[metric] = value
    columns = [m for m in metrics if any(metric == m for _, _, metric, _ in cells)]
    table = a_table(title)
    table.add_column("")
    for metric in columns:
        table.add_column(metric, justify="right")
    for words, rows in blocks.items():
        if words:
            table.add_row(Text(words, style="cyan"))
        for policy, row in rows.items():
            table.add_row(Padding(Text(policy), INDENT), *(row.get(m, "") for m in columns))
    return table


def a_table(title: str) -> Table:
    return Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD)


def print_whole(console: Console, table: Table) -> None:
    """Print `table` with every digit: a cut number reads as another number.

    Texts are wrapped to the console's width, words and the cells of right-justified columns are
    not. A table that is still wider goes past the edge, where terminals continue on the next line.
    """
    wide = console.options.update(width=WIDEST)
    least, most = [], []
    for column in table.columns:
        cells = [Measurement.get(console, wide, cell) for cell in column.cells]
        header = Measurement.get(console, wide, column.header)
        most.append(max(m.maximum for m in (header, *cells)))
        is_whole = column.justify == "right"
        needed = [m.maximum if is_whole else m.minimum for m in cells]
        least.append(max([header.minimum, *needed]))
    frame = console.measure(table, options=wide).maximum - sum(most)
    spare = max(0, console.width - frame - sum(least))
    wanted = sum(most) - sum(least)
    for column, low, high in zip(table.columns, least, most, strict=True):
        share = high - low if wanted <= spare else spare * (high - low) // wanted
        column.width = low + share
    if frame + sum(least) > console.width:
        table.width = frame + sum(least)
    console.print(table, crop=False)


def targets_table(targets: Sequence[Target]) -> Table:
    """Each target with its goal, the measured value, and whether it is met."""
    table = a_table("Targets")
    for name in ("group", "target", "goal", "measured", ""):
        table.add_column(name, justify="right" if name in ("goal", "measured") else "left")
    for t in targets:
        goal = f"{'>=' if t.at_least else '<='} {t.goal:g}"
        measured = _value(t.measured, t.stderr)
        table.add_row(str(t.group), t.text, goal, measured, MET if t.is_met else MISSED)
    return table


def _value(mean: float, stderr: float, sign: str = "") -> str:
    """The mean and its standard error, to the error's second digit, at most four decimals."""
    if not stderr > 0:
        return f"{mean:{sign}.4g}"
    digits = max(0, min(4, 1 - _exponent(stderr)))
    return f"{mean:{sign}.{digits}f} ± {stderr:.{digits}f}"


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])
