"""Trains the demo model from scratch: `python -m cato.lab.demo_model.train --out cato/demo/model`.

A small Llama on the Python standard library, with fill-in-the-middle, in Hugging Face layout. The
defaults suit one core and forty minutes, two passes over the files; many passes memorize them.
On a GPU (`--device cuda`) use more text (`--packages`) and processes that prepare it
(`--data-workers`). Needs `pip install cato[train]`.
"""

import argparse
import contextlib
import datetime
import math
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional

from cato.lab.demo_model.corpus import (
    SourceFile,
    package_facts,
    package_sources,
    standard_library,
    standard_library_folder,
)
from cato.lab.demo_model.export import RunFacts, export, told_of_data
from cato.lab.demo_model.fim_samples import (
    CHAT_END,
    CHAT_START,
    END_OF_TEXT,
    FILE_SEP,
    SPECIAL_TOKENS,
    FimSample,
)
from cato.lab.demo_model.llama import DEFAULT_SHAPE, HEAD_DIM, Llama, ModelShape, Muon
from cato.lab.demo_model.windows import PAD, DataPosition, EpochMaker, Windows, WindowStream

# A line break with the next line's indentation is one token, an identifier with its underscores
# one word: code repeats these most. Every byte matches some branch.
SPLIT_PATTERN = r"\n+ *| ?[\p{L}_]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+| +(?=\S)|\s+"

IGNORED = -100  # functional.cross_entropy's default `ignore_index`
WARMUP_FRACTION = 0.02
# The learning rate falls over this last part; before it is flat, so that interim exports and
# resumed runs lose little.
DECAY_FRACTION = 0.6
EVAL_TOKENS = 24_576
LOG_EVERY_S = 20.0


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
    device = model.device
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
    """Greedy, without a KV cache: only to inspect the result."""
    device = model.device
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


@dataclass(slots=True)
class Progress:
    """Progress of a run, checkpointed with the weights."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


def library_version(root: Path) -> str:
    """`3.11.7` for this interpreter's library, else the version in its folder's name."""
    if root == standard_library_folder():
        return platform.python_version()
    return root.name.removeprefix("python")


def schedule(done: float) -> float:
    """Learning-rate factor at a fraction of the run: short warm-up, flat, then linear to zero."""
    if done < WARMUP_FRACTION:
        return done / WARMUP_FRACTION
    return min(1.0, max(0.0, (1.0 - done) / DECAY_FRACTION))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cato.lab.demo_model.train", description=__doc__
    )
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
        help="last part of the training, on windows of the whole context; earlier ones are half as "
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
        help="installed packages to add, by import name; mind their licences",
    )
    parser.add_argument(
        "--data-workers", type=int, default=0, help="processes that prepare epochs ahead"
    )
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="peak rate of Muon")
    parser.add_argument("--rate", type=float, default=0.003, help="peak rate of AdamW")
    parser.add_argument("--export-minutes", type=float, default=10.0, help="time between exports")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--machine", help="description of this machine for the model card")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(".cache/demo-train.pt"),
        help="an existing one is continued; removed at the end",
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


class Run:
    """One training run: its data, model, optimizers and progress."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        files = standard_library(arguments.corpus)
        self.kept = [file for file in files if not file.is_held_out]
        self.held_out = [file for file in files if file.is_held_out]
        if not self.kept or not self.held_out:
            sys.exit(f"{arguments.corpus} is not a standard library: too few Python files")
        if arguments.continue_from is None:
            self.tokenizer = train_tokenizer(self.kept, arguments.vocab)
        else:
            self.tokenizer = Tokenizer.from_file(str(arguments.continue_from / "tokenizer.json"))
        for name in arguments.packages:
            self.kept += package_sources(name)
        self.corpus_bytes = sum(len(file.text.encode()) for file in self.kept)
        megabytes = self.corpus_bytes / 1e6
        say(f"{len(self.kept)} files, {megabytes:.1f} MB to learn; {len(self.held_out)} held out")
        self.model = self._new_model()
        named = list(self.model.named_parameters())
        matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in named if p.ndim != 2 or "embed" in n]
        self.muon = Muon(matrices, weight_decay=0.05)
        self.adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
        shape = self.model.shape
        self.maker = EpochMaker(self.kept, self.tokenizer, arguments.seed, arguments.data_workers)
        sizes = (shape.context // 2, shape.context)
        self.streams = {size: WindowStream(self.maker, size) for size in sizes}
        self.progress = Progress()
        self.fingerprint = {
            **asdict(shape), "seed": arguments.seed, "bytes": self.corpus_bytes, "format": 3
        }  # fmt: skip

    def _new_model(self) -> Llama:
        arguments = self.arguments
        shape = ModelShape(
            vocab=self.tokenizer.get_vocab_size(),
            hidden=arguments.hidden,
            layers=arguments.layers,
            ff=arguments.ff,
            kv_heads=arguments.kv_heads,
        )
        model = Llama(shape).to(self.device)
        parameters = sum(p.numel() for p in model.parameters())
        say(f"{parameters / 1e6:.2f} M parameters, vocabulary {shape.vocab}, device {self.device}")
        self.before = ""
        if arguments.continue_from is not None:
            self.before = told_of_data(arguments.continue_from)
            model.load(arguments.continue_from)
            say(f"starting from the weights of {arguments.continue_from}")
        return model

    def save(self) -> None:
        target: Path = self.arguments.checkpoint
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        torch.save(
            {
                "fingerprint": self.fingerprint,
                "model": self.model.state_dict(),
                "momenta": list(self.muon.momenta.values()),
                "adamw": self.adamw.state_dict(),
                "progress": asdict(self.progress),
                "positions": {size: asdict(s.position) for size, s in self.streams.items()},
            },
            part,
        )
        part.replace(target)

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        source: Path = self.arguments.checkpoint
        if not source.exists():
            return
        saved: dict[str, Any] = torch.load(source, map_location=self.device)
        if saved["fingerprint"] != self.fingerprint:
            sys.exit(
                f"{source} belongs to another run ({saved['fingerprint']}); "
                "delete it or name another --checkpoint"
            )
        self.model.load_state_dict(saved["model"])
        for momentum, value in zip(self.muon.momenta.values(), saved["momenta"], strict=True):
            momentum.copy_(value)
        self.adamw.load_state_dict(saved["adamw"])
        self.progress = Progress(**saved["progress"])
        for size, stream in self.streams.items():
            stream.seek(DataPosition(**saved["positions"][size]))
        say(f"continuing at step {self.progress.step}, {self.progress.elapsed_s / 60:.1f} min")

    def export(self, max_tokens: int | None) -> float:
        """Write the model folder; its bits per byte on held-out files."""
        arguments, progress = self.arguments, self.progress
        bits = held_out_bits_per_byte(self.model, self.held_out, self.tokenizer, max_tokens)
        cores = f"{os.cpu_count()} {platform.machine()} cores, device {self.device.type}"
        facts = RunFacts(
            command="python -m cato.lab.demo_model.train " + shlex.join(sys.argv[1:]),
            seed=arguments.seed,
            machine=arguments.machine or cores,
            date=datetime.date.today().isoformat(),
            minutes=progress.elapsed_s / 60,
            steps=progress.step,
            tokens=progress.tokens,
            corpus_files=len(self.kept),
            corpus_bytes=self.corpus_bytes,
            python=library_version(arguments.corpus),
            packages=tuple(package_facts(name) for name in arguments.packages),
            before=self.before,
            bits_per_byte=bits,
        )
        export(arguments.out, self.model, self.tokenizer, facts)
        return bits

    def done(self) -> float:
        """The completed fraction of the run."""
        if self.arguments.steps is None:
            return self.progress.elapsed_s / (60 * float(self.arguments.minutes))
        return float(self.progress.step / self.arguments.steps)

    def window_size(self) -> int:
        """Windows are long in the last part of the run; they are prepared shortly before."""
        context, done = self.model.shape.context, self.done()
        long_from = 1 - self.arguments.long_fraction
        if 0.9 * long_from < done < long_from:
            self.maker.prepare(context, self.streams[context].position.epoch)
        return context if done >= long_from else context // 2

    def train(self) -> None:
        """Train until the budget is used; logs and exports on the way."""
        first = self.window_size()
        self.maker.prepare(first, self.streams[first].position.epoch)  # while the compiler works
        is_compiled = not self.arguments.no_compile
        loss_of = _loss_function(self.model, self.device, is_compiled=is_compiled)
        losses: list[Tensor] = []
        last_log_s = last_export_s = self.progress.elapsed_s
        previous_s = time.monotonic()
        while self.done() < 1.0:
            size = self.window_size()
            windows = self.streams[size].batch(max(1, self.arguments.batch_tokens // size))
            tokens, targets = as_batch(windows, self.device)
            losses.append(self._step(loss_of(tokens, targets)))  # read when logged
            self.progress.step += 1
            self.progress.tokens += tokens.numel()
            now_s = time.monotonic()
            self.progress.elapsed_s += now_s - previous_s
            previous_s = now_s
            elapsed_s = self.progress.elapsed_s
            if elapsed_s - last_log_s > LOG_EVERY_S:
                rate = len(losses) * tokens.numel() / (elapsed_s - last_log_s)
                say(
                    f"{elapsed_s / 60:5.1f} min  step {self.progress.step:5d}  "
                    f"loss {torch.stack(losses).mean().item():.3f}  {rate:,.0f} tokens/s  "
                    f"window {size}  epoch {self.streams[size].position.epoch}"
                )
                losses, last_log_s = [], elapsed_s
            if elapsed_s - last_export_s > self.arguments.export_minutes * 60:
                bits = self.export(EVAL_TOKENS)
                self.save()
                last_export_s = elapsed_s
                say(f"interim export: {bits:.3f} bits per byte on part of the held-out files")

    def _step(self, loss: Tensor) -> Tensor:
        factor = schedule(self.done())
        loss.backward()  # type: ignore[no-untyped-call]
        self.muon.step(self.arguments.matrix_rate * factor)
        for group in self.adamw.param_groups:
            group["lr"] = self.arguments.rate * factor
        self.adamw.step()
        self.adamw.zero_grad()
        self.model.zero_grad()
        return loss.detach()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    run = Run(arguments)
    run.resume()
    # Explicitly, because a shell starts background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        run.train()
    except KeyboardInterrupt:
        run.save()
        sys.exit(f"interrupted; run the same command to continue from {arguments.checkpoint}")
    finally:
        run.maker.close()
    bits = run.export(None)
    arguments.checkpoint.unlink(missing_ok=True)
    say(f"wrote {arguments.out}: {bits:.3f} bits per byte on {len(run.held_out)} held-out files")
    for prompt in SAMPLE_PROMPTS:
        say(f"--- {prompt!r}\n{complete(run.model, run.tokenizer, prompt, 80)}")


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
    except Exception as error:  # whatever the compiler lacks, eager mode works
        say(f"torch.compile failed, training without it: {type(error).__name__}: {error}")
        return plain
    return compiled


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
