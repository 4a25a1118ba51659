"""`checkers` of a deployment file: compilers and linters for validate nodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from cato.config.fields import ByteSize, Duration, NonEmpty, StrictModel
from cato.config.problems import did_you_mean
from cato.core.checkers import FILE, FILE_NAMES

MAX_TIME_S = 120.0
# Less is too little for the interpreter that sets the limits.
MIN_MEMORY_BYTES = 64 << 20


class CheckerArgs(StrictModel):
    """A compiler or linter that validate nodes may run; see `CheckerSpec`."""

    language: NonEmpty
    """The language that it checks; code of others passes it by."""
    command: list[NonEmpty] = Field(min_length=1, max_length=64)
    """Program and arguments, no shell; `{file}` is the code's file."""
    time_s: Annotated[Duration, Field(gt=0, le=MAX_TIME_S)] = Field(10.0, alias="time")
    """After that it is killed, with all that it started."""
    memory_bytes: Annotated[ByteSize, Field(ge=MIN_MEMORY_BYTES)] = Field(1 << 30, alias="memory")
    """Address space of each of its processes; Java and Node need several GB."""

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
            raise ValueError(f"one argument must have {FILE}, which becomes the code's file")
        return command
