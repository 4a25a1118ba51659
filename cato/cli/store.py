"""The metadata store, for the commands that read or write it themselves."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console

from cato.cli.client import ends_on
from cato.store.errors import StoreError
from cato.store.files import is_there
from cato.store.location import STORE_VARIABLE, default_location, store_url
from cato.store.store import MetadataStore

Store = Annotated[
    str | None,
    typer.Option(
        help=f"The metadata store, as in `store` of the deployment file: a file or a "
        f"postgresql:// URL. Default: {STORE_VARIABLE}, else this host's own."
    ),
]


@contextmanager
def opened_store(
    location: str | None, *, creates: bool = False
) -> Generator[MetadataStore, None, None]:
    """The opened store; ends the command with the store's error when it cannot be used.

    Only a command that `creates` may make a new one, and says so.
    """
    named = location or default_location()
    with ends_on(StoreError):
        is_new = creates and not is_there(store_url(named))
        with closing(MetadataStore.open(named, creates=creates)) as store:
            if is_new:
                note = f"There was no metadata store at {store.name}: a new one was made."
                Console(stderr=True, soft_wrap=True).print(
                    note, style="yellow", markup=False, highlight=False
                )
            yield store


def has_store(location: str | None) -> bool:
    """Whether there is a store to open; ends the command when `location` cannot be one."""
    with ends_on(StoreError):
        return is_there(store_url(location or default_location()))


def moment(at_s: float) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # after the year 9999
        return "never"
