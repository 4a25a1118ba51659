"""Environment of all tests: read by Ray and by engines when they are imported or started."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
from hypothesis import settings

from cato.cli.serve import CALM, QUIET
from cato.serve import haproxy
from cato.serve.ports import own_cluster

# A folder of this test session's own, short enough for Unix sockets.
_RUN_DIR = tempfile.mkdtemp(prefix="cato-t-")
os.environ.update(
    CATO_RUN_DIR=_RUN_DIR,
    XDG_STATE_HOME=os.path.join(_RUN_DIR, "state"),
    HF_HUB_OFFLINE="1",
    RAY_AUTH_MODE="disabled",
    RAY_SERVE_THROUGHPUT_OPTIMIZED="1",
    RAY_SERVE_ENABLE_HA_PROXY="1",
    RAY_SERVE_HAPROXY_BINARY_PATH=haproxy.path(),
    RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="1",
    # On a busy machine HAProxy's actor takes longer than the 5 s after which Serve kills it.
    RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="90",
    **haproxy.RETRIES,
    **QUIET,
    **CALM,
    **own_cluster(_RUN_DIR),
)

# `make check` must take under a minute and say the same of the same code each time;
# HYPOTHESIS_PROFILE=thorough looks longer, and elsewhere each time. A test that runs alone may see
# other examples than in a full run: Hypothesis also tries constants of the modules that are loaded.
settings.register_profile("cato", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "cato"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The soak first: it sleeps for most of five minutes, in which other workers do the rest."""
    items.sort(key=lambda item: "five_minutes_of_work" not in item.name)


def pytest_collection_finish() -> None:
    """Modules and tests stay: to look at them again and again took a fifth of the CPU time."""
    gc.collect()
    gc.freeze()
