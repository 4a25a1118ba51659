"""One Ray cluster and one set of applications for all live tests."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from cato.engines.vllm.host import Zygote
from cato.serve.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


# A busy machine takes minutes to start what all tests share; the first of them waits for it.
LIVE_TIMEOUT_S = 400


# Files and folders in the order in which they run. First what starts a Ray or engines of its own,
# the slowest first. The processes of the shared cluster take part of the cores even while it is
# idle, so it starts late; all other files take as long as its tests, and run beside them.
OWN = (
    "test_serve_cli.py",
    "test_accelerator.py",
    "test_conversations_vllm.py",
    "clients",
    "test_hosts.py",
    "test_engines_vllm.py",
    "agents",
)
SHARED = (
    "test_adapters.py",
    "test_clients_sdk.py",
    "test_control_plane.py",
    "test_documents.py",
    "test_ingresses.py",
    "test_live_sessions.py",
    "test_losses.py",
    "test_main_job.py",
    "test_operate.py",
    "test_profile.py",
    "test_router_shards.py",
    "test_scaling.py",
    "test_shared_pool.py",
    "test_tasks.py",
    "test_the_same_decisions.py",
)
ORDER = {name: place for place, name in enumerate((*OWN, *SHARED))}


def entry(nodeid: str) -> str:
    """The file or folder of `tests/live` that has a test."""
    return nodeid.partition("::")[0].removeprefix("tests/live/").partition("/")[0]


class Groups(LoadScopeScheduling):
    """Tests that share an application run in one process: those of a file or folder, and those of
    `SHARED`. (`--dist loadgroup` of pytest-xdist 3.8 does nothing with pytest 9.)"""

    def _split_scope(self, nodeid: str) -> str:
        name = entry(nodeid)
        return "shared" if name in SHARED else name


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups | None:
    return Groups(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("live") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIVE_TIMEOUT_S))
        name = entry(item.nodeid)
        if "cluster" in getattr(item, "fixturenames", ()) and name not in SHARED:
            raise pytest.UsageError(f"{name} uses the shared cluster: add it to `SHARED`")
    items.sort(key=lambda item: ORDER.get(entry(item.nodeid), len(ORDER)))


@dataclass(frozen=True)
class App:
    """A live CATO: where it answers, where its routers log what they decide, its workflows, and the
    `args` of its engines.

    Requests verify nothing: to read all certificates takes 20 ms of CPU for each.
    """

    url: str
    events: Path | None = None
    workflows: Path | None = None
    engines: dict[str, Any] = field(default_factory=dict)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30, verify=False)

    def post(self, path: str, body: object, **kwargs: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=120, verify=False, **kwargs)


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def zygote() -> AsyncIterator[Zygote]:
    """For engines without Ray; each start would import vLLM again, which takes half a minute."""
    with tempfile.TemporaryDirectory(prefix="cato-z-") as folder:  # short: it holds a socket
        zygote = Zygote(f"{folder}/z.sock")
        await zygote.ready()
        yield zygote
        await zygote.stop()


@pytest.fixture(scope="session")
def cluster() -> Iterator[int]:
    """A local Ray with Serve's HTTP on a free port of loopback; yields the port."""
    import ray
    from ray import serve

    from cato.control import actors

    port = free_port()
    options: dict[str, Any] = {
        "address": "local",
        "num_cpus": 16,
        "include_dashboard": False,
        "object_store_memory": 150_000_000,
        "log_to_driver": False,
        "namespace": "tests",
    }
    try:
        ray.init(**options)
    except Exception:  # one in sixty starts fails on a loaded machine
        ray.shutdown()
        ray.init(**options)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    actors.remove_all()
    ray.shutdown()


def wait_ready(
    url: str, timeout_s: float = 120.0, served_by: subprocess.Popen[Any] | None = None
) -> None:
    """Return when `/readyz` says yes; fail if it never does, or if `served_by` ends before."""
    deadline_s, last = time.monotonic() + timeout_s, "no answer"
    while time.monotonic() < deadline_s:
        if served_by is not None and served_by.poll() is not None:
            pytest.fail(f"`cato serve` has ended with status {served_by.returncode}: {last}")
        try:
            answer = httpx.get(f"{url}/readyz", timeout=5, verify=False)
            if answer.status_code == 200:
                return
            last = answer.text
        except httpx.HTTPError as error:
            last = repr(error)
        time.sleep(0.2)
    pytest.fail(f"not ready after {timeout_s:.0f} s: {last}")


ENGINES: dict[str, Any] = {
    "models": {
        "sim-small": {
            "source": "simulated",
            "family": "qwen",
            "aliases": ["coder-fast"],
            "adapter_places": 1,
        },
        "sim-large": {
            "source": "simulated",
            "family": "qwen",
            "aliases": ["coder-large", "coder-review"],
        },
        "sim-elastic": {"source": "simulated", "family": "qwen"},
        "sim-sharded": {"source": "simulated", "family": "qwen"},
        "demo-coder": {"source": "demo"},
        "hosted-a": {"source": "simulated", "family": "qwen"},
        "hosted-b": {"source": "simulated", "family": "qwen"},
        "hosted-c": {"source": "simulated", "family": "qwen"},
    },
    "shared_pools": {
        "cards": {
            "models": {
                name: {"profile": "saber@gpu", "load": "200ms"}
                for name in ("hosted-a", "hosted-b", "hosted-c")
            },
            "slots": {
                "count": 2,
                "accelerator": "cpu",
                "cpus": 0.1,
                "engine": {"kind": "simulated", "max_num_seqs": 4, "seed": 5},
            },
        }
    },
    "pools": {
        "small": {
            "model": "sim-small",
            "scaling": {"policy": "none"},  # tests kill its replicas and count them
            "deployments": {
                "small-sim": {
                    "accelerator": "cpu",
                    "cpus": 0.1,
                    "replicas": {"min": 1, "initial": 2, "max": 3},
                    "engine": {
                        "kind": "simulated",
                        "profile": "saber@gpu",
                        "max_num_seqs": 32,
                    },
                }
            },
        },
        "large": {
            "model": "sim-large",
            "deployments": {
                "large-sim": {
                    "accelerator": "cpu",
                    "cpus": 0.1,
                    "engine": {
                        "kind": "simulated",
                        "profile": "saber@gpu",
                        "max_num_seqs": 64,
                        "seed": 1,
                    },
                }
            },
        },
        "elastic": {
            "model": "sim-elastic",
            "scaling": {"policy": "none"},  # its tests choose
            "deployments": {
                "elastic-sim": {
                    "accelerator": "cpu",
                    "cpus": 0.1,
                    "replicas": {"min": 0, "initial": 1, "max": 3},
                    "engine": {
                        "kind": "simulated",
                        "profile": "saber@gpu",
                        "max_num_seqs": 2,
                        "seed": 3,
                    },
                }
            },
        },
        "sharded": {
            "model": "sim-sharded",
            "router_shards": 2,
            "scaling": {"policy": "none"},
            "deployments": {
                "sharded-sim": {
                    "accelerator": "cpu",
                    "cpus": 0.1,
                    "replicas": {"min": 2, "initial": 2, "max": 2},
                    "engine": {"kind": "simulated", "profile": "saber@gpu", "max_num_seqs": 8},
                }
            },
        },
        "demo": {
            "model": "demo-coder",
            "scaling": {"policy": "none"},  # tests kill its engines and count them
            "deployments": {
                "demo-cpu": {
                    "accelerator": "cpu",
                    "cpus": 1,
                    "replicas": {"min": 1, "initial": 1, "max": 2},
                    "profile": "demo-coder@cpu",
                    "engine": {
                        "kind": "vllm",
                        "zygote": True,
                        "dtype": "float32",
                        "max_num_seqs": 8,
                        "max_model_len": 1024,
                        "max_num_batched_tokens": 256,
                        "kv_cache_memory": "256MiB",
                        "enforce_eager": True,
                    },
                }
            },
        },
    },
}


LISTS = '''"""Helpers for lists."""


def reverse_in_place(items):
    """Reverse a list in place."""
    left, right = 0, len(items) - 1
    while left < right:
        items[left], items[right] = items[right], items[left]
        left += 1
        right -= 1
    return items


def mean(values):
    """The mean of a list of numbers."""
    total = 0
    for value in values:
        total += value
    return total / len(values)


def read_lines(path):
    """The lines of a file, without their ends."""
    with open(path) as file:
        return [line.rstrip() for line in file]
'''


def quick_profiles(folder: Path) -> str:
    """The shipped profiles, with simulated engines that start in 0.2 s."""
    from cato.profiles.load import load_profile_file, save_profile

    for name in ("saber@gpu", "demo-coder@cpu"):
        file = load_profile_file(ROOT / "profiles" / f"{name}.yaml")
        profile = replace(file.to_profile(), load_s=0.2)
        save_profile(folder / f"{name}.yaml", profile, file.provenance)
    return str(folder)


def patient_workflows(folder: Path) -> str:
    """The shipped workflows; a completion is not dropped after 2 s, which busy machines need."""
    shutil.copytree(ROOT / "workflows", folder)
    path = folder / "code-completion.yaml"
    path.write_text(path.read_text().replace("deadline: 2s", "deadline: 60s"))
    return str(folder)


def small_index(folder: Path) -> str:
    """Code to retrieve that stays the same when the project's own does not.

    A prompt that changes with every commit makes the demo model answer differently, at times with
    nothing at all.
    """
    folder.mkdir(exist_ok=True)
    (folder / "lists.py").write_text(LISTS)
    return str(folder)


@pytest.fixture(scope="session")
def app(cluster: int, tmp_path_factory: pytest.TempPathFactory) -> App:
    """Both applications: two simulated pools and one real vLLM engine with the demo model."""
    from ray import serve

    from cato.config.schema import EnginesArgs, IngressArgs
    from cato.serve.app import build_engines, build_ingress

    profiles = quick_profiles(tmp_path_factory.mktemp("profiles"))
    events = str(tmp_path_factory.mktemp("events"))
    engines = {**ENGINES, "profiles": profiles, "event_log": events, "store": f"{events}.db"}
    serve.run(
        build_engines(EnginesArgs.model_validate(engines)),
        name="engines",
        route_prefix=None,
        external_scaler_enabled=True,
    )
    ingress = {
        "workflows": patient_workflows(tmp_path_factory.mktemp("app") / "workflows"),
        "indexes": {"code": small_index(tmp_path_factory.mktemp("index") / "code")},
    }
    serve.run(build_ingress(IngressArgs.model_validate(ingress)), name="cato", route_prefix="/")
    url = f"http://127.0.0.1:{cluster}"
    wait_ready(url)
    return App(url, Path(events), Path(ingress["workflows"]), engines)
