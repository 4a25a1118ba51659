"""Comments, messages and documents: no banned word, and whatever they cite exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("cato", "deployments", "workflows", "docker", "tests", "profiles", ".github", ".ci")
LOOSE = ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", "setup.py")
TEXT = {
    ".py",
    ".md",
    ".yaml",
    ".yml",
    ".sh",
    ".html",
    ".js",
    ".mjs",
    ".css",
    ".j2",
    ".json",
    ".toml",
    "",
}
RECORDS = ROOT / "cato" / "core" / "decisions"
ALGORITHMS = ROOT / "cato" / "policies" / "ALGORITHMS.md"

BETTER = {
    "anew": "again",
    "betwixt": "between",
    "doomed": "hopeless",
    "foretell": "predict",
    "foretold": "predicted, simulated",
    "hither": "here",
    "laxity": "slack",
    "lest": "so that ... not",
    "nobody's": "rewrite",
    "thence": "from there",
    "thereof": "rewrite",
    "unto": "to",
    "whence": "from where",
    "whereof": "rewrite",
    "whoever": "a caller that, the user who",
    "whomever": "rewrite",
}
BANNED = re.compile(rf"\b({'|'.join(BETTER)})\b", re.IGNORECASE)
ABOUT_WORDS = {
    ROOT / "CHANGELOG.md",  # what was released keeps its words
    ROOT / "cato" / "GLOSSARY.md",
    ROOT / ".github" / "CONTRIBUTING.md",
    Path(__file__),
}

# `#12`, "issue 12": trackers are not in the repository. Other projects' are named: vllm#12.
ISSUE = re.compile(r"\bissues? #?\d+\b|(?<![\w/&])#\d{1,5}\b(?!\w)", re.IGNORECASE)
MODULE = re.compile(r"(?<![\w./@-])cato(?:\.[A-Za-z_]\w*)+(?![\w/])")
FILE = re.compile(r"(?<![\w./<{$*-])(?:[\w.-]+/)*[\w-]+\.(?:py|md)\b")
RECORD = re.compile(r"\b(?:decisions?|records?) \[?(\d{4})\b|\((\d{4})\)")
SECTION = re.compile(r"ALGORITHMS\.md, (?:section|target) (\w+)")
COMMENT = re.compile(r"(?:^|\s)#(?: |: ).*$")
DIFF = re.compile(r"^```diff\n.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# Keys of a request's metadata, names of traces, a host name, files of users.
NOT_MODULES = re.compile(r"cato\.(internal|run|sla|\w+_ms|yaml|example)$")
ELSEWHERE = re.compile(
    r"^(vllm|ray|site-packages|transformers|mistral_common|uvicorn)/|^(AGENTS|CLAUDE|autoscaling_policy|main)\.\w+$"
)


def files() -> list[Path]:
    found = [ROOT / name for name in LOOSE]
    for place in PLACES:
        found += (ROOT / place).rglob("*")
    hidden = {"__pycache__", "node_modules", "model", ".cache", "golden"}
    return sorted(
        p for p in found
        if p.is_file() and p.suffix in TEXT and hidden.isdisjoint(p.parts)
        and p.stat().st_size < 400_000
    )  # fmt: skip


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def tree_of(path: Path) -> ast.Module:
    """Not kept: the trees of all files are millions of objects, which slow down collections."""
    return ast.parse(text_of(path))


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """All statements at the level of modules, classes and functions."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.If):
            waiting += node.body


@cache
def prose(path: Path) -> tuple[tuple[int, str], ...]:
    """Line numbers and text: of Python its comments and docstrings, of other files all of it."""
    lines = DIFF.sub(lambda m: "\n" * m[0].count("\n"), text_of(path)).splitlines()
    if path.suffix != ".py":
        return tuple(enumerate(lines, 1))
    found = [(i, m[0]) for i, line in enumerate(lines, 1) if (m := COMMENT.search(line))]
    for node in statements(tree_of(path)):
        # Docstrings, and the strings below an attribute that describe it.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, str):
                found += enumerate(value.splitlines(), node.lineno)
    return tuple(found)


@cache
def names_of(module: Path) -> frozenset[str]:
    """What a module defines or imports at its top, and the attributes of its classes."""
    names: set[str] = set()
    for node in ast.walk(tree_of(module)):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.Assign(targets):
                names |= {t.id for t in targets if isinstance(t, ast.Name)}
                names |= {t.attr for t in targets if isinstance(t, ast.Attribute)}
            case ast.AnnAssign(target=ast.Name(id)):
                names.add(id)
            case ast.AnnAssign(target=ast.Attribute(attr=attr)):
                names.add(attr)
            case ast.ImportFrom(names=aliases) | ast.Import(aliases):
                names |= {a.asname or a.name for a in aliases}
    return frozenset(names)


@cache
def leads_somewhere(dotted: str) -> bool:
    """Whether a dotted name is a package, a module, or a name in one."""
    if NOT_MODULES.match(dotted):
        return True
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        rest = parts[length:]
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.is_file() or path.is_dir():
            return not rest or (module.is_file() and set(rest) <= names_of(module))
    return False


@cache
def ends_of_paths() -> frozenset[str]:
    """All files of the repository: `/a/b.py` and `/b.py`."""
    parts = [p.relative_to(ROOT).parts for p in files()]
    return frozenset("/" + "/".join(p[i:]) for p in parts for i in range(len(p)))


@cache
def is_a_file(name: str, folder: Path) -> bool:
    """Whether some file of the repository has this path or ends in it."""
    if ELSEWHERE.search(name):
        return True
    bare = name.lstrip("./")
    return (folder / name).exists() or f"/{bare}" in ends_of_paths()


@cache
def numbers_of_records() -> frozenset[str]:
    return frozenset(p.name[:4] for p in RECORDS.glob("0*.md"))


@cache
def sections() -> frozenset[str]:
    return frozenset(re.findall(r"^(?:## )?(\w+)[ .]", text_of(ALGORITHMS), re.MULTILINE))


def lead_nowhere(path: Path) -> list[str]:
    found: list[str] = []
    for line, text in prose(path):
        bad = [m for m in MODULE.findall(text) if not leads_somewhere(m)]
        bad += [f for f in FILE.findall(text) if not is_a_file(f, path.parent)]
        bad += [f"decision {n}" for pair in RECORD.findall(text) for n in pair
                if n.startswith("00") and n not in numbers_of_records()]  # fmt: skip
        bad += [f"section {s}" for s in SECTION.findall(text) if s not in sections()]
        if path.suffix == ".md":
            links = (t for t in LINK.findall(text) if not t.startswith(("http", "mailto:")))
            bad += [t for t in links if not (path.parent / t).exists()]
        found += [f"{path}:{line}: {b}" for b in bad]
    return found


def test_no_banned_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{i}: {m[0]!r}: {BETTER[m[0].lower()]}"
        for path in files()
        if path not in ABOUT_WORDS
        if BANNED.search(text_of(path))
        for i, line in enumerate(text_of(path).splitlines(), 1)
        for m in BANNED.finditer(line)
    ]
    assert found == [], "\n" + "\n".join(found)


def test_all_that_is_cited_exists() -> None:
    found = [problem for path in files() if path.suffix in {".py", ".md"} | {".toml"}
             for problem in lead_nowhere(path)]  # fmt: skip
    assert found == [], "\n" + "\n".join(found).replace(f"{ROOT}/", "")


def test_no_file_cites_an_issue_of_a_tracker() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {m[0]}"
        for path in files()
        if path.suffix in {".py", ".md"} and path != Path(__file__)
        for line, text in prose(path)
        for m in ISSUE.finditer(text)
    ]
    assert found == [], "\n" + "\n".join(found)


def test_indexes_are_complete() -> None:
    index = (RECORDS / "README.md").read_text(encoding="utf-8")
    missing = [p.name for p in sorted(RECORDS.glob("0*.md")) if f"({p.name})" not in index]
    assert missing == [], "add these to cato/core/decisions/README.md"
    rooms = (ROOT / "cato" / "README.md").read_text(encoding="utf-8")
    packages = [
        p.parent.relative_to(ROOT / "cato").as_posix()
        for p in sorted((ROOT / "cato").rglob("__init__.py"))
        if p.parent != ROOT / "cato"
    ]
    inner = ("bench/", "engines/", "store/migrations")  # their own docstrings suffice
    unnamed = [p for p in packages if f"`{p}/`" not in rooms and not p.startswith(inner)]
    assert unnamed == [], "add these to the map of rooms in cato/README.md"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see `cato.core.errors.CatoError` and cato.core.nothing", ["cato.core.nothing"]),
        ("tests/unit/test_never_written.py says so", ["tests/unit/test_never_written.py"]),
        ("as decision 0001 says, not 0099: decision 0099", ["decision 0099"]),
        ("ALGORITHMS.md, section 6b; ALGORITHMS.md, section 77", ["section 77"]),
        ("[a](README.md) and [b](NOWHERE.md)", ["NOWHERE.md"]),
    ],
)
def test_the_checks_see_what_leads_nowhere(tmp_path: Path, text: str, found: list[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    (tmp_path / "README.md").touch()
    assert sorted({problem.rsplit(": ", 1)[1] for problem in lead_nowhere(page)}) == found
