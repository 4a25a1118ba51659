"""Templates and expressions: what they see, what they refuse, and how much work they may do."""

import contextlib
import json
import pickle
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cato.core.errors import ExpressionError, WorkLimitError
from cato.workflows.templates import MAX_SOURCE_CHARS, compile_expression, compile_template
from cato.workflows.work import MAX_OUTPUT_CHARS, MAX_STEPS, little_work

# 2^40 texts, once it is written out.
NESTED = "{% set a = ['x'] %}" + "{% set a = [a, a] %}" * 40


def rendered(source: str, **names: object) -> str:
    return compile_template(source).render(names)


def value(source: str, **names: object) -> object:
    return compile_expression(source).evaluate(names)


def problem_of(source: str, **names: object) -> str:
    with pytest.raises(ExpressionError) as caught:
        rendered(source, **names)
    return caught.value.problem


def test_a_node_that_has_not_run_renders_as_nothing_and_is_false() -> None:
    assert rendered("[{{ refine.text }}{{ refine.a.b['c'] }}{{ none }}]") == "[]"
    assert rendered("{{ refine.text or draft.text }}", draft={"text": "d"}) == "d"
    assert value("not check.ok") is True
    assert value("check.ok") is None
    assert rendered("{% for x in refine.items %}x{% endfor %}{{ refine.list | length }}") == "0"


@given(st.text())
def test_user_text_is_never_read_as_a_template(text: str) -> None:
    assert rendered("{{ code }}", code=text) == text
    assert rendered("{{ code | trim }}", code="{{ 7 * 7 }}{% if %}") == "{{ 7 * 7 }}{% if %}"


def test_nothing_is_escaped_for_html() -> None:
    assert rendered("{{ code }}|{{ code | tojson }}", code='<a b="c">') == (
        '<a b="c">|"<a b=\\"c\\">"'
    )


def test_a_key_of_a_result_wins_over_a_method_of_its_mapping() -> None:
    assert rendered("{{ r.items }} {{ r.get('n') }}", r={"items": "mine", "n": 1}) == "mine 1"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ x['__cl' ~ 'ass__'] }}",
        "{{ [x] | map(attribute='__class__') | list }}",
        "{{ [x] | sum(attribute='__class__') }}",
        "{{ x | attr('__class__') }}",
        "{{ '{0.__class__}'.format(x) }}",
        "{{ x.format_map({}) }}",
        "{{ range.__globals__ }}",
        "{{ missing.__init__.__globals__ }}",
        "{{ missing._fail_with_undefined_error() }}",
        "{% for i in [1] %}{{ loop._iterable }}{% endfor %}",
        "{{ names.update({'a': 1}) }}",
        "{{ items.append(1) }}",
        "{{ self.__init__ }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ cycler.__init__ }}",
        "{{ x.encode() }}",
        "{{ (1).bit_length() }}",
        "{% include 'x.j2' %}",
        "{% import 'x.j2' as x %}",
        "{% extends 'x.j2' %}",
        "{% macro m() %}{% endmacro %}",
        "{% set ns.a = 1 %}",
    ],
)
def test_an_escape_from_the_sandbox_is_refused(source: str) -> None:
    problem_of(source, x="text", names={}, items=[])


def test_a_refused_escape_changes_nothing() -> None:
    names: dict[str, Any] = {"items": [1], "names": {"a": 1}}
    for source in ("{{ items.append(2) }}", "{{ names.clear() }}", "{{ names.pop('a') }}"):
        problem_of(source, **names)
    assert names == {"items": [1], "names": {"a": 1}}


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
        "{% for i in text %}{% endfor %}",
        "{{ range(10 ** 9) }}",
        "{{ range(1000000000) | list }}",
        "{{ 'a' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ text + text + text + text }}",
        "{% set a = 'x' %}" + "{% set a = a ~ a %}" * 50,
        "{% set a = 'x' %}" + "{% set a = a + a %}" * 50,
        "{% set a = 9 %}" + "{% set a = a * a %}" * 50,
        "{{ '%1000000000d' % 1 }}",
        "{{ text.replace('x', text) }}",
        "{{ text | replace('x', text) }}",
        "{{ text | list | join(text) }}",
        "{{ text | indent(1000000000) ~ text ~ text ~ text }}",
        "{{ 'a'.center(1000000000) }}",
        "{% for i in range(9999) %}{{ text | upper | length }}{% endfor %}",
        "{% for i in range(9999) %}{{ text.count('xxy') }}{% endfor %}",
        "{% for i in range(9999) %}{{ (text | sort) | length }}{% endfor %}",
        "{% for i in range(9999) %}{{ range(9999) | map('abs') | list | length }}{% endfor %}",
        "{{ text" + " | map('lower')" * 200 + " | list | length }}",
        "{{ range(9999) | sort(attribute='" + "a," * 20_000 + "a') | length }}",
        "{{ range(9999) | map(attribute='" + "a." * 20_000 + "a') | list | length }}",
        "{% for i in range(9999) %}{{ 'xy' in {'a': text}.values() }}{% endfor %}",
        "{% for i in range(9999) %}{{ text | title | length }}{% endfor %}",
        "{{ ([text] * 5000) | map('upper') | join }}",
        "{{ text }}{{ text }}",
        NESTED + "{{ a }}",
        NESTED + "{{ a | string }}",
        NESTED + "{{ a | tojson }}",
        NESTED + "{{ a | join }}",
        NESTED + "{{ a ~ '' }}",
        NESTED + "{{ [a] | map('string') | join }}",
        NESTED + "{{ [a] | map('default') | tojson }}",
        NESTED + "{{ a is lower }}",
        NESTED + "{{ [a] | sort }}",
        NESTED + "{{ [a, 1].count(a) }}",
        NESTED + "{% set b = ['y'] %}" + "{% set b = [b, b] %}" * 40 + "{{ a == b }}",
        "{{ ([0] * 9999) | map('default', text, true) | list }}",
        "{{ ([text] * 9999) | select('in', text ~ 'y') | list | length }}",
        "{% for i in range(9999) %}{{ 'xxy' in text }}{% endfor %}",
        "{% for i in range(9999) %}{{ [text, 'a'] < [text, 'b'] }}{% endfor %}",
        "{% for i in range(9999) %}{{ text[1:] | length }}{% endfor %}",
        "{% for i in range(9999) %}{{ text.splitlines() | length }}{% endfor %}",
        "{{ (text ~ 'y').strip(text) }}",
        "{{ (text ~ 'y') | trim(text) }}",
        "{{ ([[0] * 1000] * 5000) | sum(start=[]) | length }}",
        "{% for i in range(9999) %}" + "{% set x = i + 1 %}" * 2000 + "{% endfor %}",
    ],
)
def test_the_work_of_a_rendering_is_bounded(source: str) -> None:
    started_s = time.process_time()
    problem_of(source, text="x" * MAX_OUTPUT_CHARS)
    assert time.process_time() - started_s < 5


def test_a_condition_does_less_than_a_prompt_may() -> None:
    text = "x" * MAX_OUTPUT_CHARS
    assert value("'y' in text", text=text) is False
    assert value("text | upper | length > 10", text=text) is True
    with pytest.raises(WorkLimitError):
        value(" or ".join(["'y' in text"] * 10), text=text)
    with pytest.raises(WorkLimitError):
        value("[[text] * 9999] * 9999", text=text)


def test_a_template_may_be_held_to_little_work() -> None:
    many = compile_template("{% for x in items %}{{ x | upper }}{{ loop.index }}{% endfor %}")
    items = ["x"] * MAX_STEPS
    with little_work():
        assert many.render({"items": items[:100]})
        with pytest.raises(WorkLimitError, match="steps in loops"):
            many.render({"items": items})
    assert many.render({"items": items})


def test_work_is_counted_for_what_is_touched_alone() -> None:
    things = [{"kind": "a", "code": "x" * 100_000}] * 9
    source = (
        "{% for i in range(99) %}{{ things | length }}{{ (things | first).kind == 'a' }}"
        "{{ things | selectattr('kind', 'eq', 'a') | map(attribute='kind') | first }}{% endfor %}"
    )
    assert rendered(source, things=things) == "9Truea" * 99


def test_a_text_of_the_longest_allowed_size_is_rendered() -> None:
    assert len(rendered("{{ text }}", text="x" * MAX_OUTPUT_CHARS)) == MAX_OUTPUT_CHARS
    assert rendered(f"{{% for i in range({MAX_STEPS}) %}}.{{% endfor %}}") == "." * MAX_STEPS


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ a", "unexpected end of template"),
        ("a\n{% if %}", "line 2"),
        ("{{ a | commnt }}", "did you mean 'comment'?"),
        ("{{ a is defind }}", "did you mean 'defined'?"),
        ("{{ " + "(" * 5000, "nested too deeply"),
        ("x" * (MAX_SOURCE_CHARS + 1), "longer than"),
    ],
)
def test_a_template_that_cannot_be_compiled_says_why(source: str, problem: str) -> None:
    assert problem in problem_of(source)


def test_an_expression_is_not_wrapped_in_braces() -> None:
    with pytest.raises(ExpressionError, match="without"):
        compile_expression("{{ check.ok }}")
    with pytest.raises(ExpressionError, match="unexpected"):
        compile_expression("a) ~ (b")
    with pytest.raises(ExpressionError, match="unexpected"):
        compile_expression("check.ok b")


def test_what_fails_while_rendering_is_an_expression_error() -> None:
    assert "division by zero" in problem_of("{{ 1 / n }}", n=0)
    assert "cannot loop" in problem_of("{% for x in n %}{% endfor %}", n=1)
    with pytest.raises(ExpressionError):
        value("missing > 3")


def test_an_expression_gives_plain_lists() -> None:
    assert value("x | map('upper')", x=["a"]) == ["A"]
    assert value("range(3)") == [0, 1, 2]
    assert value("r.items()", r={"a": 1}) == [("a", 1)]
    assert value("x", x=("a",)) == ("a",)


def test_names_are_those_looked_up_from_outside() -> None:
    source = "{{ a.b }}{% for i in list %}{{ i }}{{ loop.index }}{% endfor %}{% set c = d %}{{ c }}"
    assert compile_template(source).names == {"a", "list", "d"}
    assert compile_expression("not check.ok and range(n)").names == {"check", "n"}


def test_templates_and_expressions_travel_by_pickle() -> None:
    template = pickle.loads(pickle.dumps(compile_template("{{ a ~ 1 }}")))
    assert (template, template.render({"a": 2})) == (compile_template("{{ a ~ 1 }}"), "21")
    expression = pickle.loads(pickle.dumps(compile_expression("a + 1")))
    assert (expression, expression.evaluate({"a": 2})) == (compile_expression("a + 1"), 3)


def test_comment_marks_every_line_in_the_way_of_the_language() -> None:
    text = "one\n\ntwo\rthree"
    assert rendered("{{ t | comment('Python') }}", t=text) == "# one\n#\n# two\n# three"
    assert rendered("{{ t | comment('java') }}", t="one") == "// one"
    assert rendered("{{ t | comment('html') }}", t="one") == "<!-- one -->"
    assert rendered("{{ t | comment('klingon') }}{{ no | comment }}", t="one") == "# one"


def test_lines_can_be_cut_at_either_end() -> None:
    text = "1\n2\n3\n4"
    assert rendered("{{ t | truncate_lines(2) }}", t=text) == "1\n2"
    assert rendered("{{ t | last_lines(2) }}", t=text) == "3\n4"
    assert rendered("{{ t | last_lines(9) }}{{ t | last_lines(0) }}", t=text) == text
    assert rendered("{{ t | truncate_lines(0) }}", t=text) == ""
    assert rendered("{{ t | indent(2) }}", t="a\n\nb") == "a\n\n  b"
    assert rendered("{{ t | indent(2, true) }}", t="a\nb") == "  a\n  b"
    assert rendered("{{ t | fit(11) }}", t="line 1\nline 2\nline 3") == "lin\n...\ne 3"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@given(JSON)
def test_tojson_writes_what_json_reads_back(data: object) -> None:
    assert json.loads(rendered("{{ data | tojson }}", data=data)) == data


@given(
    st.lists(
        st.sampled_from(["{{", "}}", "{%", "%}", "{#", "#}", "if", "for", "in", "endif", "endfor"])
        | st.sampled_from(["x", ".y", "[0]", "(", ")", "|", "join", "'a'", "1", "~", "+", "*", "-"])
        | st.sampled_from([" ", "\n", "set", "=", "not", "else", "range", "is", "defined", ","]),
        max_size=25,
    ),
    JSON,
)
@settings(max_examples=100)
def test_any_source_is_rendered_or_refused_with_an_expression_error(
    words: list[str], data: object
) -> None:
    for source in ("".join(words), "{{" + "".join(words) + "}}"):
        with contextlib.suppress(ExpressionError):
            assert isinstance(rendered(source, x=data), str)
        with contextlib.suppress(ExpressionError):
            value(source, x=data)
