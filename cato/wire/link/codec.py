"""Serialization for links: msgpack with CATO's types, which both ends declare in advance."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any

import msgpack

from cato.core import errors
from cato.core.errors import CatoError

# Extension types of msgpack.
_TUPLE, _BIG_INT, _FIRST_TYPE = 0, 1, 2
_LAST_TYPE = 127


class CodecError(CatoError):
    """A value cannot be serialized, or bytes cannot be parsed."""


class Codec:
    """Packs `types` (dataclasses, enums), CATO's errors, and plain values in any nesting.

    Both ends must know the same types; `version` is a digest of their names and fields.
    """

    def __init__(
        self, types: Iterable[type], makers: Mapping[type, Callable[..., Any]] | None = None
    ) -> None:
        """`makers` make values of some types from all their fields; by default the type itself.

        Raise `TypeError` if a maker does not take the fields of its type.
        """
        known = [*types, *_ERRORS]
        assert _FIRST_TYPE + len(known) <= _LAST_TYPE, "msgpack has room for no more types"
        self._codes: dict[type, tuple[int, Callable[[Any], Any]]] = {}
        self._makers: dict[int, Callable[..., Any]] = {}
        described = []
        for code, cls in enumerate(known, _FIRST_TYPE):
            self._codes[cls] = (code, _parts_of(cls))
            make = (makers or {}).get(cls, cls)
            if make is not cls:  # a maker that misses a field would end the link at the first value
                inspect.signature(make).bind(*_field_names(cls))
            self._makers[code] = make if issubclass(cls, Enum) else partial(_made, make)
            described.append(f"{cls.__name__}({', '.join(_field_names(cls))})")
        self._packers: list[msgpack.Packer] = []
        self.version = hashlib.sha256("\n".join(described).encode()).digest()

    def pack(self, value: object) -> bytes:
        """Raise `CodecError` for a value that is neither plain nor of a known type."""
        # One packer per level of nested types: creating one costs ten times as much as packing.
        packer = self._packers.pop() if self._packers else self._packer()
        try:
            packed: bytes = packer.pack(value)
        except (TypeError, ValueError, OverflowError) as error:
            packer.reset()
            raise CodecError(f"cannot be sent: {error}") from error
        finally:
            self._packers.append(packer)
        return packed

    def _packer(self) -> msgpack.Packer:
        return msgpack.Packer(
            default=self._ext, strict_types=True, unicode_errors="surrogatepass", buf_size=4096
        )

    def unpack(self, data: bytes | memoryview) -> Any:
        try:
            return msgpack.unpackb(
                data, ext_hook=self._value, strict_map_key=False, unicode_errors="surrogatepass"
            )
        except Exception as error:  # a constructor may raise anything for bad parts
            raise CodecError(f"not understood: {error!r}") from error

    def _ext(self, value: Any) -> object:
        """Values without a msgpack type; with `strict_types` also tuples and subclasses."""
        cls = type(value)
        if cls is tuple:
            return msgpack.ExtType(_TUPLE, self.pack(list(value)))
        if (found := self._codes.get(cls)) is not None:
            code, parts = found
            return msgpack.ExtType(code, self.pack(parts(value)))
        if cls is int:  # more than 64 bits
            return msgpack.ExtType(_BIG_INT, str(value).encode())
        if isinstance(value, float):
            return float(value)  # numpy's float
        raise TypeError(f"a {cls.__name__}")

    def _value(self, code: int, data: bytes) -> object:
        if code == _BIG_INT:
            return int(data)
        parts = self.unpack(data)
        if code == _TUPLE:
            return tuple(parts)
        return self._makers[code](parts)


_ERRORS = sorted(
    (e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, CatoError)),
    key=attrgetter("__name__"),
)


def _made(make: Callable[..., Any], parts: list[Any]) -> object:
    return make(*parts)


def _field_names(cls: type) -> list[str]:
    if is_dataclass(cls):
        return [field.name for field in fields(cls) if field.init]
    if issubclass(cls, Enum):
        return [str(member.value) for member in cls]
    return []


def _parts_of(cls: type) -> Callable[[Any], Any]:
    """A function that returns the parts to rebuild a `cls` from, also as a list for a dataclass
    with one field."""
    if issubclass(cls, Enum):
        return attrgetter("value")
    if issubclass(cls, CatoError):
        return lambda error: list(error.args)
    names = _field_names(cls)
    if len(names) == 1:
        get = attrgetter(names[0])
        return lambda value: [get(value)]
    get_all = attrgetter(*names)
    return lambda value: list(get_all(value))
