"""The demo model's network, transformers' Llama, and the optimizer of its matrices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from cato.lab.demo_model.fim_samples import END_OF_TEXT, FIM_PAD, SPECIAL_TOKENS

HEAD_DIM = 64  # one of the sizes vLLM's CPU attention supports
MUON_MOMENTUM = 0.95


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


class Llama(nn.Module):
    """transformers' model with the initialization that its training needs."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.inner = LlamaForCausalLM(LlamaConfig(**shape.hf_config() | {"dtype": "float32"}))
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # every block starts as the identity
            else:
                std = 0.02 if "embed" in name else shape.hidden**-0.5
                nn.init.normal_(parameter, std=std)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self(tokens)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def weights(self) -> dict[str, Tensor]:
        """By Hugging Face's names; the output layer is the embedding."""
        found = self.inner.state_dict()
        return {name: w for name, w in found.items() if name != "lm_head.weight"}

    def load(self, folder: Path) -> None:
        """Load weights of an earlier export; a later run can continue them at a lower rate."""
        saved = load_file(folder / "model.safetensors")
        missing, unknown = self.inner.load_state_dict(saved, strict=False)
        assert set(missing) <= {"lm_head.weight"}, missing
        assert not unknown, unknown


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
