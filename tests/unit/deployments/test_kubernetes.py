"""The manifests in `deployments/kubernetes/`: valid, consistent, and in step with the project."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml

from cato.config.deploy_file import load_deploy_file
from cato.config.deployments import ray_actor_options
from cato.core.topology import DeploymentSpec, Topology
from cato.serve.app import DRAIN_S
from cato.store.location import default_location

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "deployments" / "kubernetes"
BASE = KUBERNETES / "base"
OVERLAYS = sorted(p.parent for p in KUBERNETES.glob("overlays/*/kustomization.yaml"))
# The oldest and the newest Kubernetes that the manifests are checked for.
VERSIONS = ("1.29", "1.37")
# Where the head's claim is.
STATE = "/var/lib/cato-state"
# Kubernetes' name of a card -> Ray's.
CARDS = {"nvidia.com/gpu": "GPU", "huawei.com/Ascend910": "NPU"}

Manifest = dict[str, Any]


def documents(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def base_manifests() -> list[Manifest]:
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    return [d for name in names for d in documents(BASE / name)]


def built(overlay: Path) -> list[Manifest]:
    """The overlay as kustomize builds it; skips where there is no kustomize."""
    for tool in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(tool[0]):
            done = subprocess.run(
                [*tool, str(overlay)], capture_output=True, text=True, check=False, timeout=60
            )
            assert done.returncode == 0, done.stderr
            return list(yaml.safe_load_all(done.stdout))
    pytest.skip("needs kustomize or kubectl on the PATH")


def one(manifests: list[Manifest], kind: str, name: str = "cato") -> Manifest:
    found = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    assert len(found) == 1
    return found[0]


def pod_templates(service: Manifest) -> dict[str, Manifest]:
    """The pod templates of a RayService, with the labels that the operator adds to their pods."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"]}
    groups |= {g["groupName"]: g for g in cluster["workerGroupSpecs"]}
    return {name: group["template"] for name, group in groups.items()}


def problems(manifest: Manifest, version: str) -> Iterator[str]:
    """What is wrong with a manifest, by the schema of its kind."""
    if manifest["kind"] != "RayService":
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{manifest['kind']}: {error.message}"
        return
    schema = json.loads((KUBERNETES / "ray-service.schema.json").read_text(encoding="utf-8"))
    for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest):
        yield f"{error.json_path}: {error.message}"
    for name, template in pod_templates(manifest).items():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        yield from (f"{name}: {problem}" for problem in problems(pod, version))


overlays = pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda p: p.name)


def test_the_documented_overlays_are_there() -> None:
    assert {o.name for o in OVERLAYS} == {"ascend", "cpu-demo", "nvidia"}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_base_follows_the_schemas(version: str) -> None:
    assert [p for m in base_manifests() for p in problems(m, version)] == []


def test_a_mistake_is_found_by_the_schemas() -> None:
    service = one(base_manifests(), "RayService")
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    container = pod_templates(service)["workers"]["spec"]["containers"][0]
    container["livenesProbe"] = container.pop("livenessProbe")
    found = list(problems(service, VERSIONS[-1]))
    assert len(found) == 2
    assert "'num-cpus'" in found[0]
    assert "livenesProbe" in found[1]


@pytest.mark.parametrize("version", VERSIONS)
@overlays
def test_a_built_overlay_follows_the_schemas(overlay: Path, version: str) -> None:
    manifests = built(overlay)
    kinds = sorted(m["kind"] for m in manifests)
    assert kinds == sorted(m["kind"] for m in base_manifests())  # no ConfigMap is left over
    assert [p for m in manifests for p in problems(m, version)] == []


def load_sync() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sync", KUBERNETES / "sync.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_network_policy_names_the_namespace_of_whom_it_lets_in() -> None:
    policy = one(base_manifests(), "NetworkPolicy")["spec"]
    peers = [peer for rule in policy["ingress"] for peer in rule["from"]]
    peers += [peer for rule in policy["egress"] for peer in rule["to"]]
    assert all(peer.get("namespaceSelector", {"its": "own"}) for peer in peers)


def test_copies_of_deployment_files_have_not_drifted() -> None:
    outdated = load_sync().outdated()
    assert outdated == [], "run deployments/kubernetes/sync.py"


@pytest.mark.parametrize(
    ("overlay", "source"),
    [("ascend", "ascend"), ("cpu-demo", "local-cpu"), ("nvidia", "nvidia")],
)
def test_an_overlay_serves_its_deployment_file(overlay: str, source: str) -> None:
    """Word for word, but that a container listens on all its interfaces, on every host."""
    expected = yaml.safe_load((ROOT / "deployments" / f"{source}.yaml").read_text(encoding="utf-8"))
    expected["proxy_location"] = "EveryNode"
    expected["http_options"]["host"] = "0.0.0.0"
    if source == "local-cpu":  # the demo in a container serves all that reach its port
        expected["applications"][1]["args"]["keys"] = "ignored"
    folder = KUBERNETES / "overlays" / overlay
    assert yaml.safe_load((folder / "serve.yaml").read_text(encoding="utf-8")) == expected
    service = one(built(folder), "RayService")
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == expected


@overlays
def test_patches_and_replacements_name_what_the_base_holds(overlay: Path) -> None:
    kustomization = yaml.safe_load((overlay / "kustomization.yaml").read_text(encoding="utf-8"))
    assert [(overlay / r).resolve() for r in kustomization["resources"]] == [BASE]
    in_base = {(m["kind"], m["metadata"]["name"]): m["apiVersion"] for m in base_manifests()}
    for patch in kustomization["patches"]:
        target = patch["target"]
        version = in_base[target["kind"], target["name"]]
        assert version == f"{target['group']}/{target['version']}"
        assert documents(overlay / patch["path"])[0]
    generated = {g["name"]: g for g in kustomization["configMapGenerator"]}
    for replacement in kustomization["replacements"]:
        source = replacement["source"]
        key, file = generated[source["name"]]["files"][0].split("=")
        assert source["fieldPath"] == f"data.{key}"
        assert (overlay / file).is_file()
        for target in replacement["targets"]:
            assert (target["select"]["kind"], target["select"]["name"]) in in_base


@overlays
def test_a_json_patch_replaces_only_what_is_there(overlay: Path) -> None:
    """kustomize says so itself; this one needs no kustomize."""
    kustomization = yaml.safe_load((overlay / "kustomization.yaml").read_text(encoding="utf-8"))
    for patch in kustomization["patches"]:
        manifest = one(base_manifests(), patch["target"]["kind"], patch["target"]["name"])
        for step in documents(overlay / patch["path"])[0]:
            *parents, last = step["path"].strip("/").split("/")
            place: Any = manifest
            for part in parents:
                place = place[int(part)] if isinstance(place, list) else place[part]
            if step["op"] == "replace":
                assert last in place, step["path"]
            else:
                assert step["op"] == "add"
                assert last == "-" if isinstance(place, list) else last not in place, step["path"]


@overlays
def test_selectors_and_ports_and_volumes_resolve(overlay: Path) -> None:
    manifests = built(overlay)
    templates = pod_templates(one(manifests, "RayService"))
    pods = [
        t["metadata"]["labels"] | {"ray.io/node-type": "head" if name == "head" else "worker"}
        for name, t in templates.items()
    ]

    def hits(selector: Manifest) -> bool:
        wanted = selector["matchLabels"].items()
        return any(wanted <= labels.items() for labels in pods)

    for manifest in manifests:
        if manifest["kind"] == "PodDisruptionBudget":
            assert hits(manifest["spec"]["selector"])
            # For pods of a custom resource the API refuses percentages and maxUnavailable.
            assert isinstance(manifest["spec"]["minAvailable"], int)
    policy = one(manifests, "NetworkPolicy")["spec"]
    assert hits(policy["podSelector"])
    allowed = {p["port"] for rule in policy["ingress"] for p in rule.get("ports", ())}
    accounts = {m["metadata"]["name"] for m in manifests if m["kind"] == "ServiceAccount"}
    for name, template in templates.items():
        pod = template["spec"]
        assert pod["serviceAccountName"] in accounts
        (container,) = pod["containers"]
        volumes = [v["name"] for v in pod["volumes"]]
        assert volumes == [m["name"] for m in container["volumeMounts"]]
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        assert {ports["serve"], ports["metrics"]} <= allowed, name
    assert load_deploy_file(overlay / "serve.yaml").raw["http_options"]["port"] == ports["serve"]  # type: ignore[index]


@overlays
def test_pods_are_locked_down(overlay: Path) -> None:
    for name, template in pod_templates(one(built(overlay), "RayService")).items():
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        writable = {m["mountPath"] for m in container["volumeMounts"]}
        assert writable - {STATE} == {"/tmp", "/dev/shm", "/var/lib/cato"}
        assert (STATE in writable) == (name == "head")
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert resources["requests"] == resources["limits"]


def test_the_store_of_the_head_outlives_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = base_manifests()
    service = one(manifests, "RayService")
    claim = one(manifests, "PersistentVolumeClaim", "cato-state")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    head = pod_templates(service)["head"]["spec"]
    (container,) = head["containers"]
    env = {e["name"]: e["value"] for e in container["env"]}
    monkeypatch.delenv("CATO_STORE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", env["XDG_STATE_HOME"])
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    (place,) = (p for p in mounts if Path(default_location()).is_relative_to(p))
    (volume,) = (v for v in head["volumes"] if v["name"] == mounts[place])
    assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    # A second cluster's head could not mount it while the first one's does.
    assert service["spec"]["upgradeStrategy"] == {"type": "None"}


@overlays
def test_secrets_are_named_and_never_held(overlay: Path) -> None:
    manifests = built(overlay)
    assert all(m["kind"] != "Secret" for m in manifests)
    service = one(manifests, "RayService")
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {
        "mode": "token",
        "secretName": "cato-ray-token",
    }
    guide = (ROOT / "deployments" / "README.md").read_text(encoding="utf-8")
    assert "create secret generic cato-ray-token --from-literal=auth_token=" in guide
    for template in pod_templates(service).values():
        (container,) = template["spec"]["containers"]
        (source,) = container["envFrom"]
        assert f"create secret generic {source['secretRef']['name']} " in guide
        assert {e["name"] for e in container["env"]} <= {
            "CATO_HAPROXY_METRICS_HOST",
            "XDG_STATE_HOME",
        }


@overlays
def test_every_replica_finds_a_worker(overlay: Path) -> None:
    """Serve waits for ever for a replica that fits nowhere: as many as the file asks for must."""
    service = one(built(overlay), "RayService")
    topology = load_deploy_file(overlay / "serve.yaml").topology
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    worker = ray_resources(group)
    for deployment in deployments_of(topology):
        need = ray_need(deployment)
        assert all(worker.get(name, 0) >= amount for name, amount in need.items()), deployment.name
    for workers, wanted in (
        (group["minReplicas"], "initial_replicas"),
        (group["replicas"], "initial_replicas"),
        (group["maxReplicas"], "max_replicas"),
    ):
        total: dict[str, float] = {}
        for deployment in deployments_of(topology):
            for name, amount in ray_need(deployment).items():
                total[name] = total.get(name, 0) + amount * getattr(deployment, wanted)
        assert all(workers * worker[name] >= amount for name, amount in total.items()), wanted


def deployments_of(topology: Topology) -> list[DeploymentSpec]:
    return [d for pool in topology.pools for d in pool.deployments]


def ray_need(deployment: DeploymentSpec) -> dict[str, float]:
    """What one replica takes, in Ray's names."""
    options = ray_actor_options(deployment)
    need = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0)}
    return need | options.get("resources", {})


def ray_resources(group: Manifest) -> dict[str, float]:
    """What the operator and `rayStartParams` declare to Ray for a worker of `group`."""
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    declared: dict[str, float] = {"CPU": float(limits["cpu"]), "GPU": 0.0}
    if "nvidia.com/gpu" in limits:
        declared["GPU"] = float(limits["nvidia.com/gpu"])
    custom = json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
    for card, name in CARDS.items():
        if name in custom:
            assert custom[name] == float(limits[card])  # Ray is told of just the cards of the pod
    return declared | custom


def test_versions_agree_with_the_project() -> None:
    service = one(base_manifests(), "RayService")["spec"]
    assert service["rayClusterConfig"]["rayVersion"] == ray.__version__
    assert service["rayClusterDeletionDelaySeconds"] > DRAIN_S
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert version is not None
    for overlay in OVERLAYS:
        kustomization = yaml.safe_load((overlay / "kustomization.yaml").read_text(encoding="utf-8"))
        (image,) = kustomization["images"]
        accelerator = overlay.name.removesuffix("-demo")
        assert image == {"name": "cato", "newTag": f"{version[1]}-{accelerator}"}
