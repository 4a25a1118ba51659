"""`cato profile` finds what to measure, or says why it cannot."""

from __future__ import annotations

import pytest

from cato.cli.profile import spec_of
from cato.config.deploy_file import load_deploy_file
from cato.core.errors import CatoError, UnknownNameError


def test_a_deployment_is_found_with_its_pool() -> None:
    topology = load_deploy_file("deployments/local-cpu.yaml").topology
    pool, spec = spec_of(topology, "demo-cpu")
    assert (pool.name, spec.name) == ("demo", "demo-cpu")
    with pytest.raises(UnknownNameError, match=r"'demo-cpus' \(did you mean 'demo-cpu'\?\)"):
        spec_of(topology, "demo-cpus")


def test_the_models_of_a_shared_pool_are_measured_by_another_command() -> None:
    topology = load_deploy_file("deployments/shared.yaml").topology
    (pool,) = topology.shared_pools
    with pytest.raises(CatoError, match="cato models profile NAME"):
        spec_of(topology, pool.deployments[0].name)
