"""The tokenizer of the scripted engine."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from cato.core.errors import EngineError

_FILE = "tekken_240911.json"  # from mistral_common, a dependency of vLLM


class Vocabulary(Protocol):
    """A model's tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def bytes_of(self, token: int) -> bytes: ...


class Tekken:
    """The vocabulary of Mistral's models; loading it takes half a second."""

    def __init__(self) -> None:
        try:
            import mistral_common
            from mistral_common.tokens.tokenizers.tekken import Tekkenizer
        except ImportError as exc:
            raise EngineError(
                "the scripted engine needs mistral_common, a dependency of vLLM: install vLLM"
            ) from exc
        folder = Path(mistral_common.__file__).parent / "data"
        self._tokens = Tekkenizer.from_file(folder / _FILE)

    def encode(self, text: str) -> list[int]:
        found: list[int] = self._tokens.encode(text, bos=False, eos=False)
        return found

    def bytes_of(self, token: int) -> bytes:
        found: bytes = self._tokens.id_to_byte_piece(token)
        return found


def pieces(vocabulary: Vocabulary, text: str) -> Iterator[str]:
    """The text of each token; a character split over several tokens belongs to the last one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in vocabulary.encode(text):
        yield decoder.decode(vocabulary.bytes_of(token))
