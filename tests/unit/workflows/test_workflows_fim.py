"""Fill-in-the-middle prompts of every family, and cutting them to a budget."""

from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.errors import UnknownNameError
from cato.lab.demo_model.fim_samples import FimSample
from cato.workflows.fim import LEFT_OUT, fit_fim, fit_prompt, parse_fim, render_fim
from cato.workflows.fim_families import FAMILIES, family_of, stop_strings

TEXT = st.text(alphabet="ab\n", max_size=60)


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        ("qwen", "<|fim_prefix|>1<|fim_suffix|>2<|fim_middle|>"),
        ("starcoder", "<fim_prefix>1<fim_suffix>2<fim_middle>"),
        ("deepseek-coder", "<｜fim▁begin｜>1<｜fim▁hole｜>2<｜fim▁end｜>"),
        ("codellama", "<PRE> 1 <SUF>2 <MID>"),
        ("codestral", "[SUFFIX]2[PREFIX]1"),
        ("codegemma", "<|fim_prefix|>1<|fim_suffix|>2<|fim_middle|>"),
        ("none", "1"),
    ],
)
def test_each_family_has_its_own_form(family: str, prompt: str) -> None:
    assert render_fim(family, "1", "2") == prompt
    assert render_fim(family, "1", "2", "# other") == prompt.replace("1", "# other\n1")


def test_the_demo_model_gets_the_form_it_was_trained_on() -> None:
    assert render_fim("qwen", "a", "b") == FimSample("a", "", "b").prompt


def test_context_ends_with_exactly_one_newline_before_the_prefix() -> None:
    assert render_fim("none", "x", "", "# c\n") == render_fim("none", "x", "", "# c") == "# c\nx"


def test_the_sentinels_of_a_family_end_its_answer() -> None:
    for form in FAMILIES.values():
        for sentinel in (form.begin, form.hole, form.end):
            assert not sentinel or sentinel.strip() in stop_strings(form.name)


def test_an_unknown_family_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="codestral"):
        render_fim("gpt", "a", "b")
    with pytest.raises(UnknownNameError):
        stop_strings("")


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("Qwen/Qwen2.5-Coder-7B", "qwen"),
        ("qwen3-coder:30b", "qwen"),
        ("Qwen/CodeQwen1.5-7B", "starcoder"),
        ("Qwen/Qwen2.5-7B-Instruct", "none"),
        ("cato-demo", "demo"),
        ("demo", "demo"),
        ("bigcode/starcoder2-3b", "starcoder"),
        ("ibm-granite/granite-3b-code-base", "starcoder"),
        ("ibm-granite/granite-4.0-tiny", "qwen"),
        ("deepseek-ai/DeepSeek-Coder-V2-Lite-Base", "deepseek-coder"),
        ("codellama/CodeLlama-7b-hf", "codellama"),
        ("mistralai/Codestral-22B-v0.1", "codestral"),
        ("google/codegemma-2b", "codegemma"),
        ("meta-llama/Llama-3.1-8B", "none"),
    ],
)
def test_the_family_is_guessed_from_the_name(model: str, family: str) -> None:
    assert family_of(model) == family


@given(TEXT, TEXT, TEXT, st.integers(-5, 200))
def test_what_is_kept_stands_at_the_cursor_and_fits(
    prefix: str, suffix: str, context: str, budget_chars: int
) -> None:
    kept_prefix, kept_suffix, kept_context = fit_fim(prefix, suffix, context, budget_chars)
    assert prefix.endswith(kept_prefix)
    assert suffix.startswith(kept_suffix)
    assert context.startswith(kept_context)
    prompt = render_fim("codestral", kept_prefix, kept_suffix, kept_context)
    assert len(prompt) <= max(0, budget_chars) + len("[SUFFIX][PREFIX]")


@given(TEXT, TEXT, TEXT)
def test_what_fits_is_left_alone(prefix: str, suffix: str, context: str) -> None:
    budget_chars = len(prefix) + len(suffix) + len(context) + 1
    assert fit_fim(prefix, suffix, context, budget_chars) == (prefix, suffix, context)


def test_the_context_gives_way_before_any_code() -> None:
    context = "# one\n# two\n# three\n"
    assert fit_fim("p" * 10, "s" * 10, context, 20) == ("p" * 10, "s" * 10, "")
    assert fit_fim("p" * 10, "s" * 10, context, 35) == ("p" * 10, "s" * 10, "# one\n# two\n")


def test_a_scarce_budget_is_shared_three_to_one() -> None:
    prefix, suffix, _ = fit_fim("p" * 900, "s" * 900, "# c", 400)
    assert (len(prefix), len(suffix)) == (300, 100)


def test_what_one_side_does_not_need_goes_to_the_other() -> None:
    prefix, suffix, _ = fit_fim("p" * 900, "s" * 10, "", 400)
    assert (len(prefix), len(suffix)) == (390, 10)
    prefix, suffix, _ = fit_fim("p" * 10, "s" * 900, "", 400)
    assert (len(prefix), len(suffix)) == (10, 390)


def test_cuts_fall_between_lines() -> None:
    lines = "".join(f"line {i}\n" for i in range(100))
    prefix, suffix, _ = fit_fim(lines + "    x = ", lines, "", 100)
    assert prefix == "".join(f"line {i}\n" for i in range(92, 100)) + "    x = "
    assert suffix == "line 0\nline 1\nline 2\n"


def test_a_line_longer_than_the_budget_is_cut_inside() -> None:
    assert fit_fim("a\n" + "x" * 50, "", "", 10) == ("x" * 10, "", "")
    assert fit_fim("a\n" + "x" * 50 + "\n", "", "", 10) == ("x" * 9 + "\n", "", "")


@given(TEXT, st.integers(-5, 80))
def test_a_fitted_prompt_keeps_head_and_tail(text: str, budget_chars: int) -> None:
    fitted = fit_prompt(text, budget_chars)
    assert len(fitted) <= max(0, budget_chars)
    if len(text) <= budget_chars:
        assert fitted == text
    elif LEFT_OUT in fitted and LEFT_OUT not in text:
        head, tail = fitted.split(LEFT_OUT)
        assert text.startswith(head)
        assert text.endswith(tail)


# Prompts that clients wrote themselves

CODE = st.text(alphabet="ab (<|+#\n", max_size=40)
WITH_SUFFIX = [name for name, family in FAMILIES.items() if family.has_suffix]


@given(st.sampled_from(WITH_SUFFIX), CODE, CODE)
def test_what_any_family_wrote_is_taken_apart_again(family: str, prefix: str, suffix: str) -> None:
    parts = parse_fim(render_fim(family, prefix, suffix))
    assert parts is not None
    assert (parts.prefix, parts.suffix) == (prefix, suffix)
    assert family in parts.families
    assert (parts.context, parts.path) == ("", "")


@given(CODE)
def test_a_text_without_sentinels_is_no_fim_prompt(text: str) -> None:
    assert parse_fim(text) is None


@pytest.mark.parametrize(
    "prompt",
    [
        "<fim_prefix>a<fim_suffix>b",
        "<fim_suffix>a<fim_prefix>b<fim_middle>",
        'STOPS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")\n',
        "[PREFIX]a[SUFFIX]b",
        'FAMILY = ("[SUFFIX]", "[PREFIX]", "")\ndef render(a, b):\n    return ',
        "# The marks are [SUFFIX] and [PREFIX].\nx = ",
    ],
)
def test_sentinels_that_form_no_prompt_are_code(prompt: str) -> None:
    assert parse_fim(prompt) is None


@pytest.mark.parametrize("before", ["", "<s>", "\n", "<s> \n"])
def test_a_form_without_an_end_mark_begins_the_prompt(before: str) -> None:
    parts = parse_fim(f"{before}[SUFFIX]b[PREFIX]a")
    assert parts is not None
    assert (parts.prefix, parts.suffix, parts.context) == ("a", "b", "")


@pytest.mark.parametrize("filler", [" ", "\n", "a", "(", "###REFERENCE: ", "<repo_name>"])
@pytest.mark.parametrize("family", WITH_SUFFIX)
def test_long_runs_of_anything_are_read_once(family: str, filler: str) -> None:
    form, long = FAMILIES[family], filler * 20_000 + "x"
    started_s = process_time()
    for prompt in (
        render_fim(family, "a", "b") + long,
        render_fim(family, long, long),
        long + render_fim(family, "a", "b"),
        f"{form.begin}{long}",
    ):
        parse_fim(prompt)
    assert process_time() - started_s < 1.0


@pytest.mark.parametrize(
    "prompt",
    [
        # Continue, for the families Qwen, StarCoder 2, Codestral and CodeGeeX.
        "<|fim_prefix|><|repo_name|>shop\n<|file_sep|>a.py\nA = 1\n<|file_sep|>b.py\nx = "
        "<|fim_suffix|>\n<|fim_middle|>",
        "[SUFFIX]\n[PREFIX]+++++ a.py\nA = 1\n\n+++++ b.py\nx = ",
        "<|user|>\n###REFERENCE:\n###PATH:a.py\nA = 1\n\n###PATH:b.py\n###LANGUAGE:python\n"
        "###MODE:BLOCK\n<|code_suffix|>\n<|code_prefix|>x = <|code_middle|><|assistant|>\n",
        # The form of Qwen's own guide, with the files before the first sentinel.
        "<|repo_name|>shop\n<|file_sep|>a.py\nA = 1\n<|file_sep|>b.py\n"
        "<|fim_prefix|>x = <|fim_suffix|>\n<|fim_middle|>",
        "<s><reponame>shop<filename>a.py\nA = 1\n<filename>b.py\n"
        "<fim_prefix>x = <fim_suffix>\n<fim_middle>",
    ],
)
def test_other_files_become_context_and_the_own_path_is_known(prompt: str) -> None:
    parts = parse_fim(prompt)
    assert parts is not None
    assert (parts.prefix, parts.suffix) == ("x = ", "\n")
    assert (parts.context, parts.path) == ("a.py\nA = 1", "b.py")


def test_marks_of_one_family_are_code_in_the_prompts_of_another() -> None:
    parts = parse_fim("<fim_prefix>+++++ not a file\nx<fim_suffix><fim_middle>")
    assert parts is not None
    assert parts.prefix == "+++++ not a file\nx"


@pytest.mark.parametrize("family", WITH_SUFFIX)
@pytest.mark.parametrize(
    "mark",
    [
        "<filename>", "<file_sep>", "<|file_sep|>", "<|file_separator|>", "<reponame>",
        "###PATH:", "+++++ ",
    ],
)  # fmt: skip
def test_file_marks_inside_the_users_code_are_code(family: str, mark: str) -> None:
    prefix = f"import sys\nprint('usage: prog {mark} [options]')\n{mark}\nx = "
    parts = parse_fim(render_fim(family, prefix, "\n"))
    assert parts is not None
    assert (parts.prefix, parts.context, parts.path) == (prefix, "", "")


def test_a_mark_of_another_family_at_the_start_is_code() -> None:
    parts = parse_fim(render_fim("qwen", "<filename> is an argument\nx = ", "\n"))
    assert parts is not None
    assert parts.prefix == "<filename> is an argument\nx = "


def test_marks_inside_the_lines_of_a_prefix_with_files_are_code() -> None:
    code = "A = '<|file_sep|>'\n<|file_sep|>b.py\nB = '<|file_sep|>'\nx = "
    parts = parse_fim(f"<|fim_prefix|><|file_sep|>a.py\n{code}<|fim_suffix|><|fim_middle|>")
    assert parts is not None
    assert parts.prefix == "B = '<|file_sep|>'\nx = "
    assert (parts.context, parts.path) == ("a.py\nA = '<|file_sep|>'", "b.py")
