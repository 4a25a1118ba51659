"""Compilers and linters that an operator allows validate nodes to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

FILE = "{file}"
"""Placeholder for the code's file in a command."""

FILE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "python": "main.py",
        "java": "Main.java",
        "javascript": "main.js",
        "typescript": "main.ts",
        "tsx": "main.tsx",
        "c": "main.c",
        "cpp": "main.cpp",
        "csharp": "Main.cs",
        "go": "main.go",
        "rust": "main.rs",
    }
)
"""Name of the code's file, by language."""


@dataclass(frozen=True, slots=True)
class CheckerSpec:
    """A command that checks a file of one language, and what one run of it may use.

    `command` is the program and its arguments; no shell reads it. `FILE` in an argument becomes the
    name of the code's file, which is in the command's working folder.
    """

    language: str
    command: tuple[str, ...]
    time_s: float = 10.0
    memory_bytes: int = 1 << 30
