"""Trains the demo model from scratch: `python -m cato.demo.train --out cato/demo/model`.

A small Llama on the Python standard library, with fill-in-the-middle, in Hugging Face layout. The
defaults suit one core and forty minutes, twice through the files; many passes learn them by heart.
A GPU (`--device cuda`) wants more text, `--packages`, and the processes that prepare it,
`--data-workers`. Needs `pip install cato[train]`.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

from cato.demo.corpus import (
    SourceFile,
    package_facts,
    package_sources,
    standard_library,
    standard_library_folder,
)
from cato.demo.fim_samples import (
    CHAT_END,
    CHAT_START,
    END_OF_TEXT,
    FILE_SEP,
    FIM_MIDDLE,
    FIM_PAD,
    FIM_PREFIX,
    FIM_SUFFIX,
    SPECIAL_TOKENS,
    FimSample,
)
from cato.demo.windows import PAD, DataPosition, EpochMaker, Windows, WindowStream

# A line break with the next line's indentation is one token, an identifier with its underscores
# one word: both are what code repeats most. Every byte falls under some branch.
SPLIT_PATTERN = r"\n+ *| ?[\p{L}_]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+| +(?=\S)|\s+"

# The model has learned `user` and `assistant` turns only; it has seen no system text, so the
# template drops it rather than let it push the request out of distribution.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HEAD_DIM = 64  # one of the sizes vLLM's CPU attention supports
PACKAGES = "The packages, with their licences"
IGNORED = -100  # functional.cross_entropy's default `ignore_index`
MUON_MOMENTUM = 0.95
WARMUP_FRACTION = 0.02
# The learning rate falls over this last part; before it is flat, so that an interim export and a
# resumed run lose little.
DECAY_FRACTION = 0.6
EVAL_TOKENS = 24_576
LOG_EVERY_S = 20.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Llama's sizes; `hidden` must be a multiple of the head size, 64."""

    vocab: int = 3_072
    hidden: int = 192
    layers: int = 4
    ff: int = 512
    kv_heads: int = 1
    context: int = 1_024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_DIM

    def hf_config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ff,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
            "pad_token_id": SPECIAL_TOKENS.index(FIM_PAD),
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


DEFAULT_SHAPE = ModelShape()


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(shape.heads * HEAD_DIM, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, self.heads, HEAD_DIM).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, self.kv_heads, HEAD_DIM).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, HEAD_DIM).transpose(1, 2)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class Mlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ff, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ff, bias=False)
        self.down_proj = nn.Linear(shape.ff, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """Parameter names are Hugging Face's less the leading `model.`, added on export."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM
        angles = torch.outer(
            torch.arange(shape.context, dtype=torch.float32), shape.rope_theta**-exponents
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # every block starts as the identity
            else:
                std = 0.02 if "embed" in name else shape.hidden**-0.5
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self(tokens)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class Muon:
    """Momentum whose update is orthogonalised (Jordan 2024, kellerjordan.github.io/posts/muon).

    Unlike `torch.optim.Muon` it works in float32, which AVX2-only CPUs multiply eight times
    faster than bfloat16, and it stacks matrices of equal shape.
    """

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.momenta = {
            key: torch.zeros(len(group), *key, device=group[0].device)
            for key, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for key, group in self.groups.items():
            gradient = torch.stack([_gradient(p) for p in group])
            momentum = self.momenta[key]
            momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
            update = _orthogonalised(gradient.lerp(momentum, MUON_MOMENTUM))
            scale = rate * max(1.0, key[0] / key[1]) ** 0.5
            for parameter, delta in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.weight_decay).sub_(delta, alpha=scale)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "step() follows backward()"
    return parameter.grad.float()


def _orthogonalised(stack: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices, coefficients as in Muon."""
    is_tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if is_tall else stack
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result


def train_tokenizer(files: list[SourceFile], vocab: int) -> Tokenizer:
    """Byte-level BPE; the special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.text for file in files), trainer)
    return tokenizer


def as_batch(windows: Windows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (rows, window_tokens); padding has no loss."""
    tokens = torch.from_numpy(windows).to(device, torch.long)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    targets[targets == PAD] = IGNORED
    return inputs, targets


@torch.no_grad()
def held_out_bits_per_byte(
    model: Llama, files: list[SourceFile], tokenizer: Tokenizer, max_tokens: int | None
) -> float:
    """Cost of unseen files, read in separate windows of the full context."""
    device = model.embed_tokens.weight.device
    separator = SPECIAL_TOKENS.index(FILE_SEP)
    size = model.shape.context
    nats, scored_bytes, scored_tokens = 0.0, 0, 0
    order = list(files)
    Random(0).shuffle(order)  # the quick subset should not be the alphabet's first files
    for file in order:
        ids = tokenizer.encode(file.text).ids
        for start in range(0, len(ids), size - 1):
            part = ids[start : start + size - 1]
            if max_tokens is not None and scored_tokens >= max_tokens:
                break
            row = torch.tensor([[separator, *part]], device=device)
            logits = model(row[:, :-1]).float()
            nats += functional.cross_entropy(logits[0], row[0, 1:], reduction="sum").item()
            scored_bytes += len(tokenizer.decode(part).encode())
            scored_tokens += len(part)
    return nats / math.log(2) / scored_bytes


@torch.no_grad()
def complete(model: Llama, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> str:
    """Greedy, without a KV cache: only for a look at the result."""
    device = model.embed_tokens.weight.device
    ids = tokenizer.encode(prompt).ids
    start = len(ids)
    while len(ids) - start < max_tokens and len(ids) < model.shape.context:
        token = int(model(torch.tensor([ids], device=device))[0, -1].argmax())
        if token == SPECIAL_TOKENS.index(END_OF_TEXT):
            break
        ids.append(token)
    return str(tokenizer.decode(ids[start:], skip_special_tokens=False))


SAMPLE_PROMPTS = (
    FimSample(
        "import os\n\n\ndef read_text(path):\n    with open(path", "", "\n    return text\n"
    ).prompt,
    FimSample(
        "class Stack:\n    def __init__(self):\n        ",
        "",
        "\n\n    def push(self, item):\n        self._items.append(item)\n",
    ).prompt,
    f"{FILE_SEP}def is_even(",
    f"{CHAT_START}user\nWrite a Python function. Return the size of a file in bytes.{CHAT_END}\n"
    f"{CHAT_START}assistant\n",
)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the model card tells about a run."""

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
    before: str  # what the card of the model that it goes on from said of data and training
    bits_per_byte: float


def export(folder: Path, model: Llama, tokenizer: Tokenizer, facts: RunFacts) -> None:
    """Writes the Hugging Face folder; each file is replaced whole, so a reader never sees half."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
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


def load_weights(model: Llama, folder: Path) -> None:
    """Weights of an earlier export; a later run with a lower rate goes on from them."""
    saved = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): w for name, w in saved.items()})


def _write_json(path: Path, value: object) -> None:
    _write_text(path, json.dumps(value, indent=2) + "\n")


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(0o644)
    temporary.replace(path)


def told_of_data(folder: Path) -> str:
    """What an export's card says of its data and its training; empty when it has no card."""
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


@dataclass(slots=True)
class Progress:
    """How far a run has come, checkpointed with the weights."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


def library_version(root: Path) -> str:
    """`3.11.7` for this interpreter's library, else what its folder's name tells."""
    if root == standard_library_folder():
        return platform.python_version()
    return root.name.removeprefix("python")


def schedule(done: float) -> float:
    """Learning-rate factor at a fraction of the run: short warm-up, flat, then linear to zero."""
    if done < WARMUP_FRACTION:
        return done / WARMUP_FRACTION
    return min(1.0, max(0.0, (1.0 - done) / DECAY_FRACTION))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cato.demo.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--minutes", type=float, default=40.0, help="time budget of the training")
    parser.add_argument(
        "--steps", type=int, help="stop after N steps instead: repeats a run exactly"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vocab", type=int, default=DEFAULT_SHAPE.vocab)
    parser.add_argument("--hidden", type=int, default=DEFAULT_SHAPE.hidden)
    parser.add_argument("--layers", type=int, default=DEFAULT_SHAPE.layers)
    parser.add_argument("--ff", type=int, default=DEFAULT_SHAPE.ff)
    parser.add_argument("--kv-heads", type=int, default=DEFAULT_SHAPE.kv_heads)
    parser.add_argument(
        "--long-fraction",
        type=float,
        default=0.25,
        help="last part of the training, on windows of the whole context; the others are half as "
        "long and cost less",
    )
    parser.add_argument("--batch-tokens", type=int, default=4_096)
    parser.add_argument(
        "--corpus",
        type=Path,
        default=standard_library_folder(),
        help="a standard library's folder (default: this interpreter's)",
    )
    parser.add_argument(
        "--packages",
        nargs="*",
        default=[],
        help="installed packages to learn too, by import name; mind their licences",
    )
    parser.add_argument(
        "--data-workers", type=int, default=0, help="processes that prepare epochs ahead"
    )
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="peak rate of Muon")
    parser.add_argument("--rate", type=float, default=0.003, help="peak rate of AdamW")
    parser.add_argument("--export-minutes", type=float, default=10.0, help="between exports")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--machine", help="the model card's words for this machine")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(".cache/demo-train.pt"),
        help="a run that finds it continues; removed at the end",
    )
    parser.add_argument(
        "--continue-from",
        type=Path,
        help="start from the weights of this exported folder, made with the same shape and files",
    )
    arguments = parser.parse_args()
    if arguments.hidden % HEAD_DIM:
        parser.error(f"--hidden must be a multiple of {HEAD_DIM}, not {arguments.hidden}")
    if (arguments.hidden // HEAD_DIM) % arguments.kv_heads:
        parser.error(f"--kv-heads must divide the {arguments.hidden // HEAD_DIM} query heads")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)

    files = standard_library(arguments.corpus)
    kept = [file for file in files if not file.is_held_out]
    held_out = [file for file in files if file.is_held_out]
    if not kept or not held_out:
        sys.exit(f"{arguments.corpus} is no standard library: too few Python files")
    if arguments.continue_from is None:
        tokenizer = train_tokenizer(kept, arguments.vocab)
    else:
        tokenizer = Tokenizer.from_file(str(arguments.continue_from / "tokenizer.json"))
    for name in arguments.packages:
        kept += package_sources(name)
    packages = tuple(package_facts(name) for name in arguments.packages)
    corpus_bytes = sum(len(file.text.encode()) for file in kept)
    say(f"{len(kept)} files, {corpus_bytes / 1e6:.1f} MB to learn; {len(held_out)} held out")
    shape = ModelShape(
        vocab=tokenizer.get_vocab_size(),
        hidden=arguments.hidden,
        layers=arguments.layers,
        ff=arguments.ff,
        kv_heads=arguments.kv_heads,
    )
    model = Llama(shape).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{parameters / 1e6:.2f} M parameters, vocabulary {shape.vocab}, device {device}")

    before = ""
    if arguments.continue_from is not None:
        before = told_of_data(arguments.continue_from)
        load_weights(model, arguments.continue_from)
        say(f"starting from the weights of {arguments.continue_from}")

    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = Muon(matrices, weight_decay=0.05)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    maker = EpochMaker(kept, tokenizer, arguments.seed, arguments.data_workers)
    streams = {size: WindowStream(maker, size) for size in (shape.context // 2, shape.context)}
    progress = Progress()
    fingerprint = {**asdict(shape), "seed": arguments.seed, "bytes": corpus_bytes, "format": 2}

    def save_checkpoint() -> None:
        arguments.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        part = arguments.checkpoint.with_suffix(".part")
        torch.save(
            {
                "fingerprint": fingerprint,
                "model": model.state_dict(),
                "momenta": list(muon.momenta.values()),
                "adamw": adamw.state_dict(),
                "progress": asdict(progress),
                "positions": {size: asdict(s.position) for size, s in streams.items()},
            },
            part,
        )
        part.replace(arguments.checkpoint)

    if arguments.checkpoint.exists():
        saved: dict[str, Any] = torch.load(arguments.checkpoint, map_location=device)
        if saved["fingerprint"] != fingerprint:
            sys.exit(
                f"{arguments.checkpoint} belongs to another run ({saved['fingerprint']}); "
                "delete it or name another --checkpoint"
            )
        model.load_state_dict(saved["model"])
        for momentum, value in zip(muon.momenta.values(), saved["momenta"], strict=True):
            momentum.copy_(value)
        adamw.load_state_dict(saved["adamw"])
        progress = Progress(**saved["progress"])
        for size, stream in streams.items():
            stream.seek(DataPosition(**saved["positions"][size]))
        say(f"continuing at step {progress.step}, {progress.elapsed_s / 60:.1f} min")

    def facts(bits_per_byte: float) -> RunFacts:
        return RunFacts(
            command="python -m cato.demo.train " + shlex.join(sys.argv[1:]),
            seed=arguments.seed,
            machine=arguments.machine
            or f"{os.cpu_count()} {platform.machine()} cores, device {device.type}",
            date=datetime.date.today().isoformat(),
            minutes=progress.elapsed_s / 60,
            steps=progress.step,
            tokens=progress.tokens,
            corpus_files=len(kept),
            corpus_bytes=corpus_bytes,
            python=library_version(arguments.corpus),
            packages=packages,
            before=before,
            bits_per_byte=bits_per_byte,
        )

    # Explicitly, because a shell starts background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    first = shape.context if arguments.long_fraction >= 1 else shape.context // 2
    maker.prepare(first, streams[first].position.epoch)  # while the compiler works
    loss_of = _loss_function(model, device, is_compiled=not arguments.no_compile)
    budget_s = arguments.minutes * 60
    losses: list[Tensor] = []
    last_log_s, last_export_s = progress.elapsed_s, progress.elapsed_s
    previous_s = time.monotonic()
    try:
        while True:
            if arguments.steps is None:
                done = progress.elapsed_s / budget_s
            else:
                done = progress.step / arguments.steps
            if done >= 1.0:
                break
            long_from = 1 - arguments.long_fraction
            size = shape.context if done >= long_from else shape.context // 2
            if 0.9 * long_from < done < long_from:
                maker.prepare(shape.context, streams[shape.context].position.epoch)
            windows = streams[size].batch(max(1, arguments.batch_tokens // size))
            tokens, targets = as_batch(windows, device)
            loss = loss_of(tokens, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            factor = schedule(done)
            muon.step(arguments.matrix_rate * factor)
            for group in adamw.param_groups:
                group["lr"] = arguments.rate * factor
            adamw.step()
            adamw.zero_grad()
            model.zero_grad()
            losses.append(loss.detach())  # read when logged: a GPU works ahead
            progress.step += 1
            progress.tokens += tokens.numel()
            now_s = time.monotonic()
            progress.elapsed_s += now_s - previous_s
            previous_s = now_s

            if progress.elapsed_s - last_log_s > LOG_EVERY_S:
                rate = len(losses) * tokens.numel() / (progress.elapsed_s - last_log_s)
                say(
                    f"{progress.elapsed_s / 60:5.1f} min  step {progress.step:5d}  "
                    f"loss {torch.stack(losses).mean().item():.3f}  {rate:,.0f} tokens/s  "
                    f"window {size}  epoch {streams[size].position.epoch}"
                )
                losses, last_log_s = [], progress.elapsed_s
            if progress.elapsed_s - last_export_s > arguments.export_minutes * 60:
                bits = held_out_bits_per_byte(model, held_out, tokenizer, EVAL_TOKENS)
                export(arguments.out, model, tokenizer, facts(bits))
                save_checkpoint()
                last_export_s = progress.elapsed_s
                say(f"interim export: {bits:.3f} bits per byte on part of the held-out files")
    except KeyboardInterrupt:
        save_checkpoint()
        sys.exit(f"interrupted; run the same command to continue from {arguments.checkpoint}")

    finally:
        maker.close()

    bits = held_out_bits_per_byte(model, held_out, tokenizer, None)
    export(arguments.out, model, tokenizer, facts(bits))
    arguments.checkpoint.unlink(missing_ok=True)
    say(f"wrote {arguments.out}: {bits:.3f} bits per byte on {len(held_out)} held-out files")
    for prompt in SAMPLE_PROMPTS:
        say(f"--- {prompt!r}\n{complete(model, tokenizer, prompt, 80)}")


def _loss_function(
    model: Llama, device: torch.device, *, is_compiled: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss, compiled where a compiler is found; bfloat16 only on GPUs, see `Muon`."""

    def plain(tokens: Tensor, targets: Tensor) -> Tensor:
        with (
            torch.autocast(device.type, torch.bfloat16)
            if device.type == "cuda"
            else contextlib.nullcontext()
        ):
            return model.loss(tokens, targets)

    if not is_compiled:
        return plain
    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(plain, dynamic=False)
    try:
        probe = torch.zeros(1, 16, dtype=torch.long, device=device)
        compiled(probe, probe).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
    except Exception as error:  # whatever the compiler lacks, eager training works
        say(f"torch.compile failed, training without it: {type(error).__name__}: {error}")
        return plain
    return compiled


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
