"""Models answer to the names that agents ask for: aliases that are patterns."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingress_kit import COMPLETION, a_profile, an_access, running

from cato.core.ids import ModelName
from cato.core.tenancy import Access, ApiKey
from cato.core.topology import ModelSpec, model_called, patterns_meet
from cato.lab.chaos.local_pools import LocalPool
from cato.serve.access.keys import new_key

MAIN, SMALL = "big-7b", "small-1b"


def a_model(name: str, *patterns: str, aliases: tuple[str, ...] = ()) -> ModelSpec:
    return ModelSpec(ModelName(name), "demo", "starcoder", aliases, patterns=patterns)


def pools() -> tuple[LocalPool, LocalPool]:
    big = a_model(MAIN, "claude-*", "gpt-*", aliases=("main",))
    small = a_model(SMALL, "claude-*haiku*", aliases=("gpt-own",))
    return LocalPool(big, a_profile()), LocalPool(small, a_profile())


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("claude-opus-5-5", MAIN),
        ("claude-haiku-4-5-20251001", SMALL),  # the longer pattern
        ("gpt-5.1-codex", MAIN),
        ("gpt-own", SMALL),  # an exact name
        (MAIN, MAIN),
        ("Claude-opus", None),
        ("my-claude-x", None),
        ("cato-claude", None),
        ("qwen:cato-claude", None),
    ],
)
def test_an_exact_name_wins_over_patterns_and_the_longest_pattern_over_others(
    name: str, model: str | None
) -> None:
    found = model_called(name, [pool.model for pool in pools()])
    assert (None if found is None else found.name) == model


def test_not_even_a_pattern_for_everything_fits_the_names_of_workflows_or_endless_ones() -> None:
    everything = a_model(MAIN, "*")
    assert model_called("any", [everything]) is everything
    assert model_called("cato-any", [everything]) is None
    assert model_called("x" * 100_000, [everything]) is None


_PATTERNS = st.text("ab*?", min_size=1, max_size=5)
_NAMES = ["".join(letters) for n in range(7) for letters in product("ab", repeat=n)]


@given(_PATTERNS, _PATTERNS)
def test_patterns_meet_where_a_name_fits_both(one: str, other: str) -> None:
    # Of two patterns of 5 letters, the shortest common name has at most 6.
    common = [n for n in _NAMES if fnmatchcase(n, one) and fnmatchcase(n, other)]
    meets = patterns_meet(one, other)
    assert meets == patterns_meet(other, one)
    assert meets or not common
    if len(one) + len(other) <= 6:
        assert meets == bool(common)


async def test_a_model_answers_to_a_name_that_fits_its_pattern_and_is_counted_as_itself(
    tmp_path: Path,
) -> None:
    asked = {"model": "claude-opus-5-5", "prompt": "x", "max_tokens": 2}
    async with running(tmp_path, *pools(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        answer = await http.post("/v1/completions", json=asked)
        used = await kit.records.usage(None)
    receipt = answer.json()["cato"]
    assert (answer.status_code, answer.headers["X-CATO-Model"]) == (200, MAIN)
    assert receipt["task"] == f"model:{MAIN}"
    assert [u.model for u in used] == [MAIN]


async def test_only_exact_names_are_listed_but_any_that_fits_can_be_looked_up(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, *pools(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        listed = [m["id"] for m in (await http.get("/v1/models")).json()["data"]]
        one = (await http.get("/v1/models/claude-haiku-4-5")).json()
        unknown = await http.post("/v1/completions", json={"model": "o9", "prompt": "x"})
    assert listed[:4] == [MAIN, "main", SMALL, "gpt-own"]
    assert not [name for name in listed if "*" in name]
    assert (one["id"], one["root"]) == ("claude-haiku-4-5", SMALL)
    assert "claude-*" in unknown.json()["error"]["message"]


async def test_a_key_may_call_by_pattern_what_it_may_call_by_name(tmp_path: Path) -> None:
    secret, id, digest = new_key()
    access = an_access(Access((ApiKey(id, digest, "team", models=("main",)),)))
    async with (
        running(tmp_path, *pools(), workflows=(COMPLETION,), access=access) as kit,
        kit.http() as http,
    ):
        http.headers["x-api-key"] = secret
        codes = [
            (await http.post("/v1/completions", json={"model": name, "prompt": "x"})).status_code
            for name in ("claude-opus-5-5", "claude-haiku-4-5", "gpt-own")
        ]
        hidden = await http.get("/v1/models/claude-haiku-4-5")
    assert codes == [200, 403, 403]
    assert hidden.status_code == 404
