"""Checks for duplicate and unknown names in a deployment file.

Works on the raw `args` of the application `engines`, which may have other problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cato.config.problems import Found
from cato.core.topology import is_pattern, patterns_meet, slots_name
from cato.core.words import did_you_mean


def name_problems(data: object) -> Found:
    """Duplicate and unknown names. Works on the raw data, which may have other problems."""
    models = _mapping(_mapping(data).get("models"))
    pools = _mapping(_mapping(data).get("pools"))
    shared = _mapping(_mapping(data).get("shared_pools"))
    found = [
        *_taken_names(models),
        *_ambiguous_patterns(models),
        *_pools_without_own_model(pools, models),
        *_deployments_of_two_pools({"pools": pools, "shared_pools": shared}),
        *_shared_names(shared, pools, models),
    ]
    if not pools and not shared:
        found.append((("pools",), None, "name at least one pool here or in shared_pools"))
    return found


def _shared_names(
    shared: Mapping[str, object], pools: Mapping[str, object], models: Mapping[str, object]
) -> Found:
    found: Found = []
    homes = {
        model: f"pool {name!r}"
        for name, pool in pools.items()
        if isinstance(model := _mapping(pool).get("model"), str)
    }
    deployments = {
        d
        for p in (*pools.values(), *shared.values())
        for d in _mapping(_mapping(p).get("deployments"))
    }
    for name, settings in shared.items():
        if name in pools:
            found.append((("shared_pools", name), None, "a pool already has this name"))
        if "slots" in _mapping(settings) and slots_name(name) in deployments:
            rule = f"its slots need the deployment name {slots_name(name)!r}, which a pool has"
            found.append((("shared_pools", name), None, rule))
        for model in _mapping(_mapping(settings).get("models")):
            loc = ("shared_pools", name, "models", model)
            if model not in models:
                rule = f"no such model{did_you_mean(model, models)}"
                found.append((loc, model, f"{rule}; known: {', '.join(models) or 'none'}"))
            elif model in homes:
                found.append((loc, model, f"{homes[model]} already serves this model"))
            elif _mapping(models[model]).get("adapter_places"):
                rule = "a model of a shared pool cannot have adapter_places; list its adapters here"
                found.append((loc, model, rule))
            homes.setdefault(model, f"shared pool {name!r}")
    return found


def _taken_names(models: Mapping[str, object]) -> Found:
    found: Found = []
    taken = {name: f"the model {name!r}" for name in models}

    def take(name: object, what: str, loc: tuple[str | int, ...]) -> None:
        if isinstance(name, str) and name in taken:
            found.append((loc, name, f"already the name of {taken[name]}"))
        elif isinstance(name, str):
            taken[name] = what

    for model, settings in models.items():
        at = ("models", model)
        for i, alias in enumerate(_list(_mapping(settings).get("aliases"))):
            take(alias, f"an alias of {model!r}", (*at, "aliases", i))
        for adapter, facts in _mapping(_mapping(settings).get("adapters")).items():
            take(adapter, f"an adapter of {model!r}", (*at, "adapters", adapter))
            for i, alias in enumerate(_list(_mapping(facts).get("aliases"))):
                what = f"an alias of {adapter!r}"
                take(alias, what, (*at, "adapters", adapter, "aliases", i))
    return found


def _ambiguous_patterns(models: Mapping[str, object]) -> Found:
    """Patterns of different models that match a common name and have the same length: the longer
    of two matching patterns wins."""
    found: Found = []
    earlier: list[tuple[str, str]] = []
    for model, settings in models.items():
        mine = [
            (i, alias)
            for i, alias in enumerate(_list(_mapping(settings).get("aliases")))
            if isinstance(alias, str) and is_pattern(alias)
        ]
        for i, alias in mine:
            for other, pattern in earlier:
                # Equal patterns are reported as duplicate names.
                if (
                    len(pattern) == len(alias)
                    and pattern != alias
                    and patterns_meet(pattern, alias)
                ):
                    rule = (
                        f"some names match this pattern and {pattern!r} of {other!r}, which has "
                        "the same length; make the one that should win longer"
                    )
                    found.append((("models", model, "aliases", i), alias, rule))
        earlier += [(model, alias) for _, alias in mine]
    return found


def _pools_without_own_model(pools: Mapping[str, object], models: Mapping[str, object]) -> Found:
    found: Found = []
    served: dict[str, str] = {}
    for pool, settings in pools.items():
        model = _mapping(settings).get("model")
        if not isinstance(model, str):
            continue
        loc = ("pools", pool, "model")
        if model not in models:
            rule = f"no such model{did_you_mean(model, models)}"
            found.append((loc, model, f"{rule}; known: {', '.join(models) or 'none'}"))
        elif model in served:
            rule = f"pool {served[model]!r} already serves this model; put the deployments there"
            found.append((loc, model, rule))
        served.setdefault(model, pool)
    return found


def _deployments_of_two_pools(sections: Mapping[str, Mapping[str, object]]) -> Found:
    found: Found = []
    owners: dict[str, str] = {}
    for section, pools in sections.items():
        for pool, settings in pools.items():
            for name in _mapping(_mapping(settings).get("deployments")):
                if name in owners:
                    rule = f"pool {owners[name]!r} has a deployment of this name"
                    found.append(((section, pool, "deployments", name), name, rule))
                owners.setdefault(name, pool)
    return found


def _list(data: object) -> Sequence[object]:
    return data if isinstance(data, list) else ()


def _mapping(data: object) -> Mapping[str, object]:
    """The entries of the mapping `data` with text keys; empty if it is no mapping."""
    if not isinstance(data, Mapping):
        return {}
    return {key: value for key, value in data.items() if isinstance(key, str)}
