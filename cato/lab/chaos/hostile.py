"""Pathological inputs for tree-sitter grammars: short pieces repeated.

Each was seen to take 0.3 s or more for 64 kB in the named grammar, `MINUTES` 15 to 70 s. Times grow
at least with the square of the length.
"""

from __future__ import annotations

from collections.abc import Iterator

HOSTILE_BYTES = 64 * 1024

PIECES: dict[str, tuple[str, ...]] = {
    "python": ("\\\n", "a?b:", "fn f<", '$"{', "where T:"),
    "java": ("A<", "x=>", 'R"(', 'f"{', "case 1:"),
    "javascript": ("fn f<", 'f"{', '$"{', "where T:", "'"),
    "typescript": ("a<b,", "'", 'f"{', "case 1:", '$"{'),
    "tsx": ("a<b,", "'", 'R"(', "type A=", '$"{'),
    "c": ("x=>", "fn f<", 'r#"', "[[a]]", "type A="),
    "cpp": ("A<", "fn f<", 'f"{', "[[a]]", '$"{'),
    "csharp": ("A<", "@A class X{}\n", 'r#"', "case 1:", "where T:"),
    "go": ('"', "x=>", "fn f<", "a?b:", "@A("),
    "rust": ('"', "a?b:", "new A(", 'r#"', "a,"),
}
MINUTES = (("java", "A<"), ("csharp", "A<"), ("typescript", "a<b,"), ("tsx", "a<b,"))


def repeated(piece: str, length: int = HOSTILE_BYTES) -> str:
    """At most `length` characters: whole repetitions of `piece`."""
    return piece * (length // len(piece))


def hostile_texts() -> Iterator[tuple[str, str]]:
    """Endless languages and texts of 64 kB; the worst of each grammar first."""
    while True:
        yield from ((language, repeated(piece)) for language, piece in MINUTES)
        for pieces in zip(*PIECES.values(), strict=True):
            yield from zip(PIECES, map(repeated, pieces), strict=True)
