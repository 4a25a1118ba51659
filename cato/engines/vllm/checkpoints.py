"""Check whether one checkpoint can replace another in a running engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Keys that say where a checkpoint comes from, not what it is.
_IRRELEVANT = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
# The engine keeps these files of the checkpoint that it was started with.
_KEPT = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def why_not_swappable(old: str, new: str) -> str | None:
    """Why the weights in the folder `new` cannot replace those of `old`; None when they can.

    Both must be folders with the same architecture, tokenizer and chat template.
    """
    before, after = Path(old), Path(new)
    for folder in (before, after):
        if not (folder / "config.json").is_file():
            return f"{folder} is not a folder with a config.json"
    was, is_now = _config(before), _config(after)
    different = sorted(k for k in was.keys() | is_now.keys() if was.get(k) != is_now.get(k))
    if different:
        return f"their configurations differ in {', '.join(different)}"
    for name in _KEPT:
        if _content(before / name) != _content(after / name):
            return f"their {name} differs"
    return None


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in _IRRELEVANT}


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
