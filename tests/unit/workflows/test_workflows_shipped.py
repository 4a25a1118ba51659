"""The workflows that ship with CATO, and the schema that editors use for them."""

import json
import pickle
from pathlib import Path

import pytest
import yaml

from cato.core.baseline import baseline_s, warning
from cato.core.budgets import NodeEstimate
from cato.core.ids import NodeId
from cato.core.slo import SloMetric
from cato.core.workflow import LlmSettings, Template, Workflow
from cato.profiles.load import load_profiles
from cato.workflows.json_schema import workflow_json_schema, write_json_schema
from cato.workflows.load import check_inputs, load_workflows

FOLDER = Path(__file__).parents[3] / "workflows"
SCHEMA = FOLDER / "workflow.schema.json"
WORKFLOWS = load_workflows(FOLDER)
CODE = "def area(w, h):\n    return w * h\n"
CHECK = {"ok": False, "code": CODE, "errors": [{"line": 1, "column": 5, "message": "bad"}]}


def the(task: str) -> Workflow:
    return next(w for name, w in WORKFLOWS.items() if name == task)


def prompt_of(task: str, node: str, **names: object) -> str:
    settings = next(n for n in the(task).nodes if n.id == node).settings
    assert isinstance(settings, LlmSettings)
    template: Template | None = settings.fim.context if settings.fim else settings.prompt
    assert template is not None
    given = {k: v for k, v in names.items() if k in {i.name for i in the(task).inputs}}
    return template.render({**check_inputs(the(task), given), **names})


def test_the_four_tasks_promise_what_users_expect() -> None:
    assert {
        name: (w.slo.metric, w.slo.target_s, w.hard_deadline_s) for name, w in WORKFLOWS.items()
    } == {
        "code-completion": (SloMetric.TTFT, 0.2, 2.0),
        "code-generation": (SloMetric.TTFT, 10.0, 120.0),
        "code-translation": (SloMetric.E2E, 45.0, 180.0),
        "code-summarization": (SloMetric.E2E, 6.0, 120.0),
    }


@pytest.mark.parametrize("workflow", WORKFLOWS.values(), ids=list(WORKFLOWS))
def test_the_models_of_the_simulated_deployment_can_keep_what_is_promised(
    workflow: Workflow,
) -> None:
    """Also with answers at their limits, in a batch of eight."""
    profiles = load_profiles(FOLDER.parent / "profiles")
    pools = {"coder-fast": "reference-1.5b@gpu", "coder-large": "reference-7b@gpu-32gb"}
    slowest: dict[NodeId, NodeEstimate] = {}
    for node in workflow.nodes:
        if isinstance(node.settings, LlmSettings):
            profile, prompt_tokens = profiles[pools[node.settings.model]], 800
            first_s = profile.first_token_s(prompt_tokens)
            tokens = node.settings.max_tokens
            whole_s = first_s + tokens * profile.decode_step_s(8, prompt_tokens + tokens / 2)
            slowest[node.id] = NodeEstimate(whole_s, first_s)
    assert baseline_s(workflow, slowest) is not None
    assert warning(workflow, slowest) == ""


@pytest.mark.parametrize("workflow", WORKFLOWS.values(), ids=str)
def test_a_shipped_workflow_travels_by_pickle(workflow: Workflow) -> None:
    assert pickle.loads(pickle.dumps(workflow)) == workflow


def test_every_shipped_file_names_the_schema_and_fits_it() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    for path in FOLDER.glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# yaml-language-server: $schema={SCHEMA.name}\n")
        assert list(validator.iter_errors(yaml.safe_load(text))) == []
    assert not validator.is_valid({"name": "x", "sla": {"metric": "e2e", "target": 3}})


def test_the_schema_file_is_what_the_code_says(tmp_path: Path) -> None:
    write_json_schema(tmp_path / "schema.json")
    expected = (tmp_path / "schema.json").read_text(encoding="utf-8")
    assert json.loads(expected) == workflow_json_schema()
    assert SCHEMA.read_text(encoding="utf-8") == expected, (
        "run: python -m cato.workflows.json_schema"
    )


def test_completion_context_is_all_comments() -> None:
    snippets = {"snippets": [{"path": "a.java", "text": "int f;\nint g;"}]}
    context = prompt_of(
        "code-completion",
        "complete",
        prefix="",
        language="java",
        path="B.java",
        snippets=snippets,
        scope={"scope": ["B", "run"]},
    )
    lines = [line for line in context.split("\n") if line]
    assert lines == [
        "// From a.java:",
        "// int f;",
        "// int g;",
        "// File B.java",
        "// Inside B > run",
    ]
    assert prompt_of("code-completion", "complete", prefix="") == ""


def test_a_generation_prompt_keeps_a_long_instruction_inside_the_comment() -> None:
    prompt = prompt_of("code-generation", "draft", instruction="Add two numbers\nimport os")
    assert prompt == "# Task: Add two numbers\n# import os\n# Python code that does it:\n"


def test_a_refinement_shows_the_attempt_and_its_errors() -> None:
    prompt = prompt_of("code-generation", "refine", instruction="Area", check=CHECK)
    assert CODE in prompt
    assert "# Error in line 1: bad\n" in prompt


def test_a_translation_prompt_ends_in_the_open_fence_of_the_target() -> None:
    names = {"code": CODE, "source_language": "python", "target_language": "java"}
    outline = {"definitions": [{"name": "area"}, {"name": ""}]}
    prompt = prompt_of("code-translation", "translate", outline=outline, **names)
    assert prompt.endswith("in Java, with the names area:\n```java\n")
    assert prompt_of("code-translation", "translate", **names).endswith("in Java:\n```java\n")
    assert prompt_of("code-translation", "repair", check=CHECK, **names).endswith(
        "- line 1: bad\n\nCorrected:\n```java\n"
    )


def test_a_summary_is_made_of_the_code_or_of_the_summaries_of_its_parts() -> None:
    parts = next(n for n in the("code-summarization").nodes if n.id == "parts")
    assert parts.when is not None
    assert not parts.when.evaluate({"split": {"chunks": [CODE]}})
    assert not parts.when.evaluate({})
    assert parts.when.evaluate({"split": {"chunks": [CODE, CODE]}})
    assert prompt_of("code-summarization", "summary", code=CODE).startswith(CODE)
    prompt = prompt_of(
        "code-summarization", "summary", code=CODE, parts=[{"text": " One.\n"}, {"text": "Two."}]
    )
    assert "# - One.\n# - Two.\n" in prompt
    assert CODE not in prompt


def test_prompts_of_modest_inputs_fit_the_demo_model() -> None:
    # 1,024 tokens of about 2.7 characters, less the answer: 64 tokens and 160.
    long_code = CODE * 200
    assert len(prompt_of("code-summarization", "summary", code=long_code)) < 2_590
    assert len(prompt_of("code-summarization", "parts", code="", item=long_code)) < 2_590
    snippets = {"snippets": [{"path": "a.py", "text": long_code}] * 2}
    prompt = prompt_of(
        "code-generation", "draft", instruction="x", context=long_code, examples=snippets
    )
    assert len(prompt) < 2_330
