"""Requests whose headers are indexed once; each is asked for some forty of them."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request

_KEY = "cato.headers"


class IndexedHeaders(Headers):
    """As Starlette's, which reads the whole list at every look-up."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=raw)
        self._values: dict[str, list[str]] = {}
        for name, value in raw:
            self._values.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

    def __getitem__(self, key: str) -> str:
        return self._values[key.lower()][0]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._values

    def get(self, key: str, default: Any = None) -> Any:
        found = self._values.get(key.lower())
        return default if found is None else found[0]

    def getlist(self, key: str) -> list[str]:
        return list(self._values.get(key.lower(), ()))


class IndexedRequest(Request):
    """All requests of one scope share its index."""

    @property
    def headers(self) -> Headers:
        found: Headers | None = self.scope.get(_KEY)
        if found is None:
            found = self.scope[_KEY] = IndexedHeaders(self.scope["headers"])
        return found
