"""What is found when a model is measured before it is served."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.topology import HostedModel
from cato.profiles.schema import ProfileFile


@dataclass(frozen=True, slots=True)
class Staged:
    """`hosted` with what was measured; `memory_bytes` is what the engine's processes held at the
    end, `on_card` or in the host's memory. On a card the KV cache is part of it."""

    hosted: HostedModel
    profile: ProfileFile
    memory_bytes: int
    on_card: bool = False
