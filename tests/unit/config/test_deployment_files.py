"""Every file that ships in `deployments/` and `profiles/` loads, and Serve accepts it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cato.config import serve_options
from cato.config.deploy_file import load_deploy_file
from cato.config.lines import with_lines
from cato.config.paths import resolve_index
from cato.config.yaml_file import unlike_serve
from cato.core.errors import ConfigError
from cato.core.topology import model_called
from cato.profiles.load import check_profiles, load_profile, load_profiles

ROOT = Path(__file__).resolve().parents[3]
DEPLOYMENTS = sorted((ROOT / "deployments").glob("*.yaml"))
PROFILES = sorted((ROOT / "profiles").glob("*.yaml"))

# Aliases that the shipped workflows call; each deployment file must serve all of them.
ALIASES = {"coder-fast", "coder-large", "coder-review"}


def test_the_documented_files_are_there() -> None:
    stems = {p.stem for p in DEPLOYMENTS}
    assert stems == {
        "ascend", "local-cpu", "mixed", "nvidia", "shared", "shared-mixed", "simulated",
    }  # fmt: skip


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda p: p.name)
def test_a_shipped_deployment_loads_and_serves_every_alias(path: Path) -> None:
    loaded = load_deploy_file(path)
    served = [pool.model for pool in loaded.topology.pools]
    served += [hosted.model for pool in loaded.topology.shared_pools for hosted in pool.models]
    assert {alias for model in served for alias in model.aliases} == ALIASES
    main, small = (model_called(name, served) for name in ("claude-opus-5-5", "claude-haiku-4-5"))
    assert main is not None
    assert small is not None
    assert main is model_called("gpt-5.5-codex", served)
    assert "coder-large" in main.aliases
    check_profiles(loaded.topology, load_profiles(ROOT / loaded.topology.profiles_dir))
    assert all(resolve_index(folder).is_dir() for folder in loaded.ingress.indexes.values())


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda p: p.name)
def test_serve_accepts_a_shipped_deployment(path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema  # importing it starts nothing

    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert {a.name: a.external_scaler_enabled for a in schema.applications} == {
        "engines": True,
        "cato": False,
    }
    assert {a.name: a.route_prefix for a in schema.applications} == {"engines": None, "cato": "/"}


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda p: p.name)
def test_serve_reads_a_shipped_deployment_as_cato_does(path: Path) -> None:
    assert load_deploy_file(path).raw == yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_known_keys_are_those_of_serves_schemas() -> None:
    from ray.serve import schema

    for keys, of_serve in (
        (serve_options.FILE_KEYS, schema.ServeDeploySchema),
        (serve_options.HTTP_KEYS, schema.HTTPOptionsSchema),
        (serve_options.APPLICATION_KEYS, schema.ServeApplicationSchema),
        (serve_options.DEPLOYMENT_KEYS, schema.DeploymentSchema),
    ):
        assert set(keys) == of_serve.model_fields.keys()


def test_values_that_serve_takes_for_something_else_are_problems_of_the_file(
    tmp_path: Path,
) -> None:
    text = (ROOT / "deployments" / "simulated.yaml").read_text(encoding="utf-8")
    args = "    external_scaler_enabled: true\n    args:\n"
    assert args in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(args, f"{args}      receipts_per_s: 1e3\n"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_deploy_file(path)
    (problem,) = with_lines(caught.value.problems)
    assert str(problem).startswith(f"{path}:")
    assert "args.receipts_per_s: Serve takes this for text: write 1000.0" in str(problem)
    path.write_text(text.replace(args, f"{args}      receipts_per_s: 1.0e+3\n"), encoding="utf-8")
    load_deploy_file(path)


def test_a_date_in_a_deployment_file_needs_quotes(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("a: {2026-01-31: [2026-02-01, '2026-02-01', 1.5, &x 2e5, *x]}", "utf-8")
    assert [str(p) for p in unlike_serve(path, "f.yaml")] == [
        "f.yaml: a.2026-01-31: Serve takes this for a date: put it in quotes (found 2026-01-31)",
        "f.yaml: a.2026-01-31[0]: Serve takes this for a date: put it in quotes (found 2026-02-01)",
        "f.yaml: a.2026-01-31[3]: Serve takes this for text: write 200000.0 (found 2e5)",
    ]


@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.name)
def test_a_shipped_profile_loads(path: Path) -> None:
    profile = load_profile(path)
    assert profile.service_s(100, 10) >= 0


def test_the_reference_profile_decodes_as_fast_as_published() -> None:
    profile = load_profile(ROOT / "profiles" / "reference-7b@gpu-32gb.yaml")
    assert 1 / profile.decode_step_s(1, 1000) == pytest.approx(44, rel=0.1)
    assert 1 / profile.decode_step_s(64, 100) == pytest.approx(19, rel=0.1)


def test_the_zero_profile_costs_nothing() -> None:
    profile = load_profile(ROOT / "profiles" / "zero@none.yaml")
    assert profile.service_s(10_000, 1_000, batch=100) == 0
