"""Writes small checkpoints with random weights: their text is nonsense and depends on the seed."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from cato.config.places import DEMO_SOURCE, model_path

# Sizes besides those of the demo model; all use its tokenizer.
ARCHITECTURES = {
    "narrow": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    "wide": {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3},
    "deep": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
}
_HEAD_DIM = 64
# The output layer shares the embedding's weights: with strong embeddings every model would repeat
# the last token. With these the layers decide, by margins larger than rounding errors.
_EMBEDDING_SCALE = 0.05
_FINAL_NORM = 8.0
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)


def write_checkpoint(
    folder: Path, architecture: str, seed: int, context_tokens: int | None = None
) -> Path:
    """A Llama of the given sizes in Hugging Face layout; needs torch. Returns `folder`.

    `context_tokens` is the demo model's when it is None.
    """
    import torch
    from safetensors.torch import save_file

    demo = Path(model_path(DEMO_SOURCE))
    config: dict[str, Any] = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    config |= ARCHITECTURES[architecture]
    if context_tokens is not None:
        config["max_position_embeddings"] = context_tokens
    config["num_attention_heads"] = config["hidden_size"] // _HEAD_DIM
    config["num_key_value_heads"] = 1
    generator = torch.Generator().manual_seed(seed)
    hidden, ff = config["hidden_size"], config["intermediate_size"]

    def random(rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    embedding = torch.randn(config["vocab_size"], hidden, generator=generator)
    weights = {"model.embed_tokens.weight": _EMBEDDING_SCALE * embedding}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", _HEAD_DIM, hidden),
            ("self_attn.v_proj", _HEAD_DIM, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", ff, hidden),
            ("mlp.up_proj", ff, hidden),
            ("mlp.down_proj", hidden, ff),
        ):
            weights[f"{at}.{name}.weight"] = random(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{name}.weight"] = torch.ones(hidden)
    weights["model.norm.weight"] = torch.full((hidden,), _FINAL_NORM)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    for name in _TOKENIZER:
        shutil.copy(demo / name, folder / name)
    return folder


def write_adapter(folder: Path, seed: int, rank: int = 8, source: str = DEMO_SOURCE) -> Path:
    """A LoRA adapter of a model (a folder) with random weights, in PEFT's layout; needs torch."""
    import torch
    from safetensors.torch import save_file

    base = Path(model_path(source))
    config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for i in range(config["num_hidden_layers"]):
        at = f"base_model.model.model.layers.{i}.mlp"
        for name, rows, columns in (
            ("gate_proj", config["intermediate_size"], hidden),
            ("down_proj", hidden, config["intermediate_size"]),
        ):
            for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                drawn = torch.randn(*shape, generator=generator)
                weights[f"{at}.{name}.lora_{part}.weight"] = drawn / shape[1] ** 0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["gate_proj", "down_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="parent of the created folders")
    parser.add_argument("--seeds", type=int, default=2, help="checkpoints per architecture")
    args = parser.parse_args()
    for architecture in ARCHITECTURES:
        for seed in range(args.seeds):
            print(write_checkpoint(args.out / f"{architecture}-{seed}", architecture, seed))


if __name__ == "__main__":
    main()
