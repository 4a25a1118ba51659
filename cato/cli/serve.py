"""`cato serve`: run a deployment file on this machine, on the production transport."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import httpx
import typer
import yaml
from rich.console import Console
from rich.text import Text

from cato.cli.greeting import greet
from cato.cli.interrupts import end_like_ctrl_c
from cato.config.deploy_file import DeployFile, load_deploy_file
from cato.config.lines import with_lines
from cato.config.places import run_dir
from cato.config.serve_options import HttpArgs
from cato.core.errors import ConfigError
from cato.serve import haproxy, served
from cato.serve.draining import drain as drained
from cato.serve.draining import forget
from cato.serve.engines_app import UNPLACEABLE
from cato.serve.keeper import MARK_VARIABLE, STOP_TIMEOUT_S, is_left, marked, new_mark, start_keeper
from cato.serve.ports import free_port, own_cluster
from cato.serve.preflight import check_files, notes_of_names, own_workflows, problems_of_names
from cato.serve.served import Served, cluster_address, record

# Every Ray process reads these at import: set them before the first one starts.
TRANSPORT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_BINARY_PATH": haproxy.path(),
    **haproxy.RETRIES,
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cato.serve.given_up:for_proxies",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    "RAY_AUTH_MODE": "token",
}
# Ports that HAProxy listens on besides the clients' one, with Serve's defaults.
HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_METRICS_PORT": 9101, "RAY_SERVE_HAPROXY_STATS_PORT": 8404}
REPLICA_PORTS = "_DIRECT_INGRESS_"  # in the names of the settings of the replicas' port ranges
# Ray's GCS stores events of every actor call and would grow by megabytes a minute. Without them
# `ray list tasks`, `ray timeline` and a dashboard's task page are empty. A raylet that collects
# Ray's own metrics grows by megabytes an hour; CATO's metrics need none of them.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
}
# Ray starts its workers at nice 15, which puts ingress, routers and engines behind other processes.
EAGER = {"RAY_worker_niceness": "0"}
# A replica that failed to start twice fails again. Serve's default is three tries, each as long as
# an engine's start.
GIVE_UP = {"RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "2"}
# Serve's controller looks around ten times a second, a tenth of a core at rest and more at a start;
# CATO's links see a loss sooner.
CALM = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3"}
# Without an address Serve joins any Ray that it finds on this host and replaces its applications,
# or waits for minutes for one that was killed.
OWN_RAY = "local"
DEFAULT_FILE = "deployments/local-cpu.yaml"
START_TIMEOUT_S = 900.0
# Together with Serve's own shutdown this stays within the 90 s of the Compose file.
DRAIN_S = 25.0
POLL_S = 0.3
LAST_LINES = 25
# In the message of Serve's proxy and of the ingress for an application that Serve gave up on.
FAILED = "failed to deploy"

console = Console(soft_wrap=True, markup=False)


def serve(
    file: Annotated[str, typer.Argument(help="A deployment file.")] = DEFAULT_FILE,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Listen on this port instead of the file's."),
    ] = None,
    transport: Annotated[
        bool, typer.Option(help="Use HAProxy and gRPC between Serve's processes.")
    ] = True,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get to finish on a stop.")
    ] = DRAIN_S,
) -> None:
    """Run a deployment file on this machine until Ctrl-C; prints its URL when ready.

    It starts a Ray of its own, unless RAY_ADDRESS names one.
    """
    deploy = checked(file)
    workflows = own_workflows(deploy)
    found = [*problems_of_names(deploy, workflows), *notes_of_names(deploy, workflows)]
    for problem in with_lines(found):
        console.print(f"note: {problem}", style="yellow", markup=False, highlight=False)
    path = deploy.path
    options = deploy.raw.get("http_options")
    options = options if isinstance(options, dict) else {}
    if port is not None:
        options = {**options, "port": port}
        path = run_dir() / f"deployment-{port}.yaml"
        path.write_text(yaml.safe_dump({**deploy.raw, "http_options": options}), encoding="utf-8")
    http = HttpArgs.model_validate(options)
    url = http.url
    _check_free(url)
    mark = new_mark()
    address = os.environ.get("RAY_ADDRESS") or OWN_RAY
    ours = {MARK_VARIABLE: mark, haproxy.HOST_VARIABLE: http.host}
    env = GIVE_UP | QUIET | CALM | EAGER | os.environ | ours
    if transport:
        # HAProxy would use the default fallback port, which another Serve on this host may hold.
        fallback = {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port())}
        own = beside_another(env) if address == OWN_RAY else {}
        for name, value in (TRANSPORT | fallback | own).items():
            env.setdefault(name, value)
    # Also where a shell started this in the background, with SIGINT ignored. The child gets the
    # default handlers, as these signals are caught here.
    end_like_ctrl_c()
    log_path = log_path_of(url)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *_run(address, path)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only this process, which stops Serve in order
        )
    keeper = start_keeper(mark, process.pid)
    try:
        _wait_ready(process, url, log_path)
        mode = env.get("RAY_AUTH_MODE", "")
        _record(Served(mark, url, str(deploy.path), cluster_address(mark), mode))
        greet(url, deploy, log_path)
        code = process.wait()
        console.print(f"Serve exited with {code}; last lines of {log_path}:")
        _show_end(log_path)
        raise typer.Exit(1)
    except KeyboardInterrupt:
        _drain(mark, drain)
    finally:
        _stop(process, keeper)
        forget(run_dir(), mark)
        served.forget(run_dir(), mark)


def _run(address: str, path: Path) -> list[str]:
    """The module, with arguments, that runs the file at `path`."""
    if address == OWN_RAY:
        return ["cato.serve.own_ray", str(path)]
    return ["ray.serve.scripts", "run", "--address", address, str(path)]


def beside_another(env: Mapping[str, str]) -> dict[str, str]:
    """Ports of its own for this Serve if another one holds HAProxy's default ports, or has been
    started and will; else nothing.

    A port that `env` sets is the user's choice, and is not looked at.
    """
    taken = [p for n, p in HAPROXY_PORTS.items() if n not in env and _is_bound("127.0.0.1", p)]
    if taken:
        held = ", ".join(map(str, taken))
        why = f"ports in use on this host, perhaps by another `cato serve`: {held}"
    elif marked(lambda mark: not is_left(mark)):
        why = "another `cato serve` runs on this host"
    else:
        return {}
    # All ports, not only the taken ones: both would number their replicas' ports from 30000 on, and
    # one's HAProxy could reach the other's replicas.
    ports = {n: v for n, v in own_cluster("").items() if n.endswith("_PORT")}
    ranges = [n for n in ports if REPLICA_PORTS in n]
    if any(n in env for n in ranges):  # half of the user's range and half of ours would be none
        ports = {n: v for n, v in ports.items() if n not in ranges}
    metrics, statistics = (env.get(n, ports[n]) for n in HAPROXY_PORTS)
    console.print(
        f"note: {why}. HAProxy's metrics are on port {metrics}, and its statistics on port "
        f"{statistics}.",
        style="yellow",
        highlight=False,
    )
    return ports


def log_path_of(url: str) -> Path:
    """The log of the `cato serve` at `url`; another one of this user has another port."""
    return run_dir() / f"serve-{urlsplit(url).port}.log"


def checked(file: str) -> DeployFile:
    """The deployment file, checked with the files it names; problems end the command."""
    try:
        deploy = load_deploy_file(file)
        check_files(deploy)
    except ConfigError as error:
        shown = ConfigError(with_lines(error.problems))
        console.print(str(shown), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    return deploy


def _wait_ready(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    started_s = time.monotonic()
    told: set[str] = set()
    with console.status("starting Ray ...") as status:
        while time.monotonic() - started_s < START_TIMEOUT_S:
            if process.poll() is not None:
                console.print(f"Serve exited with {process.returncode}; last lines of {log_path}:")
                _show_end(log_path)
                raise typer.Exit(1)
            is_ready, reason = _readiness(url)
            what, _, details = reason.partition("\n")
            if FAILED in what or UNPLACEABLE in what:
                console.print(reason, style="red", markup=False, highlight=False)
                console.print(f"Full log: {log_path}; Ray's own logs are in its session folder.")
                raise typer.Exit(1)
            if is_ready:
                return
            if details and details not in told:
                told.add(details)
                console.print(details, style="yellow", markup=False, highlight=False)
            took_s = time.monotonic() - started_s
            if not console.is_terminal and what not in told:  # the spinner shows nothing there
                told.add(what)
                console.print(f"[{took_s:4.0f} s] {what}", markup=False, highlight=False)
            status.update(Text(f"{what} ({took_s:.0f} s)"))
            time.sleep(POLL_S)
    console.print(f"Not ready after {START_TIMEOUT_S:.0f} s; last lines of {log_path}:")
    _show_end(log_path)
    raise typer.Exit(1)


def _readiness(url: str) -> tuple[bool, str]:
    """Whether tasks can be served; if not, the reason and, in further lines, details."""
    try:
        # Over HTTP there is nothing to verify, and each poll would read all certificates: 20 ms.
        answer = httpx.get(f"{url}/readyz", timeout=5, verify=False)
    except httpx.HTTPError:
        return False, "starting Ray and the ingress ..."
    if answer.status_code == 200:
        return True, ""
    try:
        return False, str(answer.json()["reason"])
    except (ValueError, KeyError):
        return False, answer.text if FAILED in answer.text else "starting the ingress ..."


def _answers(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=2)
    except httpx.HTTPError:
        return False
    return True


def _check_free(url: str) -> None:
    """End the command when the port is taken, with advice on freeing it."""
    left = marked(is_left)
    if left:
        console.print(
            f"{len(left)} processes of a killed `cato serve` are left; "
            "`cato down --left` ends them."
        )
    parts = urlsplit(url)
    try:
        if not _is_bound(parts.hostname or "", parts.port or 0) and not _answers(url):
            return
    except OSError as error:  # an address of another host, a low port without the right to it
        why = f"Cannot listen at {url}: {error.strerror}; change http_options"
        console.print(why, style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    if not left:
        console.print(
            f"Something already answers at {url}; stop it (another `cato serve`: Ctrl-C there, a "
            "Ray cluster: `cato down`) or change http_options.port."
        )
    raise typer.Exit(2)


def _is_bound(host: str, port: int) -> bool:
    """Whether another socket has the port; raise OSError where this process may not listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return True
    return False


def _record(this: Served) -> None:
    try:
        record(run_dir(), this)
    except OSError as error:
        why = f"note: other commands will not find this `cato serve` by themselves: {error}"
        console.print(why, style="yellow", markup=False, highlight=False)


def _drain(mark: str, limit_s: float) -> None:
    console.print("\nStopping; another Ctrl-C stops at once ...")
    with contextlib.suppress(KeyboardInterrupt):
        try:
            if not drained(run_dir(), mark, limit_s):
                console.print(f"Some requests took longer than {limit_s:g} s and are cut off.")
        except OSError as error:
            console.print(f"Running requests are cut off: {error}", style="red", markup=False)


def _show_end(log_path: Path) -> None:
    lines = log_path.read_text(errors="replace").splitlines()[-LAST_LINES:]
    console.print("\n".join(lines), markup=False, highlight=False)


def _stop(process: subprocess.Popen[bytes], keeper: subprocess.Popen[bytes]) -> None:
    """Stop Serve with SIGINT; the keeper then kills what is left, as Ray leaves HAProxy behind."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    assert keeper.stdin is not None, "the keeper was started with a pipe"
    keeper.stdin.close()
    keeper.wait()
