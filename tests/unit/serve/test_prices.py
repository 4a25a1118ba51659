"""What usage costs, and how it is summed up."""

from __future__ import annotations

import csv
import io
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ingress_kit import COMPLETION, a_fast_pool, an_access, running
from kits.builders import a_parcel
from test_keys import PROMPT, a_key, bearer
from typer.testing import CliRunner

from cato.cli import app as cli
from cato.config.schema import IngressArgs
from cato.core.ids import DeploymentName, HostId, ModelName, PoolName, ReplicaId
from cato.core.prices import Prices, TokenPrice
from cato.core.residency import Resident, card_time
from cato.core.tenancy import Access, CardTime, Role, Usage
from cato.serve.access.usage import summed
from cato.store.store import MetadataStore

DAY = "2026-11-21"


def used(
    tenant: str = "red", *, day: str = DAY, model: str = "m", task: str = "t",
    prompt: int = 0, cached: int = 0, output: int = 0,
) -> Usage:  # fmt: skip
    return Usage(day, tenant, "k", task, model, 1, prompt, cached, output)


def test_tokens_cost_what_the_file_says_for_a_million() -> None:
    prices = Prices("EUR", {"m": TokenPrice(prompt=2.0, output=8.0, cached_prompt=0.5)})
    one = used(prompt=1_000_000, cached=400_000, output=100_000)
    assert prices.costs([one], [one], [], {}) == [pytest.approx(0.6 * 2 + 0.4 * 0.5 + 0.1 * 8)]
    assert prices.costs([used(model="other", prompt=5)], [], [], {}) == [None]


def test_card_hours_are_divided_by_the_tokens_that_were_computed() -> None:
    prices = Prices("EUR", card_hour=3.0)
    red, blue = used("red", prompt=900, cached=300, output=100), used("blue", output=300)
    other_day = used("blue", day="2026-11-22", output=5)
    held = [CardTime(DAY, "m", 2 * 3600.0), CardTime("2026-11-22", "m", 3600.0)]
    assert prices.costs([red, other_day], [red, blue, other_day], held, {}) == [
        pytest.approx(2 * 3.0 * 700 / 1000),
        pytest.approx(3.0),
    ]


def test_no_count_of_cached_tokens_makes_a_cost_negative() -> None:
    one = used(prompt=100, cached=300)
    by_token = Prices("EUR", {"m": TokenPrice(prompt=2e6, output=8e6, cached_prompt=1e6)})
    assert by_token.costs([one], [one], [], {}) == [100.0]
    other = used("blue", prompt=50)
    by_card = Prices("EUR", card_hour=3.0)
    held = [CardTime(DAY, "m", 3600.0)]
    assert by_card.costs([one, other], [one, other], held, {}) == [0.0, 3.0]


def test_a_price_for_tokens_comes_before_one_for_cards() -> None:
    prices = Prices("EUR", {"m": TokenPrice(1.0, 1.0, 1.0)}, card_hour=3.0)
    one = used(output=1_000_000)
    assert prices.costs([one], [one], [CardTime(DAY, "m", 3600.0)], {}) == [1.0]


def test_adapters_cost_what_their_base_does() -> None:
    by_token = Prices("EUR", {"base": TokenPrice(1.0, 1.0, 1.0)})
    one, base = used(model="adapter", output=1_000_000), used(model="base", output=1_000_000)
    assert by_token.costs([one], [one], [], {"adapter": "base"}) == [1.0]
    by_card = Prices("EUR", card_hour=3.0)
    held = [CardTime(DAY, "base", 3600.0)]
    assert by_card.costs([one, base], [one, base], held, {"adapter": "base"}) == [1.5, 1.5]


def test_cards_are_held_by_all_replicas_of_a_model() -> None:
    def resident(id: str, model: str, cards: int) -> Resident:
        return Resident(
            ReplicaId(id), PoolName("p"), DeploymentName("d"), ModelName(model), HostId("h"),
            "gpu", cards, "ready", 1.0,
        )  # fmt: skip

    found = card_time(
        [resident("a", "m", 2), resident("b", "m", 2), resident("c", "n", 1)], DAY, 60
    )
    assert found == (CardTime(DAY, "m", 240.0), CardTime(DAY, "n", 60.0))


def test_card_time_is_added_up_in_the_store(tmp_path: Path) -> None:
    store = MetadataStore.open(tmp_path / "m.db")
    minute = (CardTime(DAY, "m", 60.0),)
    twice = a_parcel(held=minute)
    store.write([twice, a_parcel(held=minute)])
    store.write([twice])  # the answer of the first commit was lost
    store.write([a_parcel(held=(*minute, CardTime("2026-12-01", "m", 1.0)))])
    assert store.card_time(until="2026-11-30") == (CardTime(DAY, "m", 180.0),)
    store.close()


def test_rows_are_summed_by_what_is_asked_and_no_price_is_no_zero() -> None:
    rows = [
        used("red", task="a", output=1),
        used("red", task="b", output=2),
        used("blue", output=4),
    ]
    found = summed(rows, [1.0, None, None], ("tenant",))
    assert [(r["tenant"], r["requests"], r["output_tokens"], r["cost"]) for r in found] == [
        ("blue", 1, 4, None),
        ("red", 2, 3, 1.0),
    ]


async def test_usage_over_http_has_costs_groups_days_and_a_table_for_spreadsheets(
    tmp_path: Path,
) -> None:
    boss, key = a_key("platform", role=Role.OPERATOR)
    user, other = a_key("red")
    prices = Prices("EUR", {"sim-fast": TokenPrice(1e6, 1e6, 1e6)})
    async with (
        running(
            tmp_path,
            a_fast_pool(),
            workflows=(COMPLETION,),
            access=an_access(Access((key, other))),
            prices=prices,
        ) as kit,
        kit.http() as http,
    ):
        for _ in range(2):
            await http.post("/v1/completions", json=PROMPT, headers=bearer(user))

        async def ask(query: str, whom: str = boss) -> Any:
            return await http.get(f"/v1/usage?{query}", headers=bearer(whom))

        (row,) = (await ask("by=tenant,model")).json()["data"]
        table = (await ask("by=tenant&format=csv")).text
        none = (await ask("until=2020-01-01")).json()["data"]
        own = (await ask("", user)).json()
        wrong = [
            await ask(q)
            for q in (
                "by=color",
                "by=day,day",
                "since=today",
                "until=1",
                "since=2026-02-30",
                "since=2026-11-02&until=2026-11-01",
            )
        ]
    assert row["cost"] == row["prompt_tokens"] + row["output_tokens"] > 0
    assert (row["tenant"], row["requests"]) == ("red", 2)
    assert {"day", "key", "task"}.isdisjoint(row)
    assert [r["tenant"] for r in csv.DictReader(io.StringIO(table))] == ["red"]
    assert none == []
    assert own["currency"] == "EUR"
    assert [w.status_code for w in wrong] == [400] * 6


async def test_a_tenants_part_of_a_card_is_of_what_all_used(tmp_path: Path) -> None:
    secrets = dict(a_key(tenant) for tenant in ("red", "blue"))
    access = an_access(Access(tuple(secrets.values())))
    prices = Prices("EUR", card_hour=8.0)
    async with (
        running(
            tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access, prices=prices
        ) as kit,
        kit.http() as http,
    ):
        costs = []
        for secret in secrets:
            await http.post("/v1/completions", json=PROMPT, headers=bearer(secret))
        (day,) = {u.day for u in await kit.records.usage(None)}
        kit.records.card_times = [CardTime(day, "sim-fast", 3600.0)]
        for secret in secrets:
            own = (await http.get("/v1/usage", headers=bearer(secret))).json()["data"]
            costs.append(own[0]["cost"])
    assert costs == [4.0, 4.0]


def test_the_shell_sums_up_and_takes_prices_from_the_deployment(tmp_path: Path) -> None:
    store = MetadataStore.open(tmp_path / "m.db")
    red = used("red", model="simulated-7b", output=1_000_000)
    store.write([a_parcel(red, used("blue", output=1))])
    store.close()
    file = tmp_path / "d.yaml"
    shipped = Path(__file__).parents[3] / "deployments" / "simulated.yaml"
    price = "prices: {currency: EUR, models: {simulated-7b: {prompt: 1, output: 2.5}}}"
    body = "      max_body: 4MB"
    file.write_text(shipped.read_text().replace(body, f"{body}\n      {price}"))
    asked = ["keys", "usage", "--csv", "--by", "tenant,model", "--store", str(tmp_path / "m.db")]
    done = CliRunner().invoke(cli, [*asked, "--deployment", str(file)])
    assert done.exit_code == 0, done.output
    assert "red,simulated-7b,1,0,0,1000000,2.5" in done.stdout
    assert "blue,m,1,0,0,1," in done.stdout


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--by", "color"),
        ("--by", "day,day"),
        ("--by", ""),
        ("--since", "2026-1-5"),
        ("--since", "1 Nov 2026"),
        ("--since", ""),
        ("--until", "2026-02-30"),
        ("--until", "20261130"),
    ],
)
def test_wrong_groups_and_days_are_refused_in_the_shell(
    tmp_path: Path, option: str, text: str
) -> None:
    asked = ["keys", "usage", option, text, "--store", str(tmp_path / "m.db")]
    wrong = CliRunner().invoke(cli, asked)
    assert wrong.exit_code == 1
    assert wrong.stderr.startswith(f"{option} must be a ")


def test_a_last_day_before_the_first_is_refused_in_the_shell(tmp_path: Path) -> None:
    days = ["--since", "2026-11-02", "--until", "2026-11-01"]
    wrong = CliRunner().invoke(cli, ["keys", "usage", *days, "--store", str(tmp_path / "m.db")])
    assert wrong.exit_code == 1
    assert wrong.stderr.startswith("--until (2026-11-01) must not be before --since (2026-11-02)")


def test_days_of_usage_in_the_shell_are_both_included(tmp_path: Path) -> None:
    with closing(MetadataStore.open(tmp_path / "m.db")) as store:
        days = ("2026-11-04", "2026-11-05", "2026-11-06")
        store.write([a_parcel(*[used("red", day=day) for day in days])])
    asked = ["keys", "usage", "--csv", "--by", "day", "--store", str(tmp_path / "m.db")]
    done = CliRunner().invoke(cli, [*asked, "--since", "2026-11-05", "--until", "2026-11-06"])
    assert [line[:10] for line in done.stdout.splitlines()[1:]] == ["2026-11-05", "2026-11-06"]


@pytest.mark.parametrize(
    ("prices", "rule"),
    [
        ({"currency": "EUR"}, "card_hour"),
        ({"currency": "euro", "card_hour": 1}, "pattern"),
        ({"currency": "EUR", "card_hour": -1}, "greater"),
        ({"currency": "EUR", "models": {"m": {"prompt": 1}}}, "output"),
    ],
)
def test_prices_that_make_no_sense_are_refused(prices: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        IngressArgs(prices=prices)  # type: ignore[arg-type]
