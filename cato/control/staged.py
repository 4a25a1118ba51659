"""The result of measuring a model before it is served."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.topology import HostedModel
from cato.profiles.schema import ProfileFile


@dataclass(frozen=True, slots=True)
class Staged:
    """`hosted` with measured values; `memory_bytes` is what the engine's processes held at the
    end, on the accelerator if `on_card` (including the KV cache), otherwise in host memory."""

    hosted: HostedModel
    profile: ProfileFile
    memory_bytes: int
    on_card: bool = False
