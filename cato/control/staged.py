"""What is found when a model is measured before it is served."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.topology import HostedModel
from cato.profiles.schema import ProfileFile


@dataclass(frozen=True, slots=True)
class Staged:
    """`hosted` with what was measured; `memory_bytes` is what the engine's processes held at the
    end."""

    hosted: HostedModel
    profile: ProfileFile
    memory_bytes: int
