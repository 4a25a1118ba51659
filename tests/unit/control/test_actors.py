"""What a process must load to call a control actor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle

from cato.control import actors
from cato.control.eviction import EvictionManager
from cato.control.profiler import Profiler
from cato.control.provisioner import ResourceProvisioner
from cato.control.router import ReplicaRouter

# An engine replica that looks up the actor whose class is in the file, as Ray does.
LOOKED_UP = """
import pickle, sys
import cato.serve.engine_replica
with open(sys.argv[1], "rb") as file:
    cls = pickle.load(file)
print(cls.__name__, *sorted({"numba", "scipy", "sqlalchemy"} & sys.modules.keys()))
"""


@pytest.mark.parametrize("cls", [EvictionManager, Profiler, ResourceProvisioner, ReplicaRouter])
def test_who_calls_an_actor_loads_nothing_of_it(cls: type, tmp_path: Path) -> None:
    path = tmp_path / "class.pkl"
    path.write_bytes(cloudpickle.dumps(actors._prepared(cls)))
    command = [sys.executable, "-c", LOOKED_UP, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert found.stdout.split() == [cls.__name__]


async def test_an_actor_has_the_public_methods_of_its_class() -> None:
    counter = cloudpickle.loads(cloudpickle.dumps(actors._prepared(Counter)))(2)
    assert counter.more(3) == 5
    assert await counter.later(by=1) == 6
    assert not hasattr(counter, "_hidden")


class Counter:
    def __init__(self, start: int) -> None:
        self._n = start

    def more(self, by: int) -> int:
        self._n += by
        return self._n

    async def later(self, *, by: int) -> int:
        return self.more(by)

    def _hidden(self) -> None: ...
