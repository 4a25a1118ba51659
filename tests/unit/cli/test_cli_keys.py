"""`cato keys`: which stores it opens or makes, which tenants it takes, and its lists."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cato.cli import app
from cato.cli.store import opened_store
from cato.config.places import STATE_VARIABLE
from cato.core.administration import AddKey
from cato.core.tenancy import ApiKey, Tenant
from cato.store.store import MetadataStore

SIMULATED = Path(__file__).resolve().parents[3] / "deployments" / "simulated.yaml"
READING = [
    ("list",),
    ("revoke", "x"),
    ("delete", "x"),
    ("rotate", "x"),
    ("open",),
    ("usage",),
    ("audit",),
]
MAKING = [("create", "--tenant", "a"), ("limit", "a")]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stores").mkdir()
    return tmp_path / "stores"


def keys(store: Path, *words: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["keys", *words, "--store", str(store)])


# The store


@pytest.mark.parametrize("words", READING + MAKING)
def test_a_file_that_is_no_store_is_never_touched(folder: Path, words: tuple[str, ...]) -> None:
    file = folder / "mine.yaml"
    file.write_text("a: 1\n")
    result = keys(file, *words)
    assert result.exit_code == 1
    assert "mine.yaml is not a CATO metadata store" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(folder.iterdir()) == [file]
    assert file.read_text() == "a: 1\n"


@pytest.mark.parametrize("words", READING)
def test_a_damaged_store_is_left_to_the_control_plane(folder: Path, words: tuple[str, ...]) -> None:
    file = folder / "m.db"
    content = b"SQLite format 3\0" + b"x" * 5000
    file.write_bytes(content)
    result = keys(file, *words)
    assert result.exit_code == 1
    assert "it is damaged" in result.stderr
    assert file.read_bytes() == content
    assert not list(folder.glob("*.corrupt-*"))


@pytest.mark.parametrize("words", READING)
def test_a_misspelt_store_is_an_error_and_not_made(folder: Path, words: tuple[str, ...]) -> None:
    file = folder / "nostore" / "m.db"
    result = keys(file, *words)
    assert result.exit_code == 1
    assert f"there is no metadata store at {file}" in result.stderr
    assert list(folder.iterdir()) == []


def test_only_the_first_command_that_makes_a_store_says_so(folder: Path) -> None:
    said = f"There was no metadata store at {folder / 'm.db'}: a new one was made."
    first, second = keys(folder / "m.db", *MAKING[0]), keys(folder / "m.db", *MAKING[1])
    assert first.exit_code == second.exit_code == 0
    assert said in first.stderr
    assert said not in second.stderr


def test_a_key_that_is_refused_makes_no_store(folder: Path) -> None:
    words = ("create", "--tenant", "a", "--deployment", str(SIMULATED), "--model", "x")
    result = keys(folder / "m.db", *words)
    assert "no model 'x'" in result.stderr
    assert list(folder.iterdir()) == []


def test_a_store_is_made_only_where_that_is_asked_for(folder: Path) -> None:
    with opened_store(str(folder / "m.db"), creates=True) as store:
        assert store.api_keys() == ()
    with opened_store(str(folder / "m.db")) as store:
        assert store.api_keys() == ()


# Tenants


@pytest.mark.parametrize("name", ["", " ", "a\nb", "-a", "é", "[/t]", "a" * 101])
def test_a_tenant_that_http_refuses_is_refused_here_too(folder: Path, name: str) -> None:
    for words in (("create", f"--tenant={name}"), ("limit", "--", name)):
        result = CliRunner().invoke(
            app, ["keys", words[0], "--store", str(folder / "m.db"), *words[1:]]
        )
        assert result.exit_code == 1
        assert "only letters, digits and . _ @ -" in result.stderr
        assert repr(name) in result.stderr
    assert list(folder.iterdir()) == []


def test_limits_are_shown_and_a_tenant_without_a_key_is_noted(folder: Path) -> None:
    without = keys(folder / "m.db", "limit", "team-a", "--tokens-per-month", "60000")
    assert without.exit_code == 0, without.output
    assert "60,000" in without.stdout
    assert "No valid key belongs to team-a" in without.stderr
    keys(folder / "m.db", "create", "--tenant", "team-a")
    having = keys(folder / "m.db", "limit", "team-a", "--requests-per-minute", "7", "--weight", "2")
    assert "60,000" not in having.stdout
    assert [c for c in having.stdout.split() if c.isdigit()] == ["7", "2"]
    assert having.stderr == ""


# Lists


def test_no_name_is_shortened_in_a_narrow_list(folder: Path) -> None:
    tenant, name, model = "Q" * 30, "X" * 30, "Z" * 30
    words = ("create", "--tenant", tenant, "--name", name, "--model", model, "--unchecked")
    assert keys(folder / "m.db", *words).exit_code == 0
    keys(folder / "m.db", "limit", tenant)
    shown = keys(folder / "m.db", "list").stdout
    assert "…" not in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert [shown.count(c) for c in "QXZ"] == [2 * 30, 30, 30], "the tenant is in both tables"


def test_a_list_as_json_has_everything_but_secrets(folder: Path) -> None:
    with closing(MetadataStore.open(folder / "m.db")) as store:
        key = ApiKey("0123456789", "digest", "team-a", name="x", models=("m",), created_at_s=1.0)
        store.administer(AddKey(key), "test")
    keys(folder / "m.db", "limit", "team-a", "--requests-per-minute", "7")
    found = json.loads(keys(folder / "m.db", "list", "--json").stdout)
    assert [(k["id"], k["tenant"], k["models"]) for k in found["keys"]] == [
        ("0123456789", "team-a", ["m"])
    ]
    assert "digest" not in found["keys"][0]
    assert Tenant(**found["tenants"][0]) == Tenant("team-a", requests_per_minute=7)
