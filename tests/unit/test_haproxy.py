"""`cato-haproxy` changes what Serve configures, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cato.serve import haproxy

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


def test_requests_are_whole_before_they_go_on() -> None:
    told = haproxy.configured(CONFIG)
    assert told.replace("    option http-buffer-request\n", "") == CONFIG
    assert told.index("defaults\n") < told.index("http-buffer-request") < told.index("frontend")
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


def test_a_configuration_that_is_missing_is_haproxys_own_complaint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from cato.serve.haproxy import main; main()", "-c", "-f", "gone"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "gone" in done.stderr
    assert "Traceback" not in done.stderr
