"""YAML files are read safely, and every fault is named with its place."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from cato.config.fields import ByteSize, Duration, StrictModel, parse_duration, parse_size
from cato.config.problems import problems_of, validate
from cato.config.yaml_file import MAX_DEPTH, MAX_FILE_BYTES, parse_yaml, read_yaml
from cato.core.errors import ConfigError


def parsed(text: str | bytes, *, aliases: bool = True) -> object:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return parse_yaml(data, "f.yaml", aliases=aliases)


def faults(text: str | bytes, *, aliases: bool = True) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parsed(text, aliases=aliases)
    return [str(problem) for problem in caught.value.problems]


class Inner(StrictModel):
    target: Duration = 1.0
    size: ByteSize = 1


class Outer(StrictModel):
    name: str
    count: int = Field(default=1, ge=1, le=9)
    inner: dict[str, Inner | None] = Field(default_factory=dict)
    many: list[Inner] = Field(default_factory=list)


def problems(data: object, path: str = "") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(Outer, data, "f.yaml", path)
    return [str(problem) for problem in caught.value.problems]


def test_reads_what_yaml_says(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("a: [1, 2.5, yes]\nb: &x {c: null}\nd: *x\n", encoding="utf-8")
    assert read_yaml(path) == {"a": [1, 2.5, True], "b": {"c": None}, "d": {"c": None}}


def test_a_number_with_an_exponent_needs_no_dot_and_a_date_is_text() -> None:
    assert parsed("a: 1e-5\nb: 2026-01-31") == {"a": 1e-5, "b": "2026-01-31"}


def test_a_missing_file_and_a_folder_are_problems_of_that_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_yaml(path)


def test_every_key_given_twice_is_named_with_its_line() -> None:
    assert faults("a: 1\nb: {c: 1,\n  c: 2}\na: 3") == [
        "f.yaml:3: b.c: this key is given twice",
        "f.yaml:4: a: this key is given twice",
    ]


def test_a_syntax_error_names_its_line() -> None:
    (fault,) = faults("a: 1\nb: [1,\nc: }")
    assert fault.startswith("f.yaml:3: not valid YAML: ")


def test_aliases_that_grow_or_loop_are_refused() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
    )
    assert "values once its aliases are expanded" in faults(bomb)[0]
    assert "this alias refers to itself" in faults("a: &a [*a]")[0]
    chain = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 99))
    assert "nested deeper" in faults(chain)[0]


def test_where_aliases_are_not_allowed_neither_are_merged_mappings() -> None:
    assert parsed("a: &x {b: 1}\nc: {<<: *x, d: 2}") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}
    for text in ("a: &x [1]\nb: *x", "a: &x [*x]"):
        assert "an alias (*name) is not allowed" in faults(text, aliases=False)[0]
    assert "a key must be text" in faults("a: {<<: {b: 1}}", aliases=False)[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("# only a comment", "empty"),
        ("a: 1\n---\nb: 2", "single document"),
        ("? [a]\n: 1", "key must be text"),
        ("a: !!python/object/apply:os.system [x]", "constructor"),
        ("yes: 1", "key must be text"),
        ("a: !!int ''", "does not fit its type"),
        ("a: !!timestamp 2001-99-99", "does not fit its type"),
        ("a: " + "9" * 5000, "does not fit its type"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested deeper"),
        ("a: " + "x" * MAX_FILE_BYTES, "longer than"),
        ("a: \x00", "not valid YAML"),
        (b"a: \xff", "not valid YAML"),
    ],
)
def test_unusable_text_is_refused_in_plain_words(text: str | bytes, words: str) -> None:
    assert words in faults(text)[0]


@given(st.text(alphabet="ab:-?[]{}&*!|>'\"#%@,.<\n\t 01e~=\\é\ud800", max_size=60))
@example("a: !!timestamp x")
@example("<<: [1]")
@example("a: 0o8\nb: 1__\nc: 0x_\nd: 1:99.")
def test_any_text_is_read_or_refused_with_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parsed(text)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused_with_config_error(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        parsed(data)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("200ms", 0.2), ("1.5s", 1.5), ("2m", 120.0), ("50us", 5e-5), ("1h", 3600.0)],
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value", [1, 1.5, "1", "-1s", "1 h", "1day", "s", None, True, "1e999s", []]
)
def test_a_duration_without_a_known_unit_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="such as 200ms"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("value", "size"),
    [("256MiB", 256 * 1024**2), ("4GB", 4 * 10**9), ("1.5KiB", 1536), (10, 10), ("2kB", 2000)],
)
def test_sizes_are_bytes_or_have_units(value: object, size: int) -> None:
    assert parse_size(value) == size


@pytest.mark.parametrize(
    "value", ["256", "1.3B", "1.0001KiB", "2 kB", -1, True, 1.5, "4gigs", None]
)
def test_an_unclear_size_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="such as 256MiB"):
        parse_size(value)


def test_all_problems_come_at_once_each_with_path_value_and_rule() -> None:
    data = {"count": 12, "inner": {"x": {"target": "fast"}}, "many": [{}, {"size": "big"}]}
    assert problems(data, "args") == [
        "f.yaml: args.name: this key is required",
        "f.yaml: args.count: must be at most 9 (found 12)",
        "f.yaml: args.inner.x.target: must be a duration with a unit, such as 200ms, 1.5s or 2m"
        " (found 'fast')",
        "f.yaml: args.many[1].size: must be a size, such as 256MiB or 4GB,"
        " or a whole number of bytes (found 'big')",
    ]


def test_one_entry_is_one_entry() -> None:
    class Lists(StrictModel):
        one: list[int] = Field(min_length=1)
        two: list[int] = Field(min_length=2)

    with pytest.raises(ConfigError) as caught:
        validate(Lists, {"one": [], "two": []}, "f.yaml")
    assert [problem.rule for problem in caught.value.problems] == [
        "must have at least 1 entry",
        "must have at least 2 entries",
    ]


def test_an_unknown_key_suggests_the_known_one_at_its_place() -> None:
    data = {"nmae": "x", "name": "x", "inner": {"x": {"targt": "1s"}}, "many": [{"zzz": 1}]}
    assert problems(data) == [
        "f.yaml: inner.x.targt: unknown key (did you mean 'target'?)",
        "f.yaml: many[0].zzz: unknown key; known: target, size",
        "f.yaml: nmae: unknown key (did you mean 'name'?)",
    ]


def test_no_type_is_guessed_from_another() -> None:
    assert problems({"name": 1, "count": "2"}) == [
        "f.yaml: name: must be text (quote it if it looks like a number) (found 1)",
        "f.yaml: count: must be a whole number (found '2')",
    ]
    assert problems([1]) == ["f.yaml: must be a mapping of names to values (found a list of 1)"]
    assert problems({"name": "x", "inner": {1: {}}}) == [
        "f.yaml: inner[1]: must be text (quote it if it looks like a number) (found 1)"
    ]


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "count", "inner", "many", "target", "size"])
            | st.text(max_size=3)
            | st.integers(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(json_like)
def test_any_data_is_valid_or_described(data: object) -> None:
    wrong: ValidationError | None = None
    try:
        Outer.model_validate(data)
    except ValidationError as error:
        wrong = error
    if wrong is not None:
        described = problems_of(wrong, Outer, "f.yaml")
        assert len(described) == wrong.error_count()
        assert all(problem.rule for problem in described)
