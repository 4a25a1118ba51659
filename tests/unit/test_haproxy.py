"""`cato-haproxy` changes what Serve configures, and nothing else."""

from __future__ import annotations

import os
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
        f"timeout http-request {BODY_WITHIN_S:.0f}s",
        "timeout http-keep-alive 3600s",
    ]
    assert told.index("defaults\n") < told.index("http-buffer-request") < told.index("mode http")
    assert haproxy.configured(told) == told


def test_serve_still_writes_what_this_looks_for() -> None:
    templates = pytest.importorskip("ray.serve._private.haproxy_templates")
    template = templates.HAPROXY_CONFIG_TEMPLATE
    assert haproxy.configured(template) != template


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


@pytest.mark.parametrize("text", [None, "global\n"])
def test_what_cannot_be_changed_is_told_and_left_to_haproxy(
    tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "haproxy.cfg"
    if text is not None:
        file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", "from cato.serve.haproxy import main; main()", "-c", "-f", file],
        capture_output=True,
        text=True,
    )
    assert "cato-haproxy: " in done.stderr
    assert "Traceback" not in done.stderr
    assert (file.read_text() if file.exists() else None) == text
    assert [f for f in tmp_path.iterdir() if f != file] == []
