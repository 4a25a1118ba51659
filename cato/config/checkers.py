"""`checkers` of a deployment file: compilers and linters for validate nodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from cato.config.fields import ByteSize, Duration, NonEmpty, StrictModel
from cato.core.checkers import FILE, FILE_NAMES
from cato.core.words import did_you_mean

MAX_TIME_S = 120.0
# The interpreter that sets the limits needs at least this.
MIN_MEMORY_BYTES = 64 << 20


class CheckerArgs(StrictModel):
    """A compiler or linter that validate nodes may run; see `CheckerSpec`."""

    language: NonEmpty
    """The language that it checks; code in other languages is skipped."""
    command: list[NonEmpty] = Field(min_length=1, max_length=64)
    """Program and arguments, run without a shell; `{file}` is the file with the code."""
    time_s: Annotated[Duration, Field(gt=0, le=MAX_TIME_S)] = Field(default=10.0, alias="time")
    """Time limit; after it the checker is killed with all its child processes."""
    memory_bytes: Annotated[ByteSize, Field(ge=MIN_MEMORY_BYTES)] = Field(
        default=1 << 30, alias="memory"
    )
    """Limit on the address space of each of its processes; Java and Node need several GB."""

    @field_validator("language")
    @classmethod
    def _is_known(cls, language: str) -> str:
        if language not in FILE_NAMES:
            hint = did_you_mean(language, tuple(FILE_NAMES)) or f": {', '.join(FILE_NAMES)}"
            raise ValueError(f"no language {language!r}{hint}")
        return language

    @field_validator("command")
    @classmethod
    def _names_the_file(cls, command: list[str]) -> list[str]:
        if not any(FILE in word for word in command[1:]):
            raise ValueError(f"one argument must contain {FILE}, the path of the code's file")
        return command
