"""The process that compiles grammars as an engine would, to see how long that takes.

With XGrammar, vLLM's own choice, and a stand-in for the model's vocabulary: 32,000 tokens of the
lengths that real ones have. A vocabulary of 150,000 takes about five times as long.
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
    """Seconds of CPU time; nothing where there is no XGrammar that works alone."""
    if compilers is None:
        return {}
    started_s = time.process_time()
    for kind, text in grammars:
        # What cannot be compiled is the engine's to refuse, with its own words.
        with contextlib.suppress(Exception):
            compilers[kind](text)
    return {"cpu_s": time.process_time() - started_s}


def _compilers() -> dict[str, Callable[[str], object]] | None:
    try:
        xgrammar = _xgrammar()
    except Exception:  # not there, or a version that wants more of torch
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
    """Compiling needs neither torch nor transformers, which take 4 s and 200 MB to import."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    import tvm_ffi  # noqa: F401  (goes without torch when it is imported first)

    for name in ("torch", "transformers"):
        sys.modules[name] = MagicMock(name=name)
    import xgrammar

    return xgrammar


def vocabulary() -> list[bytes]:
    """All bytes, runs of spaces, and words with and without a space before them."""
    draw = random.Random(_SEED)
    tokens = {bytes([byte]): None for byte in range(256)}
    tokens |= {b" " * n: None for n in range(2, 17)}
    while len(tokens) < TOKENS:
        word = "".join(draw.choices(_SYLLABLES, k=draw.randint(1, 4)))
        word = draw.choice((word, word, word.title(), word.upper()))
        tokens[(draw.choice(("", " ")) + word).encode()] = None
    return list(tokens)
