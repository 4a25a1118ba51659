"""Exports a training run: weights, tokenizer, configuration and model card."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from cato.lab.demo_model.fim_samples import (
    END_OF_TEXT,
    FILE_SEP,
    FIM_MIDDLE,
    FIM_PAD,
    FIM_PREFIX,
    FIM_SUFFIX,
    SPECIAL_TOKENS,
)
from cato.lab.demo_model.llama import HEAD_DIM, Llama, ModelShape

PACKAGES = "The packages, with their licences"

# The model has learned only `user` and `assistant` turns; it has never seen system text, so the
# template drops it: otherwise it would push the request out of distribution.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run for the model card."""

    command: str
    seed: int
    machine: str
    date: str
    minutes: float
    steps: int
    tokens: int
    corpus_files: int
    corpus_bytes: int
    python: str
    packages: tuple[str, ...]  # with version and licence
    before: str  # data and training notes from the card of the model it continues
    bits_per_byte: float


def export(folder: Path, model: Llama, tokenizer: Tokenizer, facts: RunFacts) -> None:
    """Writes the Hugging Face folder; each file is replaced whole, so a reader never sees half."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.weights().items()
    }
    temporary = folder / "model.safetensors.part"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)  # safetensors writes 0600, which another user's engine cannot read
    temporary.replace(folder / "model.safetensors")

    end, pad = SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(FIM_PAD)
    names = {"eos_token": END_OF_TEXT, "pad_token": FIM_PAD}
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    _write_json(folder / "config.json", model.shape.hf_config())
    _write_json(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": pad})
    _write_json(
        folder / "special_tokens_map.json",
        {**names, "additional_special_tokens": list(SPECIAL_TOKENS)},
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.shape.context,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
            **names,
            "bos_token": None,
            "unk_token": None,
            "additional_special_tokens": list(SPECIAL_TOKENS),
            "added_tokens_decoder": {
                str(i): {"content": token, **flags, "special": True}
                for i, token in enumerate(SPECIAL_TOKENS)
            },
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    parameters = sum(p.numel() for p in model.parameters())
    megabytes = (folder / "model.safetensors").stat().st_size / 1e6
    _write_text(folder / "README.md", _model_card(model.shape, parameters, megabytes, facts))


def _write_json(path: Path, value: object) -> None:
    _write_text(path, json.dumps(value, indent=2) + "\n")


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(0o644)
    temporary.replace(path)


def told_of_data(folder: Path) -> str:
    """The data and training sections of an export's card; empty when it has no card."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    return "- Data:" + text.partition("- Data:")[2].partition("\n## ")[0] if text else ""


def _model_card(shape: ModelShape, parameters: int, megabytes: float, facts: RunFacts) -> str:
    packages = others = before = ""
    if facts.before:
        before = f"\n## Before\n\nIt goes on from a model whose card said:\n\n{facts.before}"
    if facts.packages:
        others = f"\n  and of {len(facts.packages)} packages"
        packages = textwrap.fill(
            f"{PACKAGES}: {'; '.join(facts.packages)}. The weights are under CATO's licence.", 100
        )
        packages = f"\n{packages}\n"
    return f"""\
---
license: {"apache-2.0" if PACKAGES in packages + facts.before else "psf-2.0"}
language: [code]
tags: [python, fill-in-the-middle]
---
# CATO demo model

A code model small enough to ship: {parameters / 1e6:.2f} M parameters, {megabytes:.1f} MB in
bfloat16. It exists so that CATO's examples and live tests run on real weights in a real engine,
with nothing to download and no GPU. It is not a useful coding assistant.

- Shape: Llama, {shape.layers} layers, hidden {shape.hidden}, {shape.heads} query and \
{shape.kv_heads} key-value heads of {HEAD_DIM},
  feed-forward {shape.ff}, tied embeddings, context {shape.context} tokens, byte-level BPE of \
{shape.vocab} tokens.
- Data: sources of the Python {facts.python} standard library (Python Software Foundation \
License){others},
  {facts.corpus_files:,} files, {facts.corpus_bytes / 1e6:.1f} MB, without tests and generated \
tables.
- Training: seed {facts.seed}, {facts.minutes:.0f} minutes, {facts.steps:,} steps, \
{facts.tokens / 1e6:.1f} M tokens, on
  {facts.machine}, {facts.date}.
- Held-out files of the standard library: {facts.bits_per_byte:.3f} bits per byte (no FIM, \
windows of the full
  context).
{packages}
Made by (a budget in minutes; only runs with `--steps` repeat exactly):

    {facts.command}
{before}
## Prompts

Fill-in-the-middle, as with Qwen2.5-Coder; the answer ends with `{END_OF_TEXT}`:

    {FIM_PREFIX}def add(a, b):\\n    return {FIM_SUFFIX}\\n{FIM_MIDDLE}

Plain continuation: start with `{FILE_SEP}` or nothing. Chat: requests made of docstrings were its
only instructions ("Return the size of a file in bytes."), answered with one function. System
messages are dropped by the chat template.

## What it cannot do

Write correct code, other than by luck; follow instructions; hold a conversation; any language but
Python; any natural language. With the cursor in the middle of a line it often starts a new
statement instead of finishing the old one; long greedy answers end in loops, so sample them or keep
them short. It repeats phrases of the standard library, at times word for word.
"""
