"""The demonstration of the audit: a real run that cheats is INVALID, the honest one VALID."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from accelmark.cli.main import app


@pytest.mark.heavy
def test_the_audit_finds_the_cheat_of_its_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELMARK_PLUGINS", "")
    monkeypatch.setenv("ACCELMARK_STATE", str(tmp_path / "state"))
    done = CliRunner().invoke(app, ["demo", "audit", "--out", str(tmp_path / "demo"), "--json"])
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0, done.output
    assert (found["honest"]["verdict"], found["cheat"]["verdict"]) == ("VALID", "INVALID")
    assert any("replayed" in reason for reason in found["cheat"]["reasons"])
    assert (tmp_path / "demo/audit.html").is_file()
