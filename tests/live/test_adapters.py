"""Adapters that are added to a base on a real cluster, served, and removed."""

from __future__ import annotations

import pytest

from cato.engines.simulated import simulated_seed, simulated_text
from tests.live.conftest import App
from tests.live.test_losses import until
from tests.live.test_profile import run_cato
from tests.live.test_shared_pool import PROMPT, TOKENS, ask

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]


def test_an_adapter_is_added_served_kept_and_removed(app: App) -> None:
    import ray

    from cato.control import actors

    where = ("--address", ray.get_runtime_context().gcs_address)
    new = ("models", "add", "team-coder", "--base=coder-fast", "--source=/lora/team")
    added = run_cato(*new, "--alias=team", *where, timeout_s=200)
    assert "team-coder is served by small, beside sim-small" in added
    until(lambda: ask(app, "team").status_code == 200)
    answer = ask(app, "team").json()
    assert answer["model"] == "team-coder"
    assert answer["choices"][0]["text"] == simulated_text(
        simulated_seed(0, "team-coder"), PROMPT, TOKENS
    )
    assert "team-coder" in run_cato("models", "list", *where, timeout_s=100)
    again = run_cato("models", "add", "other", *new[3:], *where, timeout_s=100, fails=True)
    assert "sim-small already has 1 added adapters" in again

    ray.kill(actors.get(actors.PROVISIONER), no_restart=False)
    until(_is_known_again)
    assert ask(app, "team-coder").status_code == 200

    run_cato("models", "remove", "team-coder", *where, timeout_s=100)
    until(lambda: ask(app, "team").status_code == 404)
    assert ask(app, "coder-fast").status_code == 200


def _is_known_again() -> bool:
    import ray
    from ray.exceptions import RayError

    from cato.control import actors

    try:
        topology = ray.get(actors.get(actors.PROVISIONER).topology.remote(), timeout=30)
    except (RayError, ValueError):
        return False
    pools = topology.pools if topology else ()
    return any("team-coder" in pool.model.names for pool in pools)
