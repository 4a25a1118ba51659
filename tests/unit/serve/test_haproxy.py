"""`cato-haproxy` changes what Serve configures, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cato.serve import haproxy
from cato.serve.ingress.body import BODY_WITHIN_S

CONFIG = """global
    maxconn 10
defaults
    mode http
    timeout client 5s
    timeout connect 5s
    timeout server 5s
    option abortonclose
frontend f
    bind 127.0.0.1:8000
"""


def test_requests_are_whole_before_they_go_on_and_come_in_time() -> None:
    told = haproxy.configured(CONFIG)
    added = [line.strip() for line in told.splitlines() if line not in CONFIG.splitlines()]
    assert added == [
        "option http-buffer-request",
        "option forwardfor",
        f"timeout http-request {BODY_WITHIN_S:.0f}s",
        "timeout http-keep-alive 3600s",
    ]
    assert told.index("defaults\n") < told.index("http-buffer-request") < told.index("mode http")
    assert haproxy.configured(told) == told


def rendered() -> str:
    """What Serve writes, as far as this module changes it."""
    templates = pytest.importorskip("ray.serve._private.haproxy_templates")
    text = str(templates.HAPROXY_CONFIG_TEMPLATE)
    for name, value in (
        ("config.socket_path", "/tmp/admin.sock"),
        ("config.metrics_port", "9101"),
        ("config.stats_port", "8404"),
        ("config.frontend_host", "*"),  # what Serve makes of 0.0.0.0 and ::
        ("config.frontend_port", "8000"),
    ):
        text = text.replace(f"{{{{ {name} }}}}", value)
    return text


def lines_with(word: str, text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if word in line]


def test_nothing_of_haproxy_is_open_to_other_users_or_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(haproxy.METRICS_HOST_VARIABLE, raising=False)
    assert "mode 666" in rendered()  # or this module is not needed any more
    told = haproxy.configured(rendered())
    (socket,) = lines_with("stats socket", told)
    assert socket == "stats socket /tmp/own.sock mode 600 level admin expose-fd listeners"
    assert lines_with(":9101", told) == ["bind 127.0.0.1:9101"]
    assert lines_with(":8404", told) == ["bind 127.0.0.1:8404"]
    assert haproxy.configured(told) == told


def test_metrics_of_haproxy_are_shown_where_the_operator_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(haproxy.METRICS_HOST_VARIABLE, "0.0.0.0")
    told = haproxy.configured(rendered())
    assert lines_with(":9101", told) == ["bind 0.0.0.0:9101"]
    assert lines_with(":8404", told) == ["bind 127.0.0.1:8404"]


def test_ipv6_is_listened_to_where_the_deployment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(haproxy.HOST_VARIABLE, "::")
    told = haproxy.configured(rendered())
    assert lines_with(":8000", told) == ["bind :::8000 v4v6"]
    monkeypatch.setenv(haproxy.HOST_VARIABLE, "0.0.0.0")
    assert lines_with(":8000", haproxy.configured(rendered())) == ["bind *:8000"]


def test_a_path_is_unknown_only_once_routes_are_known() -> None:
    unknown = (
        CONFIG
        + """    default_backend none
    # Static use_backend rules are above.
backend none
    http-request return status 404 content-type text/plain lf-string "not found"
"""
    )
    told = haproxy.configured(unknown)
    assert "status 404" not in told
    assert lines_with("status 503", told)[0].startswith(
        "http-request return status 503 content-type application/json hdr Retry-After 1 string"
    )
    known = unknown.replace(
        "    default_backend", "    use_backend app if { path_beg / }\n    default_backend"
    )
    assert "status 404" in haproxy.configured(known)


def test_serve_still_writes_what_this_looks_for() -> None:
    templates = pytest.importorskip("ray.serve._private.haproxy_templates")
    template = templates.HAPROXY_CONFIG_TEMPLATE
    without_routes = re.sub(r"(?m)^ *use_backend .*\n", "", template)
    assert "use_backend " in without_routes  # in its comments
    told = haproxy.configured(without_routes)
    assert "stats socket" in template
    assert lines_with("status 503 content-type application/json", told)


@pytest.mark.skipif(not Path(haproxy.path()).exists(), reason="cato is not installed as a package")
def test_the_real_haproxy_takes_the_changed_configuration(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIG)
    env = dict(os.environ, **{haproxy.VARIABLE: haproxy.path()})
    done = subprocess.run(
        [haproxy.path(), "-c", "-f", str(file)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert file.read_text() == haproxy.configured(CONFIG)


def run_cato_haproxy(file: Path) -> str:
    """What it says of a configuration that is only looked at."""
    done = subprocess.run(
        [sys.executable, "-c", "from cato.serve.haproxy import main; main()", "-c", "-f", file],
        capture_output=True,
        text=True,
    )
    assert "cato-haproxy: " in done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_what_is_not_understood_is_not_open_to_other_users_either(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text("global\n    stats socket /x.sock mode 666 level admin\n")
    assert "no section" in run_cato_haproxy(file)
    assert file.read_text() == "global\n    stats socket /x.sock mode 600 level admin\n"


@pytest.mark.parametrize("text", [None, "global\n"])
def test_what_cannot_be_changed_is_told_and_left_to_haproxy(
    tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "haproxy.cfg"
    if text is not None:
        file.write_text(text)
    run_cato_haproxy(file)
    assert (file.read_text() if file.exists() else None) == text
    assert [f for f in tmp_path.iterdir() if f != file] == []
