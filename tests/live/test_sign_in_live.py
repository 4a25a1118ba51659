"""People and machines sign in to `cato serve` with tokens of a real OpenID provider, on loopback.

The provider is the package `oidc-provider` of npm, which is certified for OpenID Connect. A test
goes through its pages as a browser does; Claude Code and Codex take part where they are installed
or `CATO_AGENTS` is set.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urljoin, urlsplit

import httpx
import jwt
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa

from cato.serve.access.sign_in import ASK_AGAIN_S
from cato.serve.ports import free_port, own_cluster
from tests.live.agents import installed
from tests.live.agents.claude import Claude
from tests.live.agents.codex import Codex
from tests.live.conftest import ROOT, wait_ready
from tests.live.test_serve_cli import simulated_file

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]
BIN = Path(sys.executable).parent
PROVIDER = installed.Npm("oidc-provider", "9.13.3", "oidc-provider")
SCRIPT = Path(__file__).parent / "sign_in" / "provider.mjs"
COMPLETION = {"model": "simulated-1.5b", "prompt": "def f(", "max_tokens": 4}
AGENT_S = 240


@dataclass(frozen=True)
class Provider:
    url: str
    keys: Path
    process: subprocess.Popen[str]

    def robot_token(self, lifetime_s: int = 600) -> str:
        """As a build server gets one: with a client's secret and no person."""
        form = {"grant_type": "client_credentials", "lifetime_s": str(lifetime_s)}
        answer = httpx.post(f"{self.url}/token", data=form, auth=("robot", "robot-secret"))
        assert answer.status_code == 200, answer.text
        token: str = answer.json()["access_token"]
        return token

    def sign(self, kid: str) -> None:
        """Sign with a new key from now on."""
        write_key(self.keys, kid)
        self.process.send_signal(signal.SIGHUP)
        until_s = time.monotonic() + 10
        while httpx.get(f"{self.url}/jwks").json()["keys"][0]["kid"] != kid:
            assert time.monotonic() < until_s, "the provider still has its old key"
            time.sleep(0.05)


@dataclass(frozen=True)
class Served:
    url: str
    provider: Provider
    logs: tuple[Path, ...]


def write_key(path: Path, kid: str) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    plain = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key))
    path.write_text(json.dumps({"keys": [{**plain, "kid": kid, "use": "sig", "alg": "RS256"}]}))


def deployment(folder: Path, port: int, issuer: str) -> Path:
    config = yaml.safe_load(simulated_file(folder, port).read_text())
    engines, cato = (application["args"] for application in config["applications"])
    (pool,) = engines["pools"].values()
    pool["deployments"]["fast-simulated"]["engine"]["max_model_len"] = 262_144
    cato["sign_in"] = {
        "issuer": issuer,
        "audience": ["urn:cato", "cato-page"],
        "client_id": "cato-page",
        "scope": "openid email groups",
        "clock_skew": "0s",
        "groups": {
            "ada-group": {"tenant": "platform", "role": "operator"},
            "lea-group": {"tenant": "red", "role": "tenant-admin"},
            "robot-group": {"tenant": "blue"},
        },
    }
    cato["prices"] = {
        "currency": "EUR",
        "models": {"simulated-1.5b": {"prompt": 1000.0, "output": 2000.0}},
    }
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    try:
        package = installed.program(PROVIDER).parents[2]
        node = installed.program(installed.NODE)
    except installed.NotInstalledError as error:
        pytest.skip(f"no OpenID provider: {error}")
    folder = tmp_path_factory.mktemp("sign-in")
    port, provider_port = free_port(), free_port()
    keys = folder / "keys.json"
    write_key(keys, "first")
    url, issuer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{provider_port}"
    run = tempfile.mkdtemp(prefix="cato-s-")  # short: it holds sockets
    env = {**os.environ, **own_cluster(run), "CATO_RUN_DIR": run, "CATO_HOME": str(ROOT)}
    env |= {"XDG_STATE_HOME": run}
    env.pop("RAY_ADDRESS", None)
    log = folder / "log"
    with (
        subprocess.Popen(
            [node, SCRIPT, str(provider_port), keys, f"{url}/ui"],
            cwd=package, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        ) as provider,
        log.open("wb") as out,
        subprocess.Popen(
            [str(BIN / "cato"), "serve", str(deployment(folder, port, issuer))],
            env=env, cwd=folder, stdout=out, stderr=subprocess.STDOUT,
        ) as cato,
    ):  # fmt: skip
        try:
            assert provider.stdout is not None
            assert provider.stdout.readline().strip() == "ready"
            wait_ready(url, 300, cato)
            yield Served(url, Provider(issuer, keys, provider), (log, Path(run)))
        finally:
            cato.send_signal(signal.SIGINT)
            cato.wait(timeout=120)
            provider.kill()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def signed_in(served: Served, name: str) -> dict[str, Any]:
    """What the status page has after `name` signed in: the pages of the provider are followed as a
    browser follows them, and the code is given to CATO."""
    flow = httpx.get(f"{served.url}/ui/sign-in", timeout=20).json()
    verifier = secrets.token_urlsafe(48)
    digest = hashlib.sha256(verifier.encode()).digest()
    back, state = f"{served.url}/ui", secrets.token_urlsafe(8)
    asked = {
        "response_type": "code",
        "client_id": flow["client_id"],
        "scope": flow["scope"],
        "redirect_uri": back,
        "state": state,
        "code_challenge_method": "S256",
        "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
    }
    with httpx.Client(timeout=20) as browser:
        answer = browser.get(f"{flow['authorization_endpoint']}?{urlencode(asked)}")
        for _ in range(12):
            if answer.is_redirect:
                where = urljoin(str(answer.url), answer.headers["location"])
                if where.startswith(back):
                    break
                answer = browser.get(where)
                continue
            action = re.search(r'action="([^"]+)"', answer.text)
            prompt = re.search(r'name="prompt" value="(\w+)"', answer.text)
            assert action, answer.text[:500]
            assert prompt, answer.text[:500]
            form = {"prompt": prompt[1], "login": name, "password": "any"}
            answer = browser.post(urljoin(str(answer.url), action[1]), data=form)
    given = parse_qs(urlsplit(where).query)
    assert given["state"] == [state]
    body = {"code": given["code"][0], "verifier": verifier, "redirect_uri": back}
    answer = httpx.post(f"{served.url}/ui/sign-in", json=body, timeout=20)
    found: dict[str, Any] = answer.json()
    return found


def test_a_machine_asks_with_its_token_in_the_headers_of_both_agents(served: Served) -> None:
    token = served.provider.robot_token()
    chat = {"max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    claude, codex = {"x-api-key": token}, bearer(token)
    by_claude = httpx.post(
        f"{served.url}/v1/messages", json={"model": "coder-fast", **chat}, headers=claude,
        timeout=60,
    )  # fmt: skip
    by_codex = httpx.post(
        f"{served.url}/v1/responses", json={"model": "coder-fast", "input": "x"}, headers=codex,
        timeout=60,
    )  # fmt: skip
    without = httpx.post(f"{served.url}/v1/messages", json={"model": "coder-fast", **chat})
    assert (by_claude.status_code, by_codex.status_code) == (200, 200), by_claude.text
    assert without.status_code == 401
    used = httpx.get(f"{served.url}/v1/usage?by=tenant,key", headers=codex, timeout=20).json()
    (row,) = used["data"]
    assert (row["tenant"], row["key"], used["currency"]) == ("blue", "oidc:robot", "EUR")
    assert row["cost"] > 0


def test_people_sign_in_on_the_page_and_see_what_their_role_sees(served: Served) -> None:
    operator, lead = signed_in(served, "ada"), signed_in(served, "lea")
    assert operator["name"] == "ada@example.com"
    for person in (operator, lead):
        state = httpx.get(f"{served.url}/ui/state", headers=bearer(person["token"]), timeout=20)
        assert state.status_code == 200
    made = httpx.post(
        f"{served.url}/v1/admin/keys",
        json={"name": "ci"},
        headers=bearer(lead["token"]),
        timeout=20,
    ).json()
    assert made["tenant"] == "red"
    used = httpx.post(
        f"{served.url}/v1/completions", json=COMPLETION, headers=bearer(made["secret"]), timeout=60
    )
    assert used.status_code == 200, used.text
    limits = httpx.put(
        f"{served.url}/v1/admin/tenants/red", json={"requests_per_minute": 600},
        headers=bearer(operator["token"]), timeout=20,
    )  # fmt: skip
    assert limits.status_code == 200, limits.text
    refused = httpx.put(
        f"{served.url}/v1/admin/tenants/red", json={}, headers=bearer(lead["token"]), timeout=20
    )
    assert refused.status_code == 403
    seen = {
        name: httpx.get(f"{served.url}/v1/admin/audit", headers=bearer(who["token"]), timeout=20)
        .json()["data"]
        for name, who in (("operator", operator), ("lead", lead))
    }  # fmt: skip
    assert [(e["who"], e["action"]) for e in seen["operator"]] == [
        ("oidc:ada (ada@example.com)", "tenant.limit"),
        ("oidc:lea (lea@example.com)", "key.create"),
    ]
    assert {e["tenant"] for e in seen["lead"]} == {"red"}
    until_s = time.monotonic() + 10
    while True:  # ingresses read limits every second
        again = httpx.post(
            f"{served.url}/v1/completions", json=COMPLETION, headers=bearer(made["secret"]),
            timeout=60,
        )  # fmt: skip
        if "x-ratelimit-limit-requests" in again.headers:
            break
        assert time.monotonic() < until_s
    assert again.headers["x-ratelimit-limit-requests"] == "600"


def test_a_person_in_no_group_is_not_let_in(served: Served) -> None:
    refused = signed_in(served, "eve")
    assert refused["error"]["code"] == "no_group"


def test_a_token_ends_when_it_says(served: Served) -> None:
    token = served.provider.robot_token(lifetime_s=3)
    models = f"{served.url}/v1/models"
    first = httpx.get(models, headers=bearer(token), timeout=20)
    time.sleep(3.5)
    second = httpx.get(models, headers=bearer(token), timeout=20)
    assert (first.status_code, second.status_code) == (200, 401)
    assert second.json()["error"]["code"] == "token_expired"


def test_the_provider_may_change_its_key_at_any_time(served: Served) -> None:
    models = f"{served.url}/v1/models"
    served.provider.robot_token()
    served.provider.sign("second")
    time.sleep(ASK_AGAIN_S)
    token = served.provider.robot_token()
    assert jwt.get_unverified_header(token)["kid"] == "second"
    assert httpx.get(models, headers=bearer(token), timeout=20).status_code == 200


@pytest.mark.parametrize("agent", [Claude(), Codex()], ids=["claude", "codex"])
def test_agents_sign_in_with_a_command(
    served: Served, agent: Claude | Codex, tmp_path: Path
) -> None:
    """Claude Code and Codex run a command for a token. The first one has expired when they use it:
    they run it again."""
    is_there = (installed.CACHE / f"{agent.source.command}-{agent.source.version}").exists()
    if not is_there and "CATO_AGENTS" not in os.environ:
        pytest.skip(f"{agent.title} is not installed")
    log = tmp_path / "tokens"
    command = tmp_path / "token"
    command.write_text(
        f"#!{sys.executable}\n"
        "import httpx, pathlib, time\n"
        f"log = pathlib.Path({str(log)!r})\n"
        "is_first = not log.exists()\n"
        "log.open('a').write('given\\n')\n"
        "form = {'grant_type': 'client_credentials', 'lifetime_s': 1 if is_first else 600}\n"
        f"asked = httpx.post('{served.provider.url}/token', data=form, "
        "auth=('robot', 'robot-secret'))\n"
        "time.sleep(1.5 if is_first else 0)\n"
        "print(asked.json()['access_token'])\n"
    )
    command.chmod(0o755)
    home = tmp_path / "home"
    (home / ".codex").mkdir(parents=True)
    if isinstance(agent, Claude):
        settings = json.dumps({"apiKeyHelper": str(command)})
        argv = ["-p", "--settings", settings, "Say something."]
    else:
        (home / ".codex" / "config.toml").write_text(
            'model = "coder-large"\nmodel_provider = "cato"\nmodel_context_window = 131072\n'
            '[model_providers.cato]\nname = "CATO"\nwire_api = "responses"\n'
            f'base_url = "{served.url}/v1"\n'
            f'[model_providers.cato.auth]\ncommand = "{command}"\n'
        )
        argv = ["exec", "--skip-git-repo-check", "Say something."]
    env = {
        "PATH": f"{installed.node_folder()}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_MODEL": "coder-large",
        "ANTHROPIC_SMALL_FAST_MODEL": "coder-fast",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }
    done = subprocess.run(
        [str(installed.program(agent.source)), *argv],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=AGENT_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(log.read_text().split()) >= 2, "a second time, after the first had expired"
    assert len(done.stdout) > 10, "the simulated model said something"


def test_no_token_is_in_any_log(served: Served) -> None:
    """Last: everything above has signed in by now."""
    token = served.provider.robot_token()
    httpx.get(f"{served.url}/v1/models", headers=bearer(token), timeout=20)
    httpx.get(f"{served.url}/v1/models", headers=bearer(token + "x"), timeout=20)
    time.sleep(1)
    files = [f for place in served.logs for f in ([place] if place.is_file() else place.rglob("*"))]
    read = 0
    for file in files:
        if file.is_file() and file.stat().st_size < 50_000_000:
            content = file.read_bytes()
            read += 1
            assert b"eyJ" not in content, file
    assert read > 5
