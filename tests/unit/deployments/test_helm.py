"""The Helm chart: what the overlays deploy, and weights on a volume of their own. Offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_kubernetes import KUBERNETES, VERSIONS, Manifest, built, one, pod_templates, problems

helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk, Helm's own engine")

CHART = KUBERNETES / "helm"
PRESETS = ("cpu-demo", "nvidia", "ascend")
presets = pytest.mark.parametrize("preset", PRESETS)
WEIGHTS = {"claim": "models", "create": True, "models": ["Qwen/Qwen2.5-Coder-7B-Instruct"]}


def values_of(preset: str) -> dict[str, Any]:
    path = CHART / f"values-{preset}.yaml"
    found: dict[str, Any] = yaml.safe_load(path.read_text()) if path.exists() else {}
    return found


def rendered(values: dict[str, Any]) -> list[Manifest]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values=values, name="cato", namespace="cato")
    found = (m for text in files.values() for m in yaml.safe_load_all(text))
    return [m for m in found if m is not None]


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(m["kind"], m["metadata"]["name"]): m for m in manifests}


@presets
def test_helm_finds_nothing_wrong(preset: str) -> None:
    found = helm.lint(CHART, values_of(preset), strict=True)
    assert found["errors"] == []
    assert [m for m in found["messages"] if m["severity"] > 1] == []


@presets
def test_the_chart_deploys_what_the_overlay_does(preset: str) -> None:
    expected = by_name(built(KUBERNETES / "overlays" / preset))
    found = by_name(rendered(values_of(preset)))
    kept = found["PersistentVolumeClaim", "cato-state"]["metadata"].pop("annotations")
    assert kept == {"helm.sh/resource-policy": "keep"}
    for service in (expected["RayService", "cato"], found["RayService", "cato"]):
        service["spec"]["serveConfigV2"] = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert found == expected


@pytest.mark.parametrize("version", VERSIONS)
@presets
def test_what_is_rendered_follows_the_schemas(preset: str, version: str) -> None:
    values = values_of(preset)
    values["weights"] = values.get("weights", {}) | WEIGHTS
    manifests = rendered(values)
    assert {"Job", "PersistentVolumeClaim"} < {m["kind"] for m in manifests}
    assert [p for m in manifests for p in problems(m, version)] == []


def test_a_mistake_in_values_is_found_by_the_schemas() -> None:
    manifests = rendered({"workers": {"tolerations": [{"kee": "x"}]}})
    assert [p for m in manifests for p in problems(m, VERSIONS[-1])] != []


def test_weights_are_downloaded_once_to_a_volume_that_all_pods_share_and_helm_keeps() -> None:
    manifests = rendered(values_of("nvidia") | {"weights": WEIGHTS})
    claim = one(manifests, "PersistentVolumeClaim", "models")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (job,) = (m for m in manifests if m["kind"] == "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][3:] == WEIGHTS["models"]
    compile(container["command"][2], "download", "exec")
    service = one(manifests, "RayService")
    for template in [*pod_templates(service).values(), job["spec"]["template"]]:
        (home,) = (v for v in template["spec"]["volumes"] if v["name"] == "home")
        assert home["persistentVolumeClaim"] == {"claimName": "models"}
    policy = one(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert not policy.items() <= labels.items()  # it must reach the hub
    worker = pod_templates(service)["nvidia"]["spec"]
    assert pod["securityContext"] == worker["securityContext"]
    assert container["securityContext"] == worker["containers"][0]["securityContext"]


def test_another_list_of_weights_is_another_job() -> None:
    """A Job cannot be changed: an upgrade would fail."""

    def name(*models: str, image: str = "cato:1") -> str:
        values = {"image": image, "weights": WEIGHTS | {"models": list(models)}}
        (job,) = (m for m in rendered(values) if m["kind"] == "Job")
        found: str = job["metadata"]["name"]
        return found

    assert name("a") == name("a")
    assert len({name("a"), name("a", "b"), name("a", image="cato:2")}) == 3


def test_a_second_cluster_needs_a_store_that_both_reach() -> None:
    values = {"upgradeStrategy": "NewCluster", "state": {"claim": ""}}
    manifests = rendered(values)
    assert not any(m["kind"] == "PersistentVolumeClaim" for m in manifests)
    head = pod_templates(one(manifests, "RayService"))["head"]["spec"]
    (state,) = (v for v in head["volumes"] if v["name"] == "state")
    assert state == {"name": "state", "emptyDir": {"sizeLimit": "5Gi"}}
    assert [p for m in manifests for p in problems(m, VERSIONS[-1])] == []


def test_a_claim_for_the_store_may_be_ones_own() -> None:
    service = one(rendered({"state": {"claim": "own", "create": False}}), "RayService")
    head = pod_templates(service)["head"]["spec"]
    assert head["volumes"][-1]["persistentVolumeClaim"] == {"claimName": "own"}
    manifests = rendered({"state": {"size": "1Gi", "storageClass": "ssd"}})
    claim = one(manifests, "PersistentVolumeClaim", "cato-state")
    assert claim["spec"]["storageClassName"] == "ssd"
    assert claim["spec"]["resources"] == {"requests": {"storage": "1Gi"}}


def test_an_upgrade_on_cards_deletes_nothing() -> None:
    for preset in ("nvidia", "ascend"):
        service = one(rendered(values_of(preset)), "RayService")
        assert service["spec"]["upgradeStrategy"] == {"type": "None"}
    assert not any("helm.sh/hook" in p.read_text() for p in (CHART / "templates").iterdir())


def test_an_own_deployment_file_is_served() -> None:
    service = one(rendered({"serveConfig": "applications: []\n"}), "RayService")
    assert service["spec"]["serveConfigV2"] == "applications: []\n"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"preset": "nowhere"}, "/preset': value must be one of 'cpu-demo', 'nvidia', 'ascend'"),
        ({"worker": {"replicas": 4}}, "additional properties 'worker' not allowed"),
        ({"workers": {"replica": 4}}, "additional properties 'replica' not allowed"),
        ({"upgradeStrategy": "Nonesuch"}, "value must be one of 'None', 'NewCluster'"),
        ({"workers": {"maxReplicas": "4"}}, "/workers/maxReplicas': got string"),
        ({"state": {"size": "5 GB"}}, "/state/size'"),
        ({"workers": {"replicas": 5}}, "workers.replicas is 5, but .* maxReplicas is 1"),
        ({"workers": {"minReplicas": 2}}, "minReplicas is 2"),
        ({"preset": "nvidia"}, "add -f values-nvidia.yaml"),
        ({"preset": "ascend"}, "add -f values-ascend.yaml"),
        ({"weights": {"create": True}}, "its name"),
        ({"weights": {"models": ["a"]}}, "where they go"),
        ({"upgradeStrategy": "NewCluster"}, "state.claim empty"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        rendered(values)


@pytest.mark.parametrize(
    "values",
    [
        {"workers": {"replicas": 3, "maxReplicas": 4, "nodeSelector": {"disk": "ssd"}}},
        {"preset": "nvidia", "workers": {"resources": {"limits": {"nvidia.com/mig-3g.40gb": 1}}}},
        {"preset": "nvidia", "serveConfig": "applications: []\n"},
        {"state": {"size": "1.5Ti"}, "weights": WEIGHTS | {"size": 10**12}},
        {"global": {"of": "a parent chart"}},
    ],
)
def test_values_that_work_are_accepted(values: dict[str, Any]) -> None:
    manifests = rendered(values)
    assert [p for m in manifests for p in problems(m, VERSIONS[-1])] == []


def test_the_schema_knows_every_value_of_the_chart() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert schema["properties"].keys() == values.keys() | {"global"}
    for name in ("state", "workers", "weights"):
        part = schema["properties"][name]
        assert part["additionalProperties"] is False
        assert part["properties"].keys() == values[name].keys()


def test_the_chart_is_of_the_projects_version() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert f'\nversion = "{chart["appVersion"]}"\n' in project
