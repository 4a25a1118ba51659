"""Workflow files: what is accepted, and that everything wrong is said at once."""

import copy
import os
import pickle
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cato.core.errors import ConfigError, InputError
from cato.core.slo import Slo, SloMetric
from cato.core.workflow import InputSpec, LlmSettings, NodeKind, Workflow
from cato.workflows.load import check_inputs, load_workflow, load_workflows

A_WORKFLOW = """
name: review
sla: {metric: e2e, target: 2s}
inputs: {code: str, language: {type: str, default: python, description: "of the code"}}
nodes:
  parse: {type: analyze, source: "{{ code }}", language: "{{ language }}"}
  draft: {type: llm, model: m, needs: [parse], prompt: "Say: {{ code }}", max_tokens: 100}
output: draft
"""

A_LOOP = """
name: review
sla: {metric: ttft, target: 1s}
inputs: {task: str}
nodes:
  draft: {type: llm, model: m, prompt: "{{ task }}", max_tokens: 10}
  check: {type: validate, needs: [draft], source: "{{ fix.text or draft.text }}", language: c}
  fix:
    type: llm
    model: m
    needs: [check]
    when: not check.ok
    repeat: {until: check.ok and fix.text, max: 3, redo: [check]}
    prompt: "{{ check.code }} {{ fix.text }}"
    max_tokens: 10
stream: fix else draft
output: fix else draft
"""

HUGE = "0x" + "f" * 5000  # Python writes no number of so many digits


def test_an_id_with_a_dot_is_reported_beside_the_names_in_its_templates(tmp_path: Path) -> None:
    data = yaml.safe_load(A_WORKFLOW)
    data["nodes"]["0.draft"] = {
        **data["nodes"].pop("draft"),
        "needs": [],
        "prompt": "{{ parse.ok }}",
    }
    with pytest.raises(ConfigError) as caught:
        load_workflow(a_file(tmp_path, yaml.safe_dump(data)))
    found = {problem.path: problem.rule for problem in caught.value.problems}
    assert "nodes.0.draft" in found
    assert "'parse', which may not have run before" in found["nodes.0.draft.prompt"]


@pytest.mark.parametrize(
    ("key", "text", "rule"),
    [
        ("prompt", "{{ parse.chunk }}", "no 'chunk' (did you mean 'chunks'?)"),
        ("prompt", "{{ parse['text'] }}", "no 'text'; it has ok, language"),
        ("when", "parse.okay", "no 'okay' (did you mean 'ok'?)"),
        ("prompt", "{{ parse.chunks | length }} {{ parse.get('ok') }}", ""),
        ("prompt", "{% for parse in code %}{{ parse.anything }}{% endfor %}", ""),
    ],
)
def test_what_a_template_looks_up_in_a_result_must_be_in_it(
    tmp_path: Path, key: str, text: str, rule: str
) -> None:
    data = yaml.safe_load(A_WORKFLOW)
    data["nodes"]["draft"][key] = text
    path = a_file(tmp_path, yaml.safe_dump(data))
    if not rule:
        load_workflow(path)
        return
    with pytest.raises(ConfigError) as caught:
        load_workflow(path)
    (problem,) = caught.value.problems
    assert problem.path == f"nodes.draft.{key}"
    assert rule in problem.rule


@pytest.mark.parametrize(
    ("where", "text", "rule"),
    [
        ("reviews.prompt", "{{ draft.text }}", "'draft' has `each`: its result is a list, without"),
        ("reviews.prompt", "{{ draft['text'] }}", "loop over it"),
        ("reviews.prompt", "{{ draft.index }}{{ draft.count }}", ""),
        ("reviews.prompt", "{% for one in draft %}{{ one.text }}{% endfor %}", ""),
        ("reviews.prompt", "{{ code.foo.bar }}", "input 'code' is text, which has no 'foo'"),
        ("reviews.prompt", "{{ code.upper() }} {{ code.count('a') }}", ""),
        ("reviews.prompt", "{{ level.foo }}", "input 'level' is a whole number, which has no"),
        ("reviews.prompt", "{{ files.text }}", "input 'files' is a list, which has no 'text'"),
        ("reviews.prompt", "{% set code = draft[0] %}{{ code.text }}", ""),
        ("draft.each", "level", "must be a list; input 'level' is a whole number"),
        ("draft.each", " code ", "must be a list; input 'code' is text"),
        ("draft.each", "parse", "must be a list; the result of node 'parse' has ok, language"),
        ("draft.each", "files", ""),
        ("draft.each", "code.splitlines()", ""),
        ("reviews.each", "draft", ""),
    ],
)
def test_a_list_and_a_scalar_have_no_fields_and_only_a_list_has_items(
    tmp_path: Path, where: str, text: str, rule: str
) -> None:
    data = yaml.safe_load(A_WORKFLOW)
    data["inputs"] |= {"level": "int", "files": {"type": "list"}}
    data["nodes"]["draft"]["each"] = "parse.chunks"
    data["nodes"]["reviews"] = {**data["nodes"]["draft"], "needs": ["draft"], "each": "files"}
    data["output"] = "reviews"
    id, key = where.split(".")
    data["nodes"][id][key] = text
    found = problems_of(tmp_path, yaml.safe_dump(data))
    assert [p.partition(":")[0] for p in found] == ([f"nodes.{where}"] if rule else [])
    assert rule in "".join(found)


@pytest.mark.parametrize(
    ("changes", "path", "rule"),
    [
        ({"token_limit": "0"}, "token_limit", "must be a whole number of at least 1, is 0"),
        ({"token_limit": "2.5"}, "token_limit", "must be a whole number of at least 1, is 2.5"),
        ({"token_limit": "3"}, "", ""),
        ({"token_limit": "most"}, "token_limit", "with the defaults of its inputs"),
        ({"token_limit": "most", "when": "most > 0"}, "", ""),
        ({"token_limit": "most", "optional": True}, "", ""),
        ({"token_limit": "code | length"}, "", ""),
        ({"each": "3"}, "each", "is not a list but int"),
        ({"each": "'abc' | upper"}, "each", "is not a list but str"),
        ({"each": "files | first"}, "each", "is not a list but str"),
        ({"each": "[1, 2]"}, "", ""),
        ({"each": "files"}, "", ""),
    ],
)
def test_a_value_that_a_node_can_never_use_is_a_problem_of_the_file(
    tmp_path: Path, changes: dict[str, Any], path: str, rule: str
) -> None:
    data = yaml.safe_load(A_WORKFLOW)
    data["inputs"] |= {"most": {"type": "int", "default": 0}}
    data["inputs"] |= {"files": {"type": "list", "default": ["a.py"]}}
    data["nodes"]["draft"] |= changes
    file = a_file(tmp_path, yaml.safe_dump(data))
    if not rule:
        load_workflow(file)
        return
    with pytest.raises(ConfigError) as caught:
        load_workflow(file)
    (problem,) = caught.value.problems
    assert problem.path == f"nodes.draft.{path}"
    assert rule in problem.rule


def test_no_task_has_the_name_of_the_model_that_chooses_one(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, A_WORKFLOW.replace("name: review", "name: auto"))
    assert "this name is taken" in problem


def a_file(folder: Path, text: str, name: str = "review.yaml") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text, f"{old!r} is not in the example"
        text = text.replace(old, new)
    return text


def problems_of(folder: Path, text: str) -> list[str]:
    """Problems without the name of the file; empty for a file that loads."""
    path = a_file(folder, text)
    try:
        load_workflow(path)
    except ConfigError as error:
        return [str(p).removeprefix(str(path)).lstrip(":").lstrip() for p in error.problems]
    return []


def test_a_file_becomes_frozen_values(tmp_path: Path) -> None:
    workflow = load_workflow(a_file(tmp_path, A_WORKFLOW))
    assert (workflow.name, workflow.slo) == ("review", Slo(SloMetric.E2E, 2.0))
    assert workflow.inputs == (
        InputSpec("code", "str", True, None, ""),
        InputSpec("language", "str", False, "python", "of the code"),
    )
    parse, draft = workflow.nodes
    assert (parse.kind, draft.kind, draft.needs) == (NodeKind.ANALYZE, NodeKind.LLM, ("parse",))
    assert isinstance(draft.settings, LlmSettings)
    assert (draft.settings.max_tokens, draft.settings.expected_tokens) == (100, 50)
    assert draft.settings.prompt is not None
    assert draft.settings.prompt.render({"code": "{{ 1 }}"}) == "Say: {{ 1 }}"
    assert (workflow.output, workflow.stream) == (("draft",), ())
    assert pickle.loads(pickle.dumps(workflow)) == workflow


def test_the_hard_deadline_is_twenty_targets_but_not_under_ten_seconds(tmp_path: Path) -> None:
    def deadline_s(sla: str) -> float:
        text = changed(A_WORKFLOW, ("metric: e2e, target: 2s", sla))
        return load_workflow(a_file(tmp_path, text)).hard_deadline_s

    assert deadline_s("metric: e2e, target: 2s") == 40.0
    assert deadline_s("metric: e2e, target: 100ms") == 10.0
    assert deadline_s("metric: e2e, target: 1.5m, deadline: 2m") == 120.0


def test_nodes_come_in_an_order_that_can_be_run(tmp_path: Path) -> None:
    text = changed(A_WORKFLOW, ("needs: [parse]", "needs: [b, a]"), ("parse:", "b:"))
    text = changed(text, ("nodes:\n", "nodes:\n  a: {type: transform, text: x, needs: [b]}\n"))
    assert [n.id for n in load_workflow(a_file(tmp_path, text)).nodes] == ["b", "a", "draft"]


def test_a_loop_sees_the_last_round_of_the_repeating_node(tmp_path: Path) -> None:
    workflow = load_workflow(a_file(tmp_path, A_LOOP))
    fix = workflow.nodes[2]
    assert fix.repeat is not None
    assert (fix.repeat.max_rounds, fix.repeat.redo) == (3, ("check",))
    assert workflow.stream == ("fix", "draft")


def test_a_fan_out_has_eight_items_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    text = changed(
        A_WORKFLOW,
        ("needs: [parse],", "needs: [parse], each: parse.chunks,"),
        ("Say: ", "{{ item }}"),
    )
    assert load_workflow(a_file(tmp_path, text)).nodes[1].max_items == 8
    text = changed(text, ("needs: [parse],", "needs: [parse], max_items: 3,"))
    assert load_workflow(a_file(tmp_path, text)).nodes[1].max_items == 3


def test_a_prompt_is_a_file_beside_the_workflow_or_a_text(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "p.j2").write_text("From a file: {{ code }}\n", encoding="utf-8")
    text = changed(A_WORKFLOW, ('"Say: {{ code }}"', "prompts/p.j2"))
    settings = load_workflow(a_file(tmp_path, text)).nodes[1].settings
    assert isinstance(settings, LlmSettings)
    assert settings.prompt is not None
    assert settings.prompt.render({"code": "c"}) == "From a file: c"
    text = changed(
        A_WORKFLOW, ('prompt: "Say: {{ code }}"', "chat: '{{ code }}', system: Be kind.")
    )
    settings = load_workflow(a_file(tmp_path, text)).nodes[1].settings
    assert isinstance(settings, LlmSettings)
    assert settings.system is not None
    assert settings.system.render({}) == "Be kind."


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.j2").write_text("From a file: {{ code }}\n", encoding="utf-8-sig")
    text = changed(A_WORKFLOW, ('"Say: {{ code }}"', "p.j2"))
    settings = load_workflow(a_file(tmp_path, text)).nodes[1].settings
    assert isinstance(settings, LlmSettings)
    assert settings.prompt is not None
    assert settings.prompt.render({"code": "c"}) == "From a file: c"


def test_prompt_files_outside_the_folder_are_refused(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    (tmp_path / "secret.j2").write_text("secret", encoding="utf-8")
    (inside / "link.j2").symlink_to(tmp_path / "secret.j2")
    (inside / "loop.j2").symlink_to(inside / "loop.j2")
    for name in ("../secret.j2", str(tmp_path / "secret.j2"), "x/../../secret.j2", "link.j2"):
        text = changed(A_WORKFLOW, ("Say: {{ code }}", name))
        (problem,) = problems_of(inside, text)
        assert problem.startswith("nodes.draft.prompt: must be a file in the workflow file")
    for name in ("loop.j2", "absent.j2", "prompt.txt", "nul\\0.j2"):
        text = changed(A_WORKFLOW, ("Say: {{ code }}", name))
        (problem,) = problems_of(inside, text)
        assert problem.startswith("nodes.draft.prompt: ")


def test_engine_settings_go_into_extra(tmp_path: Path) -> None:
    more = "max_tokens: 9, temperature: 0, stop: ['x'], seed: 7, extra: {top_k: 5}"
    text = changed(A_WORKFLOW, ("max_tokens: 100", more))
    settings = load_workflow(a_file(tmp_path, text)).nodes[1].settings
    assert isinstance(settings, LlmSettings)
    assert settings.extra == {"temperature": 0.0, "stop": ["x"], "seed": 7, "top_k": 5}


@pytest.mark.parametrize(
    ("number", "shown"), [("1" * 400, "1" * 59 + "…"), (HUGE, "a number of thousands of digits")]
)
def test_numbers_that_no_float_holds_are_problems(tmp_path: Path, number: str, shown: str) -> None:
    found = problems_of(
        tmp_path,
        f"""
        name: review
        sla: {{metric: {number}, target: 200ms}}
        inputs: {{share: {{type: float, default: {number}}}}}
        nodes:
          draft: {{type: llm, model: m, prompt: "a", max_tokens: {number}}}
        output: draft
        """,
    )
    assert sorted(found) == [
        f"inputs.share.default: must be a number of at most 1.8e+308, as `type` says "
        f"(found {shown})",
        f"nodes.draft.max_tokens: must be at most 131072 (found {shown})",
        f"sla.metric: must be one of 'ttft', 'tpot' or 'e2e' (found {shown})",
    ]


def test_all_problems_of_a_file_are_said_at_once(tmp_path: Path) -> None:
    found = problems_of(
        tmp_path,
        """
        name: Review
        sla: {metric: ttft, target: 200, deadline: 2s}
        inputs: {code: str, level: {type: int, default: high}, item: text}
        nodes:
          parse: {type: analyse, source: "{{ code }}", language: c}
          lint: {type: validate, needs: [prase], source: "{{ code }}", language: "{{ langage }}"}
          draft: {type: llm, needs: [lint], model: m, prompt: "{{ code", max_token: 3}
          last: {type: transform, needs: [draft], text: "{{ lint.ok }}", optional: 1, budget: 3}
        output: last else drat
        streams: last
        """,
    )
    assert sorted(found) == [
        "inputs.item.type: must be one of 'str', 'int', 'float', 'bool' or 'list' (found 'text')",
        "inputs.item: this name already has a meaning in templates",
        "inputs.level.default: must be a whole number, as `type` says (found 'high')",
        "name: must be small letters, digits and '-', with a letter first, at most 63 "
        "(found 'Review')",
        "nodes.draft.max_token: unknown key (did you mean 'max_tokens'?)",
        "nodes.draft.max_tokens: this key is required",
        "nodes.last.budget: must be a duration with a unit, such as 200ms, 1.5s or 2m (found 3)",
        "nodes.last.optional: must be true or false (found 1)",
        "nodes.lint.language: unknown name 'langage'; known: code, item, level",
        "nodes.lint.needs: unknown node 'prase' (did you mean 'parse'?)",
        "nodes.parse.type: must be one of 'llm', 'retrieve', 'analyze', 'validate', 'transform' "
        "(did you mean 'analyze'?) (found 'analyse')",
        "output: unknown node 'drat' (did you mean 'draft'?)",
        "sla.metric: an SLA on ttft needs `stream`, the node whose tokens count",
        "sla.target: must be a duration with a unit, such as 200ms, 1.5s or 2m (found 200)",
        "streams: unknown key (did you mean 'stream'?)",
    ]


def test_all_problems_of_all_files_are_said_at_once(tmp_path: Path) -> None:
    a_file(tmp_path, A_WORKFLOW, "a.yaml")
    a_file(tmp_path, A_WORKFLOW, "b.yaml")
    a_file(tmp_path, A_WORKFLOW.replace("[parse]", "[prase]"), "c.yaml")
    a_file(tmp_path, "name: [", "d.yaml")
    a_file(tmp_path, A_WORKFLOW, "e.yml")
    with pytest.raises(ConfigError) as caught:
        load_workflows(tmp_path)
    assert [(Path(p.file).name, p.path) for p in caught.value.problems] == [
        ("e.yml", ""),
        ("b.yaml", "name"),
        ("c.yaml", "nodes.draft.needs"),
        ("d.yaml:1", ""),
    ]
    with pytest.raises(ConfigError, match="no such folder"):
        load_workflows(tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("needs: [parse]", "needs: [parse, parse]"), "nodes.draft.needs: node 'parse' is given"),
        (("needs: [parse]", "needs: [draft]"), "nodes.draft.needs: nodes need each other in a"),
        (("{{ code }}", "{{ cod }}"), "nodes.parse.source: unknown name 'cod' (did you mean 'code"),
        (("source: ", "when: draft.text, source: "), "nodes.parse.when: uses node 'draft', which"),
        (("{{ code }}", "{{ item }}"), "nodes.parse.source: 'item' exists only in"),
        (("parse", "code"), "nodes.code: an input already has this name"),
        (("parse", "loop"), "nodes.loop: this name already has a meaning in templates"),
        (("parse", "1st"), "nodes.1st: a name has letters, digits and '_', with a letter first"),
        (("needs: [parse], ", ""), "nodes.parse: is not used"),
        (("output: draft", "output: draft parse"), "output: must be a node, or several with"),
        (("output: draft", "output: draft else draft"), "output: node 'draft' is given twice"),
        (("output: draft", "output: draft\nstream: parse"), "stream: node 'parse' has no text"),
        (("model: m,", "model: m, each: parse.chunks,"), ""),
        (("model: m,", "model: m, max_items: 3,"), "nodes.draft: `max_items` needs `each`"),
        (("model: m,", "model: m, each: 'x', repeat: {until: x, max: 1},"), "nodes.draft: `each`"),
        (("model: m,", "model: m, chat: hello,"), "nodes.draft: exactly one of `prompt`, `fim`"),
        (("model: m,", "model: m, system: be kind,"), "nodes.draft: `system` needs `chat`"),
        (("model: m,", "model: m, expected_tokens: 101,"), "nodes.draft: `expected_tokens` must"),
        (("model: m,", "model: m, extra: {stream: true},"), "nodes.draft.extra: must not set st"),
        (("model: m,", "model: m, extra: {x: .nan},"), "nodes.draft.extra: must be JSON values"),
        (("model: m,", "model: m, temperature: .inf,"), "nodes.draft.temperature: must be a fini"),
        (("model: m,", "model: m, repeat: {until: m, max: 9},"), "nodes.draft.repeat.max: must be"),
        (("model: m,", "model: m, repeat: {unti: m, max: 1},"), "nodes.draft.repeat.until: this"),
        (("model: m,", "model: m, when: '{{ code }}',"), "nodes.draft.when: an expression is wri"),
        (("target: 2s", "target: 2s, deadline: 1s"), "sla: the deadline must not be shorter"),
        (("target: 2s", "target: 0s"), "sla.target: must be a duration of more than 0"),
        (("target: 2s", "target: 2 s"), "sla.target: must be a duration with a unit"),
        (("target: 2s", "target: 25h"), "sla.target: must be a duration of more than 0 and at"),
        (
            ("model: m,", "model: m, extra: {x: !!timestamp 2001-01-01},"),
            "nodes.draft.extra: must be JSON",
        ),
        (("code: str", "yes: str"), "inputs: a key must be text"),
        (("name: review", "name: review\nname: other"), "name: this key is given twice"),
    ],
)
def test_a_broken_rule_is_said_where_it_is_broken(
    tmp_path: Path, change: tuple[str, str], problem: str
) -> None:
    found = "\n".join(problems_of(tmp_path, changed(A_WORKFLOW, change)))
    assert problem in found
    assert bool(problem) == bool(found)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("redo: [check]", "redo: [chek]"), "nodes.fix.repeat.redo: unknown node 'chek' (did you"),
        (("redo: [check]", "redo: [fix]"), "nodes.fix.repeat.redo: node 'fix' is not an ancestor"),
        (("redo: [check]", "redo: [draft]"), "node 'draft' is run again, but 'check' needs it"),
        (("redo: [check]", "redo: [check, check]"), "node 'check' is given twice"),
        (("needs: [draft]", "needs: [draft], when: task"), "node 'check' must not have `when`"),
        (("redo: [check]", "redo: []"), "nodes.check.source: uses node 'fix', which may not"),
        (("stream: fix else draft\n", ""), "sla.metric: an SLA on ttft needs `stream`"),
        (("when: not check.ok", "when: fix.text"), "nodes.fix.when: uses node 'fix'"),
        (("max: 3", "max: 0"), "nodes.fix.repeat.max: must be at least 1 (found 0)"),
    ],
)
def test_a_loop_that_cannot_be_run_is_refused(
    tmp_path: Path, change: tuple[str, str], problem: str
) -> None:
    assert problem in "\n".join(problems_of(tmp_path, changed(A_LOOP, change)))


def test_a_cycle_is_named_as_a_path(tmp_path: Path) -> None:
    text = changed(
        A_LOOP, ("model: m, prompt", "model: m, needs: [fix], prompt"), ("when: not check.ok", "")
    )
    found = problems_of(tmp_path, text)
    assert "nodes.draft.needs: nodes need each other in a cycle: " in "\n".join(found)
    assert "draft -> fix -> check -> draft" in "\n".join(found)


def test_a_fan_out_cannot_be_streamed(tmp_path: Path) -> None:
    text = changed(
        A_WORKFLOW,
        ("model: m,", "model: m, each: parse.chunks,"),
        ("output:", "stream: draft\noutput:"),
    )
    assert problems_of(tmp_path, text) == [
        "stream: node 'draft' cannot be streamed: it runs once per item"
    ]


def a_chain(length: int) -> str:
    nodes = [
        f"  n{i}: {{type: transform, text: x, needs: [{f'n{i - 1}' if i else ''}]}}"
        for i in range(length)
    ]
    sla = "sla: {metric: e2e, target: 1s}"
    return "\n".join(["name: chain", sla, "nodes:", *nodes, f"output: n{length - 1}"])


def test_size_and_depth_are_bounded(tmp_path: Path) -> None:
    assert problems_of(tmp_path, a_chain(32)) == []
    assert problems_of(tmp_path, a_chain(33)) == [
        "nodes: a chain of 33 nodes; at most 32 are allowed"
    ]
    (problem,) = problems_of(tmp_path, a_chain(65))
    assert problem == "nodes: must have at most 64 entries (found a mapping of 65)"
    (problem,) = problems_of(tmp_path, A_WORKFLOW + "#" * 256_000)
    assert "longer than 256,000 bytes" in problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty"),
        ("- a", "must be a mapping"),
        ("a: &x [1]\nb: *x", "an alias (*name) is not allowed"),
        ("a: &x [*x]", "an alias (*name) is not allowed"),
        ("[" * 500, "nested deeper"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: !!int ''", "a value does not fit its type"),
        ("a: !!timestamp 2001-99-99", "a value does not fit its type"),
        ("? [a]\n: b", "a key must be text"),
        ("a: \x00", "not valid YAML"),
        ("a: 'x", "not valid YAML"),
    ],
)
def test_what_is_not_plain_yaml_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in "\n".join(problems_of(tmp_path, text))


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    for path in (tmp_path / "absent.yaml", tmp_path, tmp_path / "latin.yaml", Path("nul\0.yaml")):
        with pytest.raises(ConfigError):
            load_workflow(path)


FRAGMENTS = st.sampled_from(
    [
        *("{", "}", "[", "]", ":", "- ", "\n", "  ", "*", "&a ", "!!int ", "'", '"', "? ", "<<: "),
        *("null", "1", "-1", ".nan", "1e999", "true", "2001-01-01", "\t", "\\ud800", "|", "%", "#"),
        *("{{", "}}", "{%", "needs", "each", "repeat", "draft", "item", "else", "1ms", "é", "\x07"),
    ]
)
SLACK = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(st.data())
@SLACK
def test_a_file_with_random_edits_loads_or_is_a_config_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    text = data.draw(st.sampled_from([A_WORKFLOW, A_LOOP]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(FRAGMENTS) + text[at + data.draw(st.integers(0, 6)) :]
    loads_or_says_why(tmp_path, text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | FRAGMENTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FRAGMENTS, inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
@SLACK
def test_a_file_with_any_value_in_any_place_loads_or_is_a_config_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    tree = copy.deepcopy(yaml.safe_load(data.draw(st.sampled_from([A_WORKFLOW, A_LOOP]))))
    place: Any = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        below = place[key]
        if not isinstance(below, dict | list) or not below or data.draw(st.booleans()):
            break
        place = below
    place[key] = data.draw(VALUES)
    loads_or_says_why(tmp_path, yaml.safe_dump(tree, allow_unicode=True))


@given(
    st.dictionaries(
        st.integers(0, 6), st.lists(st.integers(0, 6), max_size=3, unique=True), min_size=1
    )
)
@SLACK
def test_any_graph_of_nodes_is_ordered_or_refused(
    tmp_path: Path, needs: dict[int, list[int]]
) -> None:
    nodes = {
        f"n{i}": {"type": "transform", "text": "x", "needs": [f"n{j}" for j in below]}
        for i, below in needs.items()
    }
    sla = {"metric": "e2e", "target": "1s"}
    tree = {"name": "random", "sla": sla, "nodes": nodes, "output": " else ".join(nodes)}
    workflow = loads_or_says_why(tmp_path, yaml.safe_dump(tree, sort_keys=False))
    if workflow is not None:
        ids = [n.id for n in workflow.nodes]
        assert sorted(ids) == sorted(nodes)
        for node in workflow.nodes:
            assert all(ids.index(need) < ids.index(node.id) for need in node.needs)


def loads_or_says_why(folder: Path, text: str) -> Workflow | None:
    path = folder / "random.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        return load_workflow(path)
    except ConfigError as error:
        problems = error.problems
    assert problems
    assert all(p.rule and p.file for p in problems)
    return None


def a_task(folder: Path) -> Workflow:
    return load_workflow(
        a_file(
            folder,
            """
            name: t
            sla: {metric: e2e, target: 1s}
            inputs:
              code: str
              top: {type: int, default: 3}
              share: {type: float, default: 1}
              strict: {type: bool, default: false}
              paths: {type: list, default: []}
            nodes: {n: {type: transform, text: "{{ code }}"}}
            output: n
            """,
        )
    )


def test_inputs_get_their_defaults(tmp_path: Path) -> None:
    task = a_task(tmp_path)
    defaults = {"top": 3, "share": 1.0, "strict": False, "paths": []}
    assert check_inputs(task, {"code": "x"}) == {"code": "x", **defaults}
    assert check_inputs(task, {"code": "x", "top": None}) == {"code": "x", **defaults}
    assert check_inputs(task, {"code": "", "share": 2})["share"] == 2.0


def test_an_input_error_names_every_problem(tmp_path: Path) -> None:
    task = a_task(tmp_path)
    values = {"top": True, "share": float("nan"), "strict": 1, "paths": "a", "cod": "x"}
    with pytest.raises(InputError) as caught:
        check_inputs(task, values)
    assert str(caught.value) == (
        "unknown input 'cod' (did you mean 'code'?); input 'code' is required (text); "
        "input 'top' must be a whole number; input 'share' must be a number; "
        "input 'strict' must be true or false; input 'paths' must be a list"
    )
    assert caught.value.param is None
    with pytest.raises(InputError) as caught:
        check_inputs(task, {"code": 1}, "{...}")
    assert (caught.value.param, caught.value.message) == ("code", "input 'code' must be text")
    with pytest.raises(InputError, match=r"is required \(text\); give inputs in the body as x: …$"):
        check_inputs(task, {}, "x: …")


def test_a_folder_of_links_as_kubernetes_mounts_it_is_read(tmp_path: Path) -> None:
    real = tmp_path / "..2026"
    real.mkdir()
    a_file(real, A_WORKFLOW)
    os.symlink(real / "review.yaml", tmp_path / "review.yaml")
    assert list(load_workflows(tmp_path)) == ["review"]
