"""What people did with completions: kept once, by task and model, and for one's own alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ingress_kit import COMPLETION, a_fast_pool, an_access, running
from store_kit import a_receipt, an_execution, facts

from cato.control.profiler import Profiler
from cato.core.tenancy import Access, ApiKey
from cato.serve.access.keys import new_key
from cato.serve.ingress.feedback import Feedback, Reaction
from cato.store.store import MetadataStore


def lines(page: bytes, name: str) -> list[str]:
    return [line for line in page.decode().splitlines() if line.startswith(name)]


async def test_reactions_are_counted_once_by_task_and_model_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    profiler = Profiler(path)
    receipt = replace(a_receipt(an_execution(llm=facts()), id="r1", task="fill"), tenant="a")
    await profiler.record(((receipt, ()),))
    view = Feedback("r1", Reaction.VIEW, view_id="v1", tenant="a")
    select = Feedback("r1", Reaction.SELECT, 0, "v1", "line", 0.4, "a")
    await profiler.react((view, select))
    await profiler.react((view,))
    page = await profiler.metrics()
    await profiler.close()
    model = facts().model
    labels = f'model="{model}",reaction="{{}}",task="fill"'
    for reaction in ("view", "select"):
        name = "cato_completion_reactions_total{" + labels.format(reaction) + "}"
        assert lines(page, name) == [f"{name} 1.0"]
        name = "cato_completion_reaction_e2e_seconds_sum{" + labels.format(reaction) + "}"
        assert lines(page, name) == [f"{name} {receipt.e2e_s}"]
    store = MetadataStore.open(path)
    kept = {r.reaction: r for r in store.reactions("r1")}
    store.close()
    assert set(kept) == {"view", "select"}
    assert (kept["select"].select_kind, kept["select"].after_s) == ("line", 0.4)
    assert (kept["view"].task, kept["view"].model, kept["view"].after_s) == ("fill", model, None)


async def test_reactions_to_unknown_or_others_completions_are_left_out(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "metadata.db")
    receipt = replace(a_receipt(an_execution(llm=facts()), id="r1"), tenant="a")
    await profiler.record(((receipt, ()),))
    await profiler.react(
        (
            Feedback("made-up", Reaction.SELECT, tenant="a"),
            Feedback("r1", Reaction.SELECT, tenant="b"),
        )
    )
    page = await profiler.metrics()
    await profiler.close()
    assert lines(page, "cato_completion_reactions_total{") == []


async def test_the_key_says_whose_reaction_it_is(tmp_path: Path) -> None:
    secret, id, digest = new_key()
    access = an_access(Access((ApiKey(id, digest, "team-a"),)))
    event = {"type": "select", "completion_id": "cmpl-r1", "choice_index": 0}
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access) as kit,
        kit.http() as http,
    ):
        answer = await http.post("/v1/events", json=event, headers={"api-key": secret})
    assert answer.status_code == 200
    (told,) = kit.feedback.noted
    assert (told.request_id, told.tenant) == ("r1", "team-a")
