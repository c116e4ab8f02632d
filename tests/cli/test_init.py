"""``accelmark init`` writes files that can be run, and refuses what no run could be made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.cli.runs import read_run_file
from accelmark.plan.request import Detected
from accelmark.spec.errors import RequestError


def test_init_refuses_a_chip_that_the_vendor_does_not_have_and_says_which_it_assumed(tmp_path: Path) -> None:
    assumed = CliRunner().invoke(app, ["init", "10.1.2.3", "--vendor", "nvidia", "--into", str(tmp_path / "a")])
    assert assumed.exit_code == 0, assumed.output
    assert "run.yaml names the chip" in assumed.stderr
    wrong = CliRunner().invoke(
        app, ["init", "10.1.2.3", "--vendor", "nvidia", "--chip", "H10", "--into", str(tmp_path)]
    )
    assert "--chip H10: vendor nvidia describes no such chip (did you mean 'H100'?)" in str(wrong.exception)
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vendor", "nvidai"], "unknown vendor 'nvidai' (did you mean 'nvidia'?)"),
        (["--vendor", "tsingmicro"], "--vendor tsingmicro: no device of it was found on this machine"),
        (["--vendor", "cpu", "--chip", "H100"], "names H100, but this machine has CPU"),
        (["a", "--vendor", "zixiao"], "vendor zixiao: nothing can run on it yet"),
        (["a", "--vendor", "nvidia", "--chip", "nosuch"], "known: A10, A100, A30, "),
        (["bad host!", "--vendor", "cpu"], "HOST: hosts.0.address: is no host name or IP address, found 'bad host!'"),
        (["10.1.2.999", "--vendor", "cpu"], "is no host name or IP address, found '10.1.2.999'"),
        (["a", "b, port: 3", "--vendor", "cpu"], "HOST: hosts.1.address: is more than an address"),
        (["a", "", "--vendor", "cpu"], "HOST: hosts.1.address: string should have at least 1 character, found ''"),
    ],
)
def test_init_refuses_what_no_run_could_be_made_of(tmp_path: Path, arguments: list[str], message: str) -> None:
    refused = CliRunner().invoke(app, ["init", *arguments, "--into", str(tmp_path)])
    assert isinstance(refused.exception, RequestError)
    assert message in str(refused.exception)
    assert list(tmp_path.iterdir()) == []


def test_init_writes_the_number_of_ranks_and_the_vendor_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--vendor", "cpu", "--devices", "2", "--into", str(tmp_path)]
    assert CliRunner().invoke(app, ["init", *arguments]).exit_code == 0
    request = read_run_file(tmp_path / "run.yaml")
    assert request.vendor == "cpu"
    assert [case.key for case in request.cases][:2] == ["resnet_mini:pytorch:CPU:1:1", "resnet_mini:pytorch:CPU:1:2"]
    monkeypatch.setattr("accelmark.cli.machine.detect_devices", lambda vendor: Detected("nvidia", "H100", None, 1))
    more = CliRunner().invoke(app, ["init", *arguments[2:], "--force"])
    assert "requests 2 devices a host, this one has 1" in str(more.exception)
