"""The demo model's training: what it packs, and that its command ends in a model folder.

Tests import torch and transformers where they use them: every worker collects this file, and the
import takes as long as that of all other files together.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

if find_spec("torch") is None:
    pytest.skip("`torch` is not installed", allow_module_level=True)
from tokenizers import Tokenizer

from cato.lab.demo_model.corpus import SourceFile, package_facts, package_sources, shards
from cato.lab.demo_model.windows import (
    PAD,
    DataPosition,
    EpochMaker,
    WindowStream,
    epoch_windows,
)

HELD_OUT = "site.py"  # a name that `SourceFile.is_held_out` keeps from training

needs_cuda = pytest.mark.skipif(
    "not __import__('torch').cuda.is_available()", reason="needs an NVIDIA card"
)
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]


def a_file(name: str, functions: int = 40) -> SourceFile:
    words = random.Random(name)
    return SourceFile(
        name,
        "\n\n".join(
            f"def {words.choice('fgh')}{i}(left, right):\n"
            f'    """Return what {words.randrange(9)} does."""\n'
            f"    return left {words.choice('+-*')} right"
            for i in range(functions)
        ),
    )


@pytest.fixture(scope="module")
def files() -> list[SourceFile]:
    return [a_file(f"m{i}.py") for i in range(6)]


@pytest.fixture(scope="module")
def tokenizer(files: list[SourceFile]) -> Tokenizer:
    from cato.lab.demo_model.train import train_tokenizer

    return train_tokenizer(files, 400)


def test_windows_are_full_and_padding_is_rare(
    files: list[SourceFile], tokenizer: Tokenizer
) -> None:
    windows = epoch_windows(files, tokenizer, 128, seed=0, epoch=0)
    assert windows.shape[1] == 129
    assert (windows[:-1] == PAD).mean() < 0.2
    assert windows.max() < tokenizer.get_vocab_size()


def test_every_file_is_in_one_shard(files: list[SourceFile], monkeypatch) -> None:
    chars = sum(len(f.text) for f in files) // 3
    monkeypatch.setattr("cato.lab.demo_model.corpus.SHARD_CHARS", chars)
    parts = shards(files, seed=1)
    assert len(parts) == 3
    assert sorted(f.path for part in parts for f in part) == [f.path for f in files]


def test_worker_processes_make_the_windows_that_this_one_makes(
    files: list[SourceFile], tokenizer: Tokenizer
) -> None:
    here, elsewhere = EpochMaker(files, tokenizer, 3, 0), EpochMaker(files, tokenizer, 3, 1)
    try:
        assert (here.windows(64, 2) == elsewhere.windows(64, 2)).all()
    finally:
        elsewhere.close()


def test_a_stream_goes_on_where_it_stood(files: list[SourceFile], tokenizer: Tokenizer) -> None:
    def stream() -> WindowStream:
        return WindowStream(EpochMaker(files, tokenizer, 0, 0), 256)

    whole = stream()
    batches = [whole.batch(5) for _ in range(12)]
    assert whole.position.epoch >= 1
    first = stream()
    for _ in range(7):
        first.batch(5)
    position = DataPosition(first.position.epoch, first.position.windows_taken)
    resumed = stream()
    resumed.seek(position)
    for expected in itertools.islice(batches, 7, None):
        assert (resumed.batch(5) == expected).all()


def test_an_installed_package_is_read_and_named_with_its_licence() -> None:
    paths = {file.path for file in package_sources("click")}
    assert "click/core.py" in paths
    assert package_facts("click").startswith("click ")
    assert "BSD" in package_facts("click")
    with pytest.raises(ValueError, match="no package named no_such_package is installed"):
        package_sources("no_such_package")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", DEVICES)
def test_the_command_ends_in_a_folder_that_another_run_goes_on_from(
    tmp_path: Path, files: list[SourceFile], device: str
) -> None:
    import torch
    from safetensors.torch import load_file

    library = tmp_path / "python9.9"
    library.mkdir()
    for file in [*files, a_file(HELD_OUT)]:
        (library / file.path).write_text(file.text)
    common = ["--corpus", str(library), "--device", device, "--batch-tokens", "1024"]
    common += ["--hidden", "64", "--layers", "1", "--ff", "64", "--no-compile"]

    def train(out: Path, *others: str) -> dict[str, torch.Tensor]:
        module = "cato.lab.demo_model.train"
        command = [sys.executable, "-m", module, "--out", str(out), *common, *others]
        command += ["--checkpoint", str(tmp_path / "checkpoint.pt")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
        assert done.returncode == 0, done.stderr
        weights = load_file(out / "model.safetensors")
        assert all(torch.isfinite(w.float()).all() for w in weights.values())
        return weights

    first, second = tmp_path / "first", tmp_path / "second"
    weights = train(first, "--steps", "30", "--vocab", "400", "--packages", "click")
    config = json.loads((first / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (64, 1)
    # Blocks start as the identity; training has moved them.
    assert weights["model.layers.0.mlp.down_proj.weight"].abs().sum() > 0
    card = (first / "README.md").read_text()
    assert "Python 9.9 standard library" in card
    assert "licences: click" in " ".join(card.split())
    on = train(second, "--steps", "1", "--continue-from", str(first), "--long-fraction", "1")
    assert on["model.embed_tokens.weight"].shape == weights["model.embed_tokens.weight"].shape
    assert (second / "tokenizer.json").read_text() == (first / "tokenizer.json").read_text()
    later = (second / "README.md").read_text()
    assert "license: apache-2.0" in later, "what the first learnt from still counts"
    assert "licences: click" in " ".join(later.split())
    assert later.count("## Prompts") == 1


@pytest.mark.gpu
@needs_cuda
def test_the_card_computes_what_the_processor_computes() -> None:
    import torch

    from cato.lab.demo_model.llama import Llama, ModelShape

    torch.manual_seed(0)
    model = Llama(ModelShape())
    for parameter in model.parameters():  # as built, every block is the identity
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.05)
    tokens = torch.randint(0, model.shape.vocab, (2, 200))
    with torch.no_grad():
        here = model(tokens)
        there = model.cuda()(tokens.cuda()).cpu()
    assert torch.linalg.norm(there - here) < 1e-3 * torch.linalg.norm(here)
