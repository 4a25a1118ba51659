"""What an ingress remembers of sessions: counts that correct themselves, hashes that only grow."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace
from hashlib import sha512

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.profile import UNMEASURED
from cato.serve.sessions import Hashing, SessionMemory
from cato.wire.counting import SECTION_TOKENS, estimated_tokens
from cato.wire.prefix import chain

HASHING = Hashing(block_chars=16, model="m")
TEXTS = st.text(alphabet="ab\n é", max_size=40)


def a_memory() -> SessionMemory:
    return SessionMemory()


@given(st.lists(st.lists(TEXTS, min_size=1, max_size=6), min_size=1, max_size=6))
def test_hashes_are_those_of_the_whole_text_whatever_came_before(turns: list[list[str]]) -> None:
    memory = a_memory()
    for sections in turns:
        reading = memory.read("s", sections, HASHING, kind="k")
        assert reading.prompt.prefix == chain("\n".join(sections), 16, "m")


@given(st.lists(TEXTS, min_size=1, max_size=8))
def test_a_session_that_grows_keeps_its_hashes_and_counts_what_is_new(sections: list[str]) -> None:
    memory = a_memory()
    before, raw = 0, 0.0
    for n in range(1, len(sections) + 1):
        reading = memory.read("s", sections[:n], HASHING, kind="k")
        assert len(reading.prompt.prefix) >= before
        assert reading.prompt.new_tokens <= reading.prompt.tokens
        assert reading.prompt.new_tokens == max(1, round(reading.raw_tokens - raw))
        before, raw = len(reading.prompt.prefix), reading.raw_tokens


def test_the_estimate_of_a_prompt_is_that_of_its_sections() -> None:
    sections = ["def add(a, b):\n    return a + b", "What does it do?"]
    raw = a_memory().read("s", sections, HASHING, kind="k").raw_tokens
    assert raw == pytest.approx(
        sum(estimated_tokens(section) + SECTION_TOKENS for section in sections), rel=0.05
    )


def test_the_engines_count_corrects_the_next_turn_of_the_session() -> None:
    memory = a_memory()
    sections = ["words " * 300]
    reading = memory.read("s", sections, HASHING, kind="k")
    memory.learn("s", "k", reading, round(reading.raw_tokens * 1.3))
    sections.append("more words " * 10)
    again = memory.read("s", sections, HASHING, kind="k")
    assert again.prompt.tokens == pytest.approx(again.raw_tokens * 1.3, rel=0.01)
    assert again.prompt.new_tokens < 50


def test_what_turns_add_is_corrected_by_what_they_added_before() -> None:
    memory = a_memory()
    sections = ["English words of an agent's instructions. " * 400]
    reading = memory.read("s", sections, HASHING, kind="k")
    memory.learn("s", "k", reading, round(reading.raw_tokens * 0.9))  # overestimated
    for turn in range(4):
        sections.append("1234567890 " * 300)  # and this underestimated
        before, reading = reading, memory.read("s", sections, HASHING, kind="k")
        truth = (reading.raw_tokens - before.raw_tokens) * 1.2 * (turn + 1)
        truth += 0.9 * memory.read("other", sections[:1], HASHING, kind="o").raw_tokens
        if turn > 2:
            assert reading.prompt.tokens == pytest.approx(truth, rel=0.03)
        memory.learn("s", "k", reading, round(truth))


def grow(memory: SessionMemory, session: str, kind: str, growth: float) -> int:
    """Two turns of a session, the second with digits of which the engine counts `growth` times the
    estimate; returns the estimate of that one."""
    sections = ["words " * 300]
    first = memory.read(session, sections, HASHING, kind=kind)
    memory.learn(session, kind, first, round(first.raw_tokens))
    second = memory.read(session, [*sections, "1234567890 " * 300], HASHING, kind=kind)
    added = second.raw_tokens - first.raw_tokens
    memory.learn(session, kind, second, round(first.raw_tokens + growth * added))
    return second.prompt.tokens - first.prompt.tokens


def test_what_turns_add_is_corrected_by_what_those_of_other_clients_added() -> None:
    memory = a_memory()
    unknown = grow(memory, "one", "k", 1.2)
    assert grow(memory, "two", "another client", 1.2) == pytest.approx(1.2 * unknown, rel=0.01)


def test_a_call_beside_the_main_loop_leaves_its_counts_as_they_were() -> None:
    memory = a_memory()
    expected = grow(memory, "s", "k", 1.3)
    aside = memory.read("s", ["Sum this up: " + "said " * 200], HASHING, kind="k")
    memory.learn("s", "k", aside, round(aside.raw_tokens))
    again = memory.read("s", ["words " * 300, "1234567890 " * 300], HASHING, kind="k")
    assert again.prompt.tokens > 1.2 * expected
    assert again.is_corrected


def test_a_prompt_that_says_the_same_in_another_order_counts_alike() -> None:
    memory = a_memory()
    grow(memory, "s", "k", 1.3)
    moved = ["words " * 300, "A file was added.", "1234567890 " * 300]
    again = memory.read("s", moved, HASHING, kind="k")
    digits = estimated_tokens("1234567890 " * 300)
    assert again.prompt.tokens == pytest.approx(again.raw_tokens + 0.3 * digits, rel=0.01)


def test_a_history_that_shrinks_keeps_the_count_of_what_stayed() -> None:
    memory = a_memory()
    reading = memory.read("s", ["tools " * 500, "said " * 500], HASHING, kind="k")
    memory.learn("s", "k", reading, round(reading.raw_tokens * 1.4))
    shorter = memory.read("s", ["tools " * 500, "summary"], HASHING, kind="k")
    assert shorter.is_corrected
    assert shorter.prompt.tokens == pytest.approx(shorter.raw_tokens * 1.4, rel=0.02)
    assert shorter.prompt.new_tokens < 10


def test_a_new_session_of_the_same_kind_begins_with_what_was_learnt() -> None:
    memory = a_memory()
    reading = memory.read("one", ["words " * 300], HASHING, kind="k")
    memory.learn("one", "k", reading, round(reading.raw_tokens * 1.5))
    same, other = (memory.read(k, ["x " * 99], HASHING, kind=k[:1]) for k in ("k2", "o2"))
    assert same.prompt.tokens == pytest.approx(same.raw_tokens * 1.5, rel=0.02)
    assert other.prompt.tokens == round(other.raw_tokens)


@pytest.mark.parametrize("counted", [0, -1, 2, 99_999])
def test_a_count_that_cannot_be_meant_teaches_nothing(counted: int) -> None:
    memory = a_memory()
    reading = memory.read("s", ["words " * 300], HASHING, kind="k")
    memory.learn("s", "k", reading, counted)
    again = memory.read("s", ["words " * 300], HASHING, kind="k")
    assert again.prompt.tokens == reading.prompt.tokens


def test_a_rewind_counts_what_follows_the_common_part() -> None:
    memory = a_memory()
    memory.read("s", ["start", "left " * 50], HASHING, kind="k")
    reading = memory.read("s", ["start", "right " * 50], HASHING, kind="k")
    assert reading.prompt.new_tokens < reading.prompt.tokens
    assert reading.prompt.prefix == chain("start\n" + "right " * 50, 16, "m")


@pytest.mark.parametrize(
    "other",
    [replace(HASHING, model="n"), replace(HASHING, salt="t"), replace(HASHING, block_chars=8)],
)
def test_another_model_or_salt_shares_no_hash(other: Hashing) -> None:
    memory = a_memory()
    one = memory.read("s", ["x" * 64], HASHING, kind="k").prompt.prefix
    two = memory.read("s", ["x" * 64], other, kind="k").prompt.prefix
    assert set(one).isdisjoint(two)


def test_the_session_used_longest_ago_is_forgotten_first() -> None:
    memory = SessionMemory(most=2)
    for session in ("a", "b", "a", "c"):
        memory.read(session, ["x" * 100], HASHING, kind="k")
    assert memory.read("a", ["x" * 100], HASHING, kind="k").prompt.new_tokens == 1
    assert memory.read("b", ["x" * 100], HASHING, kind="k").prompt.new_tokens > 1


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("The quick brown fox jumps over the lazy dog. " * 40, 3.5, 5.5),
        ("    for item in items:\n        total += item.price\n" * 40, 2.8, 5.0),
        ("2026-11-23 14:02:11,482 4711 0x7f3a\n" * 40, 0.99, 1.8),
    ],
)
def test_characters_a_token_depend_on_the_kind_of_text(
    text: str, least: float, most: float
) -> None:
    assert least < len(text) / estimated_tokens(text) < most


# Tokens of Mistral's Tekken for one repetition.
TEKKEN = [
    ("Пожалуйста, перепиши эту функцию так, чтобы она обрабатывала пустые списки. ", 23),
    ("يرجى إعادة هيكلة هذه الدالة بحيث تتعامل مع القوائم الفارغة. ", 18),
    ("请帮我重构这个函数，使它能够处理空列表，并且在输入无效时抛出异常。", 33),
    ("この関数をリファクタリングして、空のリストを処理できるようにしてください。", 24),
    ("이 함수를 리팩터링하여 빈 목록을 처리할 수 있게 해 주세요. ", 20),
    ("🎉🚀🔥💡📦🐛😀🤖👍🧪", 40),
]
BLOBS = [
    (b64encode(sha512(b"base64").digest()).decode(), 66),
    (sha512(b"hex").hexdigest(), 114),
    ("-" * 80 + "\n", 3),
    ("=" * 80 + "\n", 4),
    ("name" + " " * 100 + "value\n", 5),
]


@pytest.mark.parametrize(("text", "tokens"), TEKKEN + BLOBS)
def test_estimates_hold_for_other_languages_and_dense_text(text: str, tokens: int) -> None:
    assert 0.6 < estimated_tokens(text * 20) / (20 * tokens) < 1.6


@pytest.mark.parametrize(("text", "tokens"), TEKKEN)
def test_profiles_count_other_languages(text: str, tokens: int) -> None:
    assert 0.6 < UNMEASURED.count_tokens(text * 20) / (20 * tokens) < 1.6
    halved = replace(UNMEASURED, chars_per_token=7.0)
    assert halved.count_tokens(text * 20) == pytest.approx(
        UNMEASURED.count_tokens(text * 20) / 2, abs=1
    )


def test_profiles_count_ascii_by_its_characters_alone() -> None:
    assert UNMEASURED.count_tokens("x = 1\n" * 700) == 1200
    assert UNMEASURED.count_tokens("") == 1
    assert UNMEASURED.count_tokens("\ud83d") == 1  # half a character


def test_what_a_turn_adds_may_take_far_fewer_tokens_than_estimated() -> None:
    memory = a_memory()
    sections = ["words " * 300]
    reading = memory.read("s", sections, HASHING, kind="k")
    truth = reading.raw_tokens
    memory.learn("s", "k", reading, round(truth))
    for turn in range(6):
        sections.append(f"{turn}234567890 " * 300)
        before, reading = reading, memory.read("s", sections, HASHING, kind="k")
        truth += (reading.raw_tokens - before.raw_tokens) * 0.3
        last_tokens = reading.prompt.tokens
        memory.learn("s", "k", reading, round(truth))
    assert last_tokens == pytest.approx(truth, rel=0.03)


def test_a_sample_of_a_long_text_counts_like_the_whole() -> None:
    piece = "def f(x):\n    return x + 12345  # a comment in English words\n"
    long = piece * 20_000
    assert estimated_tokens(long) == pytest.approx(estimated_tokens(piece) * 20_000, rel=0.03)
    assert estimated_tokens("") == 0
