"""Parses code in worker processes that can be killed.

Grammars take quadratic time or worse on pathological text: 64 kB of `A<` keep C#'s busy for a
minute. Long texts have their own lane, so that the short texts that editors send at every keystroke
do not wait behind them.
"""

from __future__ import annotations

from typing import Any

from cato.serve.lanes import Lane

SHORT_CHARS = 16_384
# About five times the time to parse and walk code of this size: 16 kB 16 ms, 256 kB 100 ms, or
# 250 ms if it is in another language than stated.
SHORT_CPU_S = 0.1
LONG_CPU_S = 0.5
# Long texts yield to token streaming on the same cores.
LONG_NICE = 10
WORKER = "cato.serve.nodes.parsing_worker"

_SHORT, _LONG = Lane(WORKER, SHORT_CPU_S), Lane(WORKER, LONG_CPU_S, nice=LONG_NICE)


async def parsed(what: str, source: str, **fields: Any) -> dict[str, object] | None:
    """The result of `cato.serve.nodes.parsing_worker` for `source`; None if it takes or waits too
    long."""
    lane = _SHORT if len(source) <= SHORT_CHARS else _LONG
    return await lane.run({"what": what, "source": source, **fields})
