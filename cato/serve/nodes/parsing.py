"""Parsing in processes that can be stopped.

Grammars are quadratic and worse in texts that nobody writes: 64 kB of `A<` keep C#'s for a minute.
Long texts have a lane of their own: what an editor sends with every key is short, and does not wait
behind them.
"""

from __future__ import annotations

from typing import Any

from cato.serve.lanes import Lane

SHORT_CHARS = 16_384
# About five times what code of this size takes to parse and to walk: 16 kB 16 ms, 256 kB 100 ms,
# and 250 ms where it is of another language than it says.
SHORT_CPU_S = 0.1
LONG_CPU_S = 0.5
# Long texts give way to what streams tokens on the same cores.
LONG_NICE = 10
WORKER = "cato.serve.nodes.parsing_worker"

_SHORT, _LONG = Lane(WORKER, SHORT_CPU_S), Lane(WORKER, LONG_CPU_S, nice=LONG_NICE)


async def parsed(what: str, source: str, **fields: Any) -> dict[str, object] | None:
    """What `cato.serve.nodes.parsing_worker` makes of `source`; None when that takes too long,
    or waited for too long."""
    lane = _SHORT if len(source) <= SHORT_CHARS else _LONG
    return await lane.run({"what": what, "source": source, **fields})
