"""Measured profiles, models of shared pools with their arrivals, and added adapters."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import delete, func, insert, select

from cato.core.arrival_rates import UsualArrivals
from cato.core.ids import ModelName, PoolName
from cato.core.topology import AdapterSpec, HostedModel
from cato.profiles.load import profile_name
from cato.profiles.schema import ProfileFile
from cato.store.connections import Connections
from cato.store.errors import StoreError
from cato.store.records import AddedAdapter, Limits, RegisteredModel
from cato.store.rows import adapter_of, upsert
from cato.store.schema import added_adapters, hosted_models, profiles, usual_arrivals

_HOSTED = TypeAdapter(HostedModel)


class CatalogTables(Connections):
    def save_profile(self, profile: ProfileFile, limits: Limits | None = None) -> None:
        """Keep a measured profile with its provenance; earlier ones stay for a while."""
        name = profile_name(profile.model, profile.accelerator)
        row = {
            "name": name,
            "measured_at_s": time.time(),
            "document": profile.model_dump_json(exclude_none=True),
        }
        kept = (limits or Limits()).documents_per_profile
        oldest_s = (
            select(profiles.c.measured_at_s)
            .where(profiles.c.name == name)
            .order_by(profiles.c.measured_at_s.desc())
            .limit(1)
            .offset(kept)
            .scalar_subquery()
        )
        with self._transaction() as connection:
            connection.execute(insert(profiles), row)
            connection.execute(
                delete(profiles).where(
                    profiles.c.name == name, profiles.c.measured_at_s <= oldest_s
                )
            )

    def profiles(self) -> dict[str, ProfileFile]:
        """The newest measured profile of each name."""
        query = select(profiles.c.name, profiles.c.document).order_by(profiles.c.measured_at_s)
        with self._reading() as connection:
            rows = connection.execute(query).all()
        try:
            return {name: ProfileFile.model_validate_json(document) for name, document in rows}
        except ValidationError as exc:
            raise StoreError(
                self.name, f"a profile of another format, measure again: {exc}"
            ) from exc

    def add_model(
        self, pool: PoolName, hosted: HostedModel, profile: ProfileFile, by: str = ""
    ) -> RegisteredModel:
        """Keep a newly measured model as the next version of its name."""
        columns, name = hosted_models.c, hosted.model.name
        mine = (columns.pool == pool, columns.name == name)
        with self._transaction() as connection:
            last = connection.execute(select(func.max(columns.version)).where(*mine)).scalar()
            added = RegisteredModel(pool, (last or 0) + 1, time.time(), hosted, profile)
            row = {
                "pool": pool,
                "name": name,
                "version": added.version,
                "added_at_s": added.added_at_s,
                "model": _HOSTED.dump_json(hosted).decode(),
                "profile": profile.model_dump_json(exclude_none=True),
            }
            connection.execute(insert(hosted_models), row)
            self._log(connection, by, "model.add", name, None, str(row["model"]))
        return added

    def models(self) -> tuple[RegisteredModel, ...]:
        """All versions of all models, by pool and name, newest version last."""
        query = select(hosted_models).order_by(*hosted_models.primary_key.columns)
        with self._reading() as connection:
            rows = connection.execute(query).all()
        try:
            return tuple(
                RegisteredModel(
                    PoolName(r.pool), r.version, r.added_at_s, _HOSTED.validate_json(r.model),
                    ProfileFile.model_validate_json(r.profile),
                )
                for r in rows
            )  # fmt: skip
        except ValidationError as exc:
            raise StoreError(self.name, f"a model of another format, add it again: {exc}") from exc

    def remove_model(self, pool: PoolName, name: ModelName, by: str = "") -> bool:
        """Delete all versions; False when there was none."""
        columns = hosted_models.c
        mine = (columns.pool == pool, columns.name == name)
        query = select(columns.model).where(*mine).order_by(columns.version.desc()).limit(1)
        with self._transaction() as connection:
            newest = connection.execute(query).scalar_one_or_none()
            if newest is None:
                return False
            connection.execute(delete(hosted_models).where(*mine))
            self._log(connection, by, "model.remove", name, newest, None)
            return True

    def save_arrivals(self, pool: PoolName, slices: Sequence[UsualArrivals]) -> None:
        """Save arrivals; the newest per model and time of day replaces earlier ones."""
        rows = [{"pool": pool, **asdict(s)} for s in slices]
        if rows:
            with self._transaction() as connection:
                connection.execute(upsert(connection, usual_arrivals), rows)

    def arrivals_of(self, pool: PoolName) -> tuple[UsualArrivals, ...]:
        """Learnt arrival times of the models of `pool`."""
        columns = usual_arrivals.c
        query = (
            select(usual_arrivals)
            .where(columns.pool == pool)
            .order_by(*usual_arrivals.primary_key.columns)
        )
        with self._reading() as connection:
            rows = connection.execute(query).all()
        return tuple(
            UsualArrivals(ModelName(r.model), r.is_weekend, r.slice, r.arrivals, r.days)
            for r in rows
        )

    def add_adapter(self, base: ModelName, adapter: AdapterSpec, by: str = "") -> None:
        """Keep an adapter, replacing one of the same name."""
        row = {
            "name": adapter.name,
            "version": adapter.version,
            "base": base,
            "source": adapter.source,
            "aliases": json.dumps(adapter.aliases),
        }
        with self._transaction() as connection:
            columns = added_adapters.c
            former = connection.execute(
                select(added_adapters).where(columns.name == adapter.name)
            ).one_or_none()
            connection.execute(delete(added_adapters).where(columns.name == adapter.name))
            connection.execute(insert(added_adapters), row)
            before = None if former is None else adapter_of(former).adapter
            self._log(connection, by, "adapter.add", adapter.name, before, adapter)

    def adapters(self) -> tuple[AddedAdapter, ...]:
        """Added adapters, oldest first."""
        query = select(added_adapters).order_by(added_adapters.c.version)
        with self._reading() as connection:
            rows = connection.execute(query).all()
        return tuple(map(adapter_of, rows))

    def remove_adapter(self, name: ModelName, by: str = "") -> bool:
        """Delete the adapter; False when there was none."""
        is_it = added_adapters.c.name == name
        with self._transaction() as connection:
            known = connection.execute(select(added_adapters).where(is_it)).one_or_none()
            if known is None:
                return False
            connection.execute(delete(added_adapters).where(is_it))
            self._log(connection, by, "adapter.remove", name, adapter_of(known).adapter, None)
            return True
