"""Compilers and linters that an operator allows validate nodes to run."""

from __future__ import annotations

import re
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
"""Name of the code's file, by language; see `file_name`."""

SAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "python": '"""A program."""\n',
        "java": "class Main {\n}\n",
        "javascript": '"use strict";\n',
        "typescript": "export const x: number = 1;\n",
        "tsx": "export const x: number = 1;\n",
        "c": "int main(void) { return 0; }\n",
        "cpp": "int main() { return 0; }\n",
        "csharp": "class Program { static void Main() { } }\n",
        "go": "package main\n\nfunc main() {}\n",
        "rust": "fn main() {}\n",
    }
)
"""A correct program, by language: a checker that finds it wrong does not work on its host."""

# Not in a comment whose lines begin with a mark. A file name has at most 255 bytes, 4 a character.
_JAVA_PUBLIC_TYPE = re.compile(
    r"^[ \t]*public[ \t]+(?:(?:final|abstract|sealed|non-sealed|strictfp)[ \t]+)*"
    r"(?:class|interface|enum|record|@interface)[ \t]+([^\W\d][\w$]{0,59})(?![\w$])",
    re.MULTILINE,
)


def file_name(language: str, code: str) -> str:
    """The name of the file for `code` in one of the languages of `FILE_NAMES`.

    A Java compiler takes a public class only from the file with its name.
    """
    public = _JAVA_PUBLIC_TYPE.search(code) if language == "java" else None
    return FILE_NAMES[language] if public is None else f"{public[1]}.java"


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
