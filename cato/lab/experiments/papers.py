"""All tables and figures of the five papers: which experiment reproduces which, and what is open.
`regenerate` runs them and writes JSON, plots and an index page to a folder, in which each
experiment states the time that it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from cato.core.errors import InputError
from cato.lab.registry import experiment
from cato.sim.experiment import INTERRUPTED, Experiment, Options, Progress, silent
from cato.sim.report import Report, setting_words
from cato.sim.traces import is_azure

INDEX = "index.html"
NAME = "papers"
SEEDS = tuple(range(100, 130))
"""Seeds to report; constants were chosen on others."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The part of a paper that an experiment reproduces.

    `quick_seeds`: number of seeds when quick; studies may take fewer. `needs`: an option without
    which it is skipped.
    """

    shows: str
    experiment: str
    quick_seeds: int = 3
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper's experiments, and the parts that none reproduces, with the reason."""

    name: str
    entries: tuple[Entry, ...]
    open: tuple[tuple[str, str], ...] = ()


NEEDS_AZURE = "--trace with a file of the Azure LLM inference traces"
NEEDS_FILE = "--dataset with a file of pairs"
NEEDS_FOLDER = "--dataset with a folder of such files"
PAPERS: tuple[Paper, ...] = (
    Paper(
        "CATO: SLA-Awareness for AI-assisted coding",
        (
            Entry("RQ1", "cato-rq1", 2),
            Entry("RQ2", "cato-rq2", 2),
            Entry("RQ3", "cato-rq3", 1),
            Entry("RQ4", "cato-rq4", 2),
            Entry("single calls with the lengths of its data set", "codexglue", 2, NEEDS_FILE),
            Entry("its four tasks with their real lengths", "codexglue-tasks", 3, NEEDS_FOLDER),
        ),
        (("measured on NPUs and GPUs", "live: `cato bench live`, on your accelerators"),),
    ),
    Paper(
        "SABER: Adaptive Request Scheduling for CodeLLM Serving with SLA Guarantees",
        (
            Entry("Fig. 1, 3 and 5 (RQ1)", "saber-rq1", 2),
            Entry("sustained load, and readings of its text", "saber-rq2", 1),
            Entry("Fig. 4", "saber-fig4", 5),
            Entry("Fig. 6", "saber-fig6", 5),
            Entry("Fig. 7", "saber-fig7", 5),
            Entry("R² of the estimators (Section VI)", "saber-estimators", 5),
        ),
    ),
    Paper(
        "CACE: Context-Aware CodeLLM Eviction for AI-assisted Coding",
        (
            Entry("RQ1: hit rate and latency by policy", "cace-rq1", 3),
            Entry("RQ2; orders of dispatch and host memory (future work)", "cace-rq2", 3),
            Entry("RQ3: ablation of the factors", "cace-ablation", 3),
            Entry("windows of 30 s; adaptive weights (future work)", "cace-windows", 3),
            Entry("heterogeneous accelerators (future work)", "cace-mixed", 3),
        ),
    ),
    Paper(
        "SLO-SA: SLO-Aware Scheduling for Large Language Model Inferences",
        (
            Entry("Fig. 7, 12 to 18; Table 2", "slo-sa", 2),
            Entry("Fig. 8", "slo-sa-fig8", 10),
            Entry("Fig. 9", "slo-sa-fig9", 10),
            Entry("Fig. 10", "slo-sa-fig10", 10),
            Entry("Fig. 11 (A)", "slo-sa-fig11", 10),
        ),
        (
            ("Table 1, Fig. 11 (B): overhead", "measured on your machine: `cato bench core`"),
            ("other engines and models of Fig. 12 to 18", "the latencies of Table 2 alone"),
        ),
    ),
    Paper(
        "Tempo: Application-aware LLM Serving with Mixed SLO Requirements",
        (
            Entry("Fig. 9: one hour", "tempo-fig9", 1),
            Entry("Fig. 3, 10 to 13", "tempo-e2e", 2),
            Entry("Fig. 14", "tempo-fig14", 3),
            Entry("Fig. 15, and JITServe's parts", "tempo-ablation", 2),
            Entry("Fig. 16", "tempo-fig16", 2),
            Entry("Fig. 17", "tempo-fig17", 2),
            Entry("Fig. 18", "tempo-fig18", 2),
            Entry("Fig. 19", "tempo-fig19", 2),
            Entry("Fig. 5: bounds of output lengths", "length-bounds", 3, NEEDS_AZURE),
        ),
        (
            ("Fig. 1, 2 and 7", "requests of data sets that are not available"),
            ("Fig. 5 (a), 6: time of a prediction and of a match", "`cato bench core`"),
            ("Fig. 10: other batch sizes and models", "one engine is simulated"),
        ),
    ),
    Paper(
        "Beside the papers",
        (Entry("a production trace under all schedulers", "azure-replay", 1, NEEDS_AZURE),),
    ),
)


@dataclass(frozen=True, slots=True)
class Done:
    """An entry that ran, or why it did not. `took_s`: by the clock."""

    entry: Entry
    experiment: Experiment
    report: Report | None = None
    pictures: tuple[Path, ...] = ()
    why_not: str = ""
    took_s: float = 0.0


Bar = Callable[[str], AbstractContextManager[Progress]]
"""Shows the progress of the experiment of that name."""


def regenerate(
    options: Options,
    folder: Path,
    papers: Sequence[Paper],
    bar: Bar = lambda _: nullcontext(silent),
) -> Iterator[Done]:
    """Run everything that the options allow, in sequence; the index is updated after each.

    Raise `OSError` for a folder that cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Done] = []
    for paper in papers:
        for entry in paper.entries:
            found.append(_done(entry, options, folder, bar))
            (folder / INDEX).write_text(page(papers, found, options, folder), encoding="utf-8")
            yield found[-1]


def _done(entry: Entry, options: Options, folder: Path, bar: Bar) -> Done:
    chosen = experiment(entry.experiment)
    if why := _why_not(entry, options):
        return Done(entry, chosen, why_not=why)
    if options.quick:
        options = replace(options, seeds=options.seeds[: entry.quick_seeds])
    began_s = time.monotonic()
    try:
        with bar(chosen.name) as progress:
            report = chosen.run(options, progress)
        if INTERRUPTED in report.extra:
            raise KeyboardInterrupt
    except InputError as error:
        return Done(entry, chosen, why_not=str(error))
    (folder / f"{chosen.name}.json").write_text(report.to_json(), encoding="utf-8")
    pictures = tuple(chosen.plot(report, folder))
    return Done(entry, chosen, report, pictures, took_s=time.monotonic() - began_s)


def _why_not(entry: Entry, options: Options) -> str:
    trace, dataset = options.trace, options.dataset
    has = {
        "": True,
        NEEDS_AZURE: trace is not None and is_azure(trace),
        NEEDS_FILE: dataset is not None and dataset.is_file(),
        NEEDS_FOLDER: dataset is not None and dataset.is_dir(),
    }
    return "" if has[entry.needs] else f"needs {entry.needs}"


def page(papers: Sequence[Paper], found: Sequence[Done], options: Options, folder: Path) -> str:
    """HTML: a section per paper, a row per experiment with its targets, plots, and what is open."""
    return "\n".join(_lines(papers, found, options, folder)) + "\n"


def _lines(
    papers: Sequence[Paper], found: Sequence[Done], options: Options, folder: Path
) -> Iterator[str]:
    done = {d.entry: d for d in found}
    seeds = f"seeds {options.seeds[0]} to {options.seeds[-1]}"
    effort = (
        f"a quick run with the first few of {seeds}"
        if options.quick
        else f"a full run with {seeds}"
    )
    yield "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
    yield "<title>The papers' tables and figures, simulated</title><style>"
    yield "body{font:15px sans-serif;max-width:76em;margin:2em auto;padding:0 1em}"
    yield "img{max-width:100%;border:1px solid #ccc}table{border-collapse:collapse}"
    yield "td,th{padding:.15em .7em;border-bottom:1px solid #ddd;text-align:left}"
    yield ".no{color:#a00}</style></head><body>"
    yield "<h1>The papers' tables and figures, simulated</h1>"
    yield f"<p>Simulated: no engine ran. This is {escape(effort)}. Values are means over seeds"
    yield "± one standard error; in pictures bars are 95 % intervals, hollow diamonds the paper's"
    yield "own numbers. <code>foresight</code> is CATO's default scheduler.</p>"
    yield from _contents(papers, done)
    for i, paper in enumerate(papers):
        yield f"<h2 id='paper-{i}'>{escape(paper.name)}</h2>"
        for entry in paper.entries:
            if entry in done:
                yield from _section(done[entry], folder)
        if paper.open:
            yield "<h3>Open</h3><ul>"
            for what, why in paper.open:
                yield f"<li>{escape(what)}: {escape(why)}</li>"
            yield "</ul>"
    yield "</body></html>"


def _contents(papers: Sequence[Paper], done: Mapping[Entry, Done]) -> Iterator[str]:
    """Each experiment with its result."""
    yield "<ul>"
    for i, paper in enumerate(papers):
        yield f"<li><a href='#paper-{i}'>{escape(paper.name)}</a><ul>"
        for entry in paper.entries:
            name = f"<a href='#{entry.experiment}'>{escape(entry.shows)}</a>"
            yield f"<li>{name}: {_outcome(done.get(entry))}</li>"
        yield "</ul></li>"
    yield "</ul>"


def _outcome(done: Done | None) -> str:
    if done is None:
        return "not run yet"
    if done.report is None:
        return f"not run, {escape(done.why_not)}"
    targets = done.report.targets
    met = sum(t.is_met for t in targets)
    return f"{met} of {len(targets)} targets met" if targets else "no targets"


def _section(done: Done, folder: Path) -> Iterator[str]:
    entry, name = done.entry, done.experiment.name
    yield f"<h3 id='{name}'>{escape(entry.shows)}: {escape(done.experiment.title)}</h3>"
    if done.report is None:
        yield f"<p class='no'>Not run: {escape(done.why_not)}.</p>"
        return
    effort = f"{len(done.report.seeds)} seeds, {done.took_s:.0f} s"
    yield f"<p><code>cato simulate {name}</code>, {effort}; <a href='{name}.json'>JSON</a></p>"
    if done.report.targets:
        yield "<table><tr><th>target</th><th>goal</th><th>measured</th><th></th></tr>"
        for t in done.report.targets:
            goal = f"{'≥' if t.at_least else '≤'} {t.goal:g}"
            verdict = "met" if t.is_met else "<span class='no'>missed</span>"
            yield f"<tr><td>{escape(t.text)}</td><td>{goal}</td>"
            yield f"<td>{_value(t.measured, t.stderr)}</td><td>{verdict}</td></tr>"
        yield "</table>"
    yield from _means(done)
    for picture in done.pictures:
        source = picture.relative_to(folder).as_posix()
        yield f"<p><img loading='lazy' src='{source}' alt='{escape(picture.stem)}'></p>"


def _value(mean: float, stderr: float) -> str:
    """A value with its error, if any, to the error's second digit."""
    if not stderr > 0:
        return f"{round(mean, 4):g}"
    digits = max(0, min(4, 1 - int(f"{stderr:e}".partition("e")[2])))
    return f"{round(mean, digits) + 0.0:.{digits}f} ± {stderr:.{digits}f}"


def _means(done: Done) -> Iterator[str]:
    """The headline metrics by setting and policy, collapsed."""
    report = done.report
    assert report is not None, "it ran"
    known = list(dict.fromkeys(m.metric for m in report.means))
    shown = [m for m in (*done.experiment.headlines, "slo_attainment") if m in known] or known[:3]
    shown = list(dict.fromkeys(shown))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for m in report.means:
        if m.metric in shown:
            words = setting_words(m.setting)
            rows.setdefault((words, m.policy), {})[m.metric] = _value(m.mean, m.stderr)
    yield f"<details><summary>All {len(rows)} rows</summary><table>"
    yield "<tr><th>setting</th><th>policy</th>"
    yield "".join(f"<th>{escape(m)}</th>" for m in shown) + "</tr>"
    for (words, policy), row in rows.items():
        cells = "".join(f"<td>{row.get(m, '')}</td>" for m in shown)
        yield f"<tr><td>{escape(words)}</td><td>{escape(policy)}</td>{cells}</tr>"
    yield "</table></details>"
