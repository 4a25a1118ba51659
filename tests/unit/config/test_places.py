"""Models named by a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from cato.config.places import source_for_others


def test_paths_of_the_current_folder_are_absolute_and_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = tmp_path / "shell"
    for folder in (shell / "models" / "coder", shell / "later", shell / "demo", tmp_path / "coder"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(shell)
    monkeypatch.setenv("HOME", "/home/someone")
    named = {
        "models/coder": f"{shell}/models/coder",
        "./later": f"{shell}/later",
        "../coder": str(tmp_path / "coder"),
        "~/coder": "/home/someone/coder",
        "/srv/coder": "/srv/coder",
        "./of/another/folder": "./of/another/folder",  # such as `CATO_HOME`
        "Qwen/Qwen2.5-Coder-7B": "Qwen/Qwen2.5-Coder-7B",
        "demo": "demo",
    }
    assert {source: source_for_others(source) for source in named} == named
