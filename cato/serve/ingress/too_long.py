"""The words for a prompt that is too long: clients recognize them and compact the history."""

from __future__ import annotations


def too_long(prompt: int | None, output: int | None, context: int | None) -> tuple[str, str]:
    """OpenAI's words, empty if the `context` is unknown, and Anthropic's. In tokens."""
    if context is None:
        return "", "prompt is too long for this model's maximum context length"
    limit = f"This model's maximum context length is {context} tokens."
    if prompt is None:
        asked = "" if output is None else f" However, you asked for {output} output tokens."
        to_openai = f"{limit}{asked} Please shorten the input or lower max_tokens."
        return to_openai, f"prompt is too long for this model: {limit}"
    if prompt >= context or output is None:
        to_openai = (
            f"{limit} However, your input has {prompt} tokens"
            + ("." if output is None else f", and you asked for {output} output tokens.")
            + " Please shorten the input."
        )
        return to_openai, f"prompt is too long: {prompt} tokens > {context} maximum"
    to_openai = (
        f"{limit} However, you requested {prompt + output} tokens ({prompt} in the input, "
        f"{output} for the output). Please shorten the input or lower max_tokens."
    )
    # Claude Code reads the numbers and lowers max_tokens.
    to_anthropic = (
        f"input length and `max_tokens` exceed context limit: {prompt} + {output} > "
        f"{context}, decrease input length or `max_tokens` and try again"
    )
    return to_openai, to_anthropic
