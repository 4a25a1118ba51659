"""Traces and pairs are read completely, or refused with the line that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cato.core.errors import InputError
from cato.core.ids import PoolName
from cato.sim.trace_tasks import trace_beliefs, trace_tasks
from cato.sim.traces import TokenPair, TraceRow, load_azure, load_pairs, load_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def a_file(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_arrivals_count_from_the_first_row(tmp_path: Path) -> None:
    trace = a_file(
        tmp_path,
        "trace.csv",
        HEADER,
        "2023-11-16 23:59:59.5000000,4808,10",
        "2023-11-17 00:00:00.7500000,3180,8",
    )
    assert load_azure(trace) == (TraceRow(0.0, 4808, 10), TraceRow(1.25, 3180, 8))
    trace.write_bytes(b"\xef\xbb\xbf" + trace.read_bytes())  # as Excel saves it
    assert len(load_azure(trace)) == len(load_trace(trace)) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("2023-11-16 18:17:04,31x0,8", "two token counts"),
        ("yesterday,3180,8", "a time"),
        ("2023-11-16 18:17:04,3180", "two token counts"),
        ("2023-11-16 18:17:04,3180,0", "at least 0 and 1"),
        ("2023-11-16 18:17:02,3180,8", "sort the file"),
        ("2023-11-16 18:17:04Z,3180,8", "name their zone, or neither"),
    ],
)
def test_names_the_malformed_line(tmp_path: Path, line: str, problem: str) -> None:
    trace = a_file(tmp_path, "trace.csv", HEADER, "2023-11-16 18:17:03,4808,10", line)
    with pytest.raises(InputError, match=f"trace.csv:3: .*{problem}"):
        load_azure(trace)


def test_refuses_another_header_an_empty_trace_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.csv:1: .*TIMESTAMP,ContextTokens,GeneratedTokens"):
        load_azure(a_file(tmp_path, "a.csv", "time,prompt,output"))
    with pytest.raises(InputError, match="no requests"):
        load_azure(a_file(tmp_path, "b.csv", HEADER))
    with pytest.raises(InputError, match="check the path"):
        load_azure(tmp_path / "c.csv")
    with pytest.raises(InputError, match=r"d\.csv: no CSV file"):
        load_trace(a_file(tmp_path, "d.csv", "x" * 200_000))
    burst = "Timestamp,Model,Request tokens,Response tokens"
    with pytest.raises(InputError, match=r"e\.csv:2: 'nan' is no time"):
        load_trace(a_file(tmp_path, "e.csv", burst, "nan,ChatGPT,10,5"))


def test_a_class_that_no_earlier_row_has_is_believed_as_long_as_all_of_them() -> None:
    earlier = [TraceRow(float(i), 100, 4 + i) for i in range(3)]
    later = TraceRow(9.0, 100, 500)
    (task,) = trace_tasks([later], trace_beliefs(earlier), PoolName("p"), 1)
    assert (task.name, task.nodes[0].expected_tokens) == ("long", 5)


def test_pairs_from_json_lines_go_from_description_to_code(tmp_path: Path) -> None:
    data = a_file(tmp_path, "dev.json", '{"nl": "twelve chars", "code": "f()"}')
    pairs = load_pairs(data, chars_per_token=3.0)
    assert pairs == (TokenPair(source_tokens=4, target_tokens=1),)
    assert pairs[0].reversed() == TokenPair(source_tokens=1, target_tokens=4)


def test_pairs_from_parallel_files_go_from_the_named_one_to_its_sibling(tmp_path: Path) -> None:
    java = a_file(tmp_path, "valid.java", "123456", "\f")
    cs = a_file(tmp_path, "valid.cs", "123456789", "123")
    assert load_pairs(java, 3.0) == (TokenPair(2, 3), TokenPair(1, 1))
    assert load_pairs(cs, 3.0) == (TokenPair(3, 2), TokenPair(1, 1))


def test_refuses_pairs_that_do_not_pair(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"dev\.json:2: needs the texts 'nl' and 'code'"):
        load_pairs(a_file(tmp_path, "dev.json", '{"nl": "a", "code": "b"}', '{"nl": "a"}'))
    with pytest.raises(InputError, match=r"bad\.json:1: not JSON"):
        load_pairs(a_file(tmp_path, "bad.json", "{"))
    lonely = a_file(tmp_path, "lonely.java", "a")
    with pytest.raises(InputError, match="found none"):
        load_pairs(lonely)
    a_file(tmp_path, "lonely.cs", "a", "b")
    with pytest.raises(InputError, match=r"1 lines and lonely\.cs has 2"):
        load_pairs(lonely)
