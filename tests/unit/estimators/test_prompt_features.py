"""Features of a call before it runs, and the study that measures what they are worth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cato.estimators.prompt_features import (
    LANGUAGES,
    NAMES,
    Asked,
    EarlierAnswers,
    code_share,
    features_of,
)
from cato.lab.registry import study
from cato.lab.studies import length_features
from cato.lab.study import as_experiment
from cato.sim.experiment import Options, silent


def named(asked: Asked) -> dict[str, float]:
    return dict(zip(NAMES, features_of(asked), strict=True))


def test_lines_inside_fences_and_lines_that_look_like_code_are_code() -> None:
    assert code_share("Explain this.\n\n```python\nhello\nworld\n```\nThanks!") == 0.5
    assert code_share("int f() {\n  return 1;\n}") == 1.0
    assert code_share("Please write a short poem about tests.") == 0.0
    assert code_share("") == 0.0


def test_a_fence_names_its_language_and_what_is_unknown_is_not_what_is_missing() -> None:
    places = [
        named(Asked(1, text=t))["language"] for t in ("```Rust\n```", "```brainfuck\n```", "")
    ]
    assert len(set(places)) == 3
    assert named(Asked(1, text="```a\n```\n```b\n```"))["fences"] == 2
    assert named(Asked(1, role="tool"))["last_role"] != named(Asked(1))["last_role"]
    assert named(Asked(1, format="json_schema"))["format"] != named(Asked(1))["format"]


def test_a_huge_message_is_examined_at_its_ends() -> None:
    prose = "Please explain it well. " * 10_000
    assert named(Asked(1, text=f"```go\nx\n```\n{prose}"))["fences"] == 1
    assert named(Asked(1, text=f"{prose}\n```go\nx\n```"))["language"] == LANGUAGES.index("go")
    assert named(Asked(1, text=f"{prose}\n```go\nx\n```\n{prose}"))["fences"] == 0


def test_earlier_answers_are_those_of_the_same_task_node_and_user_and_hold_no_name() -> None:
    earlier = EarlierAnswers(kept=2, most=2)
    for tokens in (10, 20, 30):
        earlier.add("t", "generate", "ann", tokens)
    assert earlier.of("t", "generate", "ann") == (20, 30)
    assert earlier.of("t", "explain", "ann") == earlier.of("u", "generate", "ann") == ()
    assert earlier.of("t", "generatea", "nn") == earlier.of("tg", "enerate", "ann") == ()
    assert "ann" not in repr(earlier)
    earlier.add("t", "generate", "bob", 1)
    earlier.add("t", "generate", "cem", 1)
    assert earlier.of("t", "generate", "ann") == ()  # the longest ago


def test_a_forest_that_sees_the_fences_bounds_what_they_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length_features, "TASKS", 40)
    short = {"nl": "x" * 400, "code": "y" * 100}
    long = {"nl": "z();" * 100, "code": "y" * 2000}
    rows = [json.dumps(short if i % 3 else long) for i in range(900)]
    (tmp_path / "pairs.json").write_text("\n".join(rows))
    options = Options((1,), ("all features", "prompt length"), dataset=tmp_path)
    report = as_experiment(study("length-features")).run(options, silent)
    assert {m.metric for m in report.means} == set(study("length-features").metrics)
    seeing, blind = (
        report.mean("pinball_loss_tokens", arm).mean for arm in ("all features", "prompt length")
    )
    assert seeing < blind / 2
