"""Launchers are plug-ins: one from a directory carries a run to its end, and its settings are checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import SpecError
from accelmark.spec.plugins.launcher import launcher_problems, parse_cluster, unusable_parts
from tests.cli.test_main import accelmark
from tests.run.fakes import make_plan
from tests.run.test_session import done, drive, statuses

DECLARATION = """\
name: nice
is_localhost: true
run_files: [nice.level]
"""
OPTIONS = """\
from accelmark.spec.plugins.launcher import LauncherOptions

class Options(LauncherOptions):
    niceness: int = 10
"""
LAUNCHER = """\
from accelmark.run.launchers.shared_filesystem import SharedFilesystemLauncher
from accelmark.spec.plugins.launcher import options_model, options_of

class NiceLauncher(SharedFilesystemLauncher):
    def prefix(self, host):
        niceness = options_of(options_model("nice"), self.plan.cluster).niceness
        return ("nice", "-n", str(niceness))

    async def allocate(self):
        (self.run / "nice.level").write_text("held")

    async def close(self):
        (self.run / "nice.level").unlink(missing_ok=True)

create = NiceLauncher
"""


@pytest.fixture
def nice(plugins: Path) -> Path:
    folder = plugins / "launchers" / "nice"
    folder.mkdir(parents=True)
    (folder / "launcher.yaml").write_text(DECLARATION)
    (folder / "options.py").write_text(OPTIONS)
    (folder / "launcher.py").write_text(LAUNCHER)
    return folder


def test_a_launcher_from_a_plug_in_carries_a_run_to_its_end(nice: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cluster = ClusterSpec.model_validate({"launcher": "nice", "niceness": 7, "python": sys.executable})
    code, out, err = done(drive("start", run, "--look", plan=make_plan(("niceness",), (), cluster=cluster)))
    assert (code, [status.state for status in statuses(run)]) == (0, ["succeeded", "succeeded"]), out + err
    assert "niceness 7" in next(run.glob("*/round1/*/rank0.out.log")).read_text()
    assert "nice.level" not in (run / "MANIFEST.sha256").read_text()


def test_a_dry_run_shows_the_commands_of_a_launcher_from_a_plug_in(nice: Path, tmp_path: Path) -> None:
    request = {"vendor": "acme", "cluster": {"launcher": "nice"}, "cases": [{"key": "toy:pytorch:X1:1:1"}]}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(request))
    arguments = ("--out", str(tmp_path / "run"), "--commands", "--set", "loader.synthetic=true")
    ended = accelmark("run", str(tmp_path / "file.yaml"), *arguments)
    assert "localhost: nice -n 10 env ACCELMARK_RUN=" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ({"launcher": "nise"}, ["x.yaml: launcher: unknown launcher 'nise' (did you mean 'nice'?)"]),
        ({"launcher": "nice", "nicenes": 1}, ["x.yaml: nicenes: unknown key (did you mean 'niceness'?)"]),
        ({"launcher": "nice", "ssh_port": 22}, []),
        ({"launcher": "ssh", "ssh_port": "no", "niceness": "of another launcher"}, ["x.yaml: ssh_port: must be"]),
        (
            {"launcher": "ssh", "vendor": "nvdia", "nicenes": 1},
            [
                "x.yaml: nicenes: unknown key (did you mean 'niceness'?)",
                "x.yaml: vendor: unknown vendor 'nvdia' (did you mean 'nvidia'?)",
            ],
        ),
        ({"launcher": 3}, ["x.yaml: launcher: unknown launcher 3"]),
    ],
)
def test_settings_of_launchers_are_checked(nice: Path, values: dict[str, object], problems: list[str]) -> None:
    found = [str(problem) for problem in launcher_problems(values, "x.yaml")]
    assert len(found) == len(problems)
    assert all(text.startswith(start) for text, start in zip(found, problems, strict=True)), found


def test_problems_of_a_cluster_file_and_of_its_launchers_settings_are_reported_together(nice: Path) -> None:
    with pytest.raises(SpecError) as caught:
        parse_cluster({"launcher": "nice", "niceness": "very", "hosts": []}, "x.yaml")
    assert [problem.key for problem in caught.value.problems] == ["hosts", "niceness"]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"hosts": [{"address": "localhost"}, {"address": "127.0.0.1"}]}, "starts everything on this machine"),
        (
            {"launcher": "ssh", "hosts": [{"address": "a"}, {"address": "a", "port": 22, "label": "b"}]},
            "hosts: duplicate host a:22",
        ),
    ],
)
def test_hosts_that_a_launcher_cannot_use_are_reported(values: dict[str, object], problem: str) -> None:
    (found,) = unusable_parts(ClusterSpec.model_validate(values))
    assert problem in str(found)
