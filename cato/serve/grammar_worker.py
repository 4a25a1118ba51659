"""Grammar worker: compiles grammars as an engine would, to measure their cost.

Uses XGrammar, vLLM's default, with a synthetic vocabulary of 32,000 tokens of realistic lengths. A
vocabulary of 150,000 takes about five times as long.
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

from cato.serve.lane_worker import work

TOKENS = 32_000
_SEED = 1
_SYLLABLES = re.findall(
    r"\S+",
    "a e i o u er in on re at en st al or le an ti es se is co de ra ing ion th ch un pre con self "
    "def get set to name value list _ _ 0 1 2 ( ) . , : = \" ' [ ] / - + * é ü 数",
)


def main() -> None:
    compilers = _compilers()
    work(lambda job: _compiled(compilers, job["grammars"]))


def _compiled(
    compilers: dict[str, Callable[[str], object]] | None, grammars: list[tuple[str, str]]
) -> dict[str, object]:
    """CPU time in seconds; empty if XGrammar is missing or does not work without torch."""
    if compilers is None:
        return {}
    started_s = time.process_time()
    for kind, text in grammars:
        # Invalid grammars are left for the engine to refuse, with its own message.
        with contextlib.suppress(Exception):
            compilers[kind](text)
    return {"cpu_s": time.process_time() - started_s}


def _compilers() -> dict[str, Callable[[str], object]] | None:
    try:
        xgrammar = _xgrammar()
    except Exception:  # not installed, or a version that needs torch
        traceback.print_exc()
        return None
    tokens = xgrammar.TokenizerInfo(
        vocabulary(), vocab_type=xgrammar.VocabType.RAW, vocab_size=TOKENS, stop_token_ids=[0]
    )
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
    return {
        "json": compiler.compile_json_schema,
        "regex": compiler.compile_regex,
        "grammar": compiler.compile_grammar,
    }


def _xgrammar() -> Any:
    """XGrammar without torch and transformers, which take 4 s and 200 MB to import."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    import tvm_ffi  # noqa: F401  (works without torch if imported first)

    for name in ("torch", "transformers"):
        sys.modules[name] = MagicMock(name=name)
    import xgrammar

    return xgrammar


def vocabulary() -> list[bytes]:
    """All bytes, runs of spaces, and words with and without a leading space."""
    draw = random.Random(_SEED)
    tokens = {bytes([byte]): None for byte in range(256)}
    tokens |= {b" " * n: None for n in range(2, 17)}
    while len(tokens) < TOKENS:
        word = "".join(draw.choices(_SYLLABLES, k=draw.randint(1, 4)))
        word = draw.choice((word, word, word.title(), word.upper()))
        tokens[(draw.choice(("", " ")) + word).encode()] = None
    return list(tokens)
