"""Models named by a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from cato.config.places import source_for_others


def test_paths_of_the_current_folder_are_absolute_and_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    (tmp_path / "models" / "coder").mkdir(parents=True)
    (tmp_path / "demo").mkdir()
    named = {
        "models/coder": f"{tmp_path}/models/coder",
        "./later": f"{tmp_path}/later",
        "../coder": str(tmp_path.parent / "coder"),
        "~/coder": "/home/someone/coder",
        "/srv/coder": "/srv/coder",
        "Qwen/Qwen2.5-Coder-7B": "Qwen/Qwen2.5-Coder-7B",
        "demo": "demo",
    }
    assert {source: source_for_others(source) for source in named} == named
