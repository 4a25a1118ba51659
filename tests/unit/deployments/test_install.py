"""`make setup` hands the settings of pip to uv."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FILE = Path(__file__).resolve().parents[3] / ".ci" / "install.py"
SPEC = importlib.util.spec_from_file_location("install", FILE)
assert SPEC is not None
assert SPEC.loader is not None
install = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(install)


def test_an_index_of_ones_own_is_uvs_too() -> None:
    listed = "\n".join(
        [
            ":env:.index-url='https://packages.example.com/simple'",
            "global.extra-index-url='file:///srv/a file:///srv/b'",
            "global.find-links='/srv/wheels\\n/srv/more'",
            "global.index-url='https://other.example.com/simple'",
            "global.timeout='60'",
            "install.constraint='/etc/constraints.txt'",
        ]
    )
    assert install.of_pip(listed) == {
        "UV_DEFAULT_INDEX": "https://packages.example.com/simple",
        "UV_INDEX": "file:///srv/a file:///srv/b",
        "UV_FIND_LINKS": "/srv/wheels,/srv/more",
        "UV_CONSTRAINT": "/etc/constraints.txt",
    }


def test_without_settings_uv_has_its_own() -> None:
    assert install.of_pip("") == {}
