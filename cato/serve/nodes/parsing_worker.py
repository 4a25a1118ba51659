"""Lane worker that parses code for the analyze and validate nodes."""

from __future__ import annotations

from typing import Any

from cato.serve.lane_worker import work


def main() -> None:
    from cato.serve.nodes.languages import LANGUAGES, grammar

    for language in LANGUAGES:
        grammar(language)
    work(_result)


def _result(job: dict[str, Any]) -> dict[str, object]:
    from cato.serve.nodes import analyze, validate

    if job["what"] == "analyze":
        return analyze.analyzed(job["source"], job["language"], job["cursor"])
    return validate.validated(job["source"], job["language"])
