"""Copy the deployment files to where containers, kustomize and Helm need them.

    python deployments/kubernetes/sync.py            write the copies
    python deployments/kubernetes/sync.py --check    exit 1 and list the copies that differ

kustomize and Helm read no files outside their own folder. So each overlay has a copy of one file of
`deployments/`, and the Helm chart has copies of all of them and of the manifests in `base/`. The
copies of `local-cpu.yaml` listen on all interfaces, as no client can reach a container's loopback,
and have a proxy on every host.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = "deployments/kubernetes/overlays"
BASE = "deployments/kubernetes/base"
CHART = "deployments/kubernetes/helm/files"
MANIFESTS = (
    "disruption-budgets",
    "network-policy",
    "ray-service",
    "service-account",
    "state-claim",
)
NOTICE = "# Made from {} by deployments/kubernetes/sync.py: edit that file instead.\n"

# Text in local-cpu.yaml -> its replacement in a container. Each must occur exactly once.
CONTAINER = (
    (
        "proxy_location: HeadOnly          # one HTTP proxy; EveryNode behind a load balancer",
        "proxy_location: EveryNode         # on every host with replicas, behind a load balancer",
    ),
    ("host: 127.0.0.1 ", "host: 0.0.0.0   "),
    ("# reachable from this machine only", "# the container's port decides who reaches it"),
    (
        "keys: auto                # without an API key only this machine is served: "
        "`cato keys create`",
        "keys: ignored             # anyone who reaches the port is served; auto: API keys",
    ),
)
COPIES = {
    "docker/container-cpu.yaml": ("deployments/local-cpu.yaml", CONTAINER),
    f"{KUBERNETES}/cpu-demo/serve.yaml": ("deployments/local-cpu.yaml", CONTAINER),
    f"{KUBERNETES}/nvidia/serve.yaml": ("deployments/nvidia.yaml", ()),
    f"{KUBERNETES}/ascend/serve.yaml": ("deployments/ascend.yaml", ()),
    f"{CHART}/serve-cpu-demo.yaml": ("deployments/local-cpu.yaml", CONTAINER),
    f"{CHART}/serve-nvidia.yaml": ("deployments/nvidia.yaml", ()),
    f"{CHART}/serve-ascend.yaml": ("deployments/ascend.yaml", ()),
    **{f"{CHART}/{name}.yaml": (f"{BASE}/{name}.yaml", ()) for name in MANIFESTS},
}


def rendered(copy: str) -> str:
    """The content of the file `copy`. Raise `ValueError` if its source lacks a replaced text."""
    source, replacements = COPIES[copy]
    text = (ROOT / source).read_text(encoding="utf-8")
    for old, new in replacements:
        if text.count(old) != 1:
            raise ValueError(f"{source}: {old!r} must be there once, is {text.count(old)} times")
        text = text.replace(old, new)
    return NOTICE.format(source) + text


def outdated() -> list[str]:
    """The copies that are missing or differ from their source."""
    return [
        copy
        for copy in COPIES
        if not (ROOT / copy).is_file()
        or (ROOT / copy).read_text(encoding="utf-8") != rendered(copy)
    ]


def main() -> int:
    changed = outdated()
    if "--check" in sys.argv[1:]:
        for copy in changed:
            print(f"{copy} differs from {COPIES[copy][0]}: run deployments/kubernetes/sync.py")
        return 1 if changed else 0
    for copy in changed:
        (ROOT / copy).write_text(rendered(copy), encoding="utf-8")
        print(f"wrote {copy}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
