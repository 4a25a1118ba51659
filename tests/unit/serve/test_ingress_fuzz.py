"""Whatever is asked, the answer is in the document, and it is never a server's error.

`CATO_FUZZ_CASES` is how many cases each document gets, over all its operations; the seed is fixed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, served
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

CASES = int(os.environ.get("CATO_FUZZ_CASES", "300"))
TABBY = Path(__file__).with_name("tabby_api.yaml")
# Random names are no models: most cases should get further than that.
NAMES = ("sim-fast", "fast", "cato-completion", "cato-generation", "cato-auto", "qwen:cato-auto")
TASKS = ("code-completion", "code-generation")
INPUTS: dict[str, dict[str, object]] = {
    "code-completion": {"prefix": "x", "suffix": ""},
    "code-generation": {"instruction": "x"},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("workflows")
    with served(folder, a_fast_pool(), workflows=(COMPLETION, GENERATION)) as url:
        yield url


def test_of_all_that_the_document_allows_and_what_it_does_not(url: str) -> None:
    api = schemathesis.openapi.from_url(f"{url}/openapi.json")
    ask_all(api, (response_schema_conformance, content_type_conformance))


def test_of_all_that_tabbys_clients_may_ask(url: str) -> None:
    api = schemathesis.openapi.from_dict(yaml.safe_load(TABBY.read_text()))
    api.config.update(base_url=url)
    ask_all(api, (response_schema_conformance, status_code_conformance))


def ask_all(api: Any, checks: tuple[Any, ...]) -> None:
    operations = [found.ok() for found in api.get_all_operations()]
    # What has nothing to vary is asked once.
    varied = [o for o in operations if o.body or o.query or o.path_parameters]
    for operation in operations:
        ask(operation, checks, -(-CASES // len(varied)) if operation in varied else 1)


def ask(operation: Any, checks: tuple[Any, ...], examples: int) -> None:
    """Two cases in three are allowed by the document, the others are not."""
    right = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    cases = right
    if operation.body:
        wrong = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
        cases = st.one_of(right, right, wrong)

    @seed(0)
    @given(cases, st.sampled_from((*NAMES, None)), st.sampled_from((*TASKS, None)))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def one(case: Any, model: str | None, task: str | None) -> None:
        name_real_things(case, model, task)
        response = case.call(timeout=60)
        if response.status_code == 504:  # a deadline of its own, which may be short
            assert "deadline" in response.text
            return
        assert response.status_code < 500, (case.body, response.text)
        case.validate_response(response, checks=checks)

    one()


def name_real_things(case: Any, model: str | None, task: str | None) -> None:
    """Let a case name a `model` and a `task` that there are; None leaves it as it is."""
    if (
        model is not None
        and isinstance(case.body, dict)
        and isinstance(case.body.get("model"), str)
    ):
        case.body["model"] = model
        case.headers.pop("X-CATO-Task", None)
        if isinstance(case.body.get("cato"), dict):
            case.body["cato"].pop("task", None)
    if task is not None and "task" in (case.path_parameters or {}):
        case.path_parameters["task"] = task
        if isinstance(case.body, dict):
            case.body["inputs"] = INPUTS[task]
