"""The metadata store, for the commands that read or write it themselves."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Annotated

import typer

from cato.cli.client import ends_on
from cato.store.errors import StoreError
from cato.store.location import STORE_VARIABLE, default_location
from cato.store.store import MetadataStore

Store = Annotated[
    str | None,
    typer.Option(
        help=f"The metadata store, as in `store` of the deployment file: a file or a "
        f"postgresql:// URL. Default: {STORE_VARIABLE}, else this host's own."
    ),
]


@contextmanager
def opened_store(location: str | None) -> Generator[MetadataStore, None, None]:
    """The opened store; ends the command with the store's error when it cannot be used."""
    with ends_on(StoreError), closing(MetadataStore.open(location or default_location())) as store:
        yield store


def moment(at_s: float) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # after the year 9999
        return "never"
