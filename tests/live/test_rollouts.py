"""Rollouts on a live application: 50 streams at a time, a good canary and one that is too slow."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cato.core.profile import Profile
from tests.live.conftest import ROOT, App, patient_workflows, wait_ready

pytestmark = pytest.mark.live

STREAMS = 50
TOKENS = 12
PATH = "/v1/admin/rollouts"
# The default limits want hours of traffic; these want minutes, and still tell 1 from 2.
RULE = {
    "shares": [0.05, 0.25],
    "shadow_share": 0,
    "min_calls": 40,
    "max_calls": 100_000,
    "hold_s": 1,
    "miss_limit": 0.15,
    "error_limit": 0.15,
    "ttft_limit": 0.4,
}
