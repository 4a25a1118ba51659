"""Texts that nobody writes, and that a grammar takes long for: short pieces repeated.

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
    """`length` characters of `piece`, as far as whole ones fit."""
    return piece * (length // len(piece))


def hostile_texts() -> Iterator[tuple[str, str]]:
    """Languages and texts of 64 kB, without end; the worst of each grammar first."""
    while True:
        yield from ((language, repeated(piece)) for language, piece in MINUTES)
        for pieces in zip(*PIECES.values(), strict=True):
            yield from zip(PIECES, map(repeated, pieces), strict=True)
