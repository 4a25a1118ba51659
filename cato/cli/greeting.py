"""What `cato serve` prints once it is ready."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import httpx
from rich.console import Console

from cato.config.deploy_file import DeployFile
from cato.core.topology import Topology

console = Console(soft_wrap=True)


def greet(url: str, deploy: DeployFile, log_path: Path) -> None:
    tasks, refusal = _tasks(url)
    console.print(f"\nCATO is ready at [bold]{url}[/bold]  ({deploy.path.name})")
    if tasks:
        console.print(f"tasks: {', '.join(tasks)}", highlight=False)
    console.print(f"status page: {url}/ui   API: {url}/docs", highlight=False)
    for line in steps_of_engines(deploy.topology):
        console.print(line, markup=False, highlight=False)
    for note in (*_notes(url), *refusal):
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    console.print("\nTry, in another terminal:\n", highlight=False)
    code = "def read(path):\n    with open(path) as file:\n        return "
    body = json.dumps({"model": "cato-completion", "prompt": code, "suffix": "\n"})
    headers = "-H 'Content-Type: application/json'"
    if refusal:
        headers += ' -H "Authorization: Bearer $CATO_API_KEY"'
    console.print(
        f"  curl -i {url}/v1/completions {headers} \\\n    -d '{body}'",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"  {_own_command()} explain REQUEST_ID      # the x-request-id of the answer",
        markup=False,
        highlight=False,
    )
    console.print(f"\nLog: {log_path}   Stop: Ctrl-C", highlight=False)


def _tasks(url: str) -> tuple[list[str], list[str]]:
    """The deployment's tasks; if they are told to nobody without a key, why."""
    try:
        answer = httpx.get(f"{url}/v1/tasks", timeout=10)
        if answer.status_code in (401, 403):
            return [], [str(answer.json()["error"]["message"])]
        return [t["name"] for t in answer.json()["data"]], []
    except (httpx.HTTPError, ValueError, KeyError):
        return [], []


def _own_command() -> str:
    """The command that calls this CLI, also where its folder is not on the PATH."""
    beside = Path(sys.executable).parent / "cato"
    return "cato" if shutil.which("cato") else os.path.relpath(beside)


def steps_of_engines(topology: Topology) -> list[str]:
    """The size of vLLM's steps in each deployment, mostly defaults."""
    deployments = [d for p in topology.pools for d in p.deployments]
    deployments += [d for shared in topology.shared_pools for d in shared.deployments]
    lines = []
    for deployment in deployments:
        engine = deployment.engine
        if engine.is_simulated:
            continue
        line = f"{deployment.name}: steps of {engine.max_num_batched_tokens} tokens"
        if engine.long_prefill_token_threshold:
            line += f", {engine.long_prefill_token_threshold} of one prompt beside other calls"
        if engine.scheduler and deployment.accelerator != "npu":
            line += f", prompts in {engine.scheduler} order"
        lines.append(line)
    return lines


def _notes(url: str) -> list[str]:
    """Notes for operators about a working deployment."""
    try:
        notes = httpx.get(f"{url}/readyz", timeout=5).json().get("notes", [])
    except (httpx.HTTPError, ValueError):
        return []
    return [str(note) for note in notes]
