"""The fill-in-the-middle formats of model families, and which family a model's name suggests."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from cato.core.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class FimFamily:
    """A prompt is `begin` PREFIX `hole` SUFFIX `end`; `suffix_first` swaps prefix and suffix.

    `stops` end an answer that runs into the next file or sentinel. The engine adds a begin-of-text
    token. Without `has_suffix` the model only continues the prefix; without `takes_context` it gets
    no code of other files.
    """

    name: str
    begin: str = ""
    hole: str = ""
    end: str = ""
    stops: tuple[str, ...] = ()
    suffix_first: bool = False
    has_suffix: bool = True
    takes_context: bool = True


_QWEN = FimFamily(
    "qwen",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    (
        "<|endoftext|>",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<|im_start|>",
        "<|im_end|>",
    ),
)

FAMILIES = {
    family.name: family
    for family in (
        # Qwen2.5-Coder's README; Granite 4 uses the same tokens.
        _QWEN,
        # The demo model: the same tokens, but it never saw context from other files, and writes
        # comments about it instead of code.
        replace(_QWEN, name="demo", takes_context=False),
        # StarCoder 1 and 2, Granite Code 3, Stable Code, CodeQwen 1.5.
        FimFamily(
            "starcoder",
            "<fim_prefix>",
            "<fim_suffix>",
            "<fim_middle>",
            (
                "<|endoftext|>",
                "<fim_prefix>",
                "<fim_suffix>",
                "<fim_middle>",
                "<fim_pad>",
                "<file_sep>",
                "<filename>",
            ),
        ),
        # The full-width bars are part of the tokens.
        FimFamily(
            "deepseek-coder",
            "<｜fim▁begin｜>",
            "<｜fim▁hole｜>",
            "<｜fim▁end｜>",
            (
                "<｜end▁of▁sentence｜>",
                "<｜fim▁begin｜>",
                "<｜fim▁hole｜>",
                "<｜fim▁end｜>",
                "<|EOT|>",
            ),
        ),
        # The blanks are part of the format: the tokens are `▁<PRE>`, `▁<SUF>`, `▁<MID>`.
        FimFamily(
            "codellama", "<PRE> ", " <SUF>", " <MID>", ("<EOT>", "<PRE>", "<SUF>", "<MID>", "</s>")
        ),
        FimFamily(
            "codestral",
            "[SUFFIX]",
            "[PREFIX]",
            "",
            ("[PREFIX]", "[SUFFIX]", "[MIDDLE]", "</s>"),
            suffix_first=True,
        ),
        FimFamily(
            "codegemma",
            "<|fim_prefix|>",
            "<|fim_suffix|>",
            "<|fim_middle|>",
            (
                "<|file_separator|>",
                "<|fim_prefix|>",
                "<|fim_suffix|>",
                "<|fim_middle|>",
                "<eos>",
                "<end_of_turn>",
            ),
        ),
        # Seed-Coder's model card.
        FimFamily(
            "seed-coder",
            "<[fim-suffix]>",
            "<[fim-prefix]>",
            "<[fim-middle]>",
            ("<[end▁of▁sentence]>", "<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
            suffix_first=True,
        ),
        # CodeGeeX4's guide to infilling.
        FimFamily(
            "glm",
            "<|code_suffix|>",
            "<|code_prefix|>",
            "<|code_middle|>",
            (
                "<|endoftext|>",
                "<|user|>",
                "<|assistant|>",
                "<|observation|>",
                "<|code_prefix|>",
                "<|code_suffix|>",
                "<|code_middle|>",
            ),
            suffix_first=True,
        ),
        FimFamily("none", has_suffix=False),
    )
}

# First match wins. General Qwen models (without "coder") were not trained to fill in.
_BY_MODEL_NAME = (
    (r"codeqwen", "starcoder"),
    (r"\bcato-demo\b|^demo$", "demo"),
    (r"qwen.*coder", "qwen"),
    (r"granite-?4", "qwen"),
    (r"star-?coder|granite|stable-?code|octocoder", "starcoder"),
    (r"deepseek.*coder", "deepseek-coder"),
    (r"code-?llama", "codellama"),
    (r"codestral", "codestral"),
    (r"codegemma", "codegemma"),
    (r"seed-?coder", "seed-coder"),
    (r"codegeex-?4", "glm"),
)


def fim_family(name: str) -> FimFamily:
    """Raise `UnknownNameError` when there is no such family."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise UnknownNameError("fill-in-the-middle family", name, tuple(FAMILIES)) from None


def family_of(model_name: str) -> str:
    """The family that a model's name or path suggests; `none` when it suggests nothing."""
    lowered = model_name.lower()
    return next((family for p, family in _BY_MODEL_NAME if re.search(p, lowered)), "none")


def stop_strings(family: str) -> tuple[str, ...]:
    """The stop strings of this family; raise `UnknownNameError`."""
    return fim_family(family).stops
