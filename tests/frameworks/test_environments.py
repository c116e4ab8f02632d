"""``accelmark env``: ranks run in the environment of their framework, the agent in its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest

import accelmark
from accelmark.run.agent.host import environment_variables
from accelmark.run.environments.create import FrameworkEnvironment, register, registered
from tests.frameworks.environments import SOURCE, run_accelmark

TOY = Path(__file__).with_name("toy")
NOW = "2026-01-01T00:00:00Z"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELMARK_CACHE", str(tmp_path / "cache"))


def empty_environment(path: Path) -> Path:
    """Make a virtual environment with the packages of this Python, and the marker of ``env create``."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    (site,) = path.glob("lib/python*/site-packages")
    (site / "these.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (path / "accelmark-environment").touch()
    return path


def test_ranks_run_in_the_registered_environment_and_without_it_the_run_is_refused(tmp_path: Path) -> None:
    path = empty_environment(tmp_path / "venv")
    register(FrameworkEnvironment(framework="toy", path=path, created_at=NOW, versions={"numpy": "2"}))
    key, run = ("train", "points:toy:CPU:1:2", "--vendor", "cpu"), tmp_path / "run"
    train = partial(run_accelmark, *key, ACCELMARK_PLUGINS=TOY)
    done = train("--out", str(run))
    (node,) = run.glob("*/round1/localhost_noderank0")
    facts = json.loads((node / "sys_info.json").read_text())
    assert facts["rank_python"] == str(path / "bin/python"), done.stdout + done.stderr
    assert facts["python_executable"] == sys.executable
    assert json.loads((run / "plan.json").read_text())["cluster"]["environments"] == {"toy": str(path)}
    assert json.loads((node / "exit.json").read_text())["state"] == "succeeded"

    (path / "bin/python").unlink()
    done = train()
    assert done.returncode == 2
    assert f"the environment of toy in {path} has no Python any more: run accelmark env create toy" in done.stderr


def test_an_environment_without_the_needed_packages_is_refused_with_the_command_that_repairs_it(tmp_path: Path) -> None:
    path = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    register(FrameworkEnvironment(framework="jax", path=path, created_at=NOW, versions={}))
    arguments = ("train", "llama_mini:jax:CPU", "--vendor", "cpu", "--synthetic", "--json")
    done = run_accelmark(*arguments)
    assert done.returncode == 1
    assert "AccelMark needs numpy" in done.stdout
    assert "framework jax needs " in done.stdout
    assert "jax>=0.10" in done.stdout
    assert f"accelmark env create jax --path {path}" in done.stdout


def test_what_an_environment_lacks_beside_its_framework_is_installed_by_its_own_pip(tmp_path: Path) -> None:
    path = empty_environment(tmp_path / "venv")
    (site,) = path.glob("lib/python*/site-packages")
    old = site / "openvino-2024.0.dist-info"  # found before the one of this Python
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: openvino\nVersion: 2024.0\n")
    register(FrameworkEnvironment(framework="pytorch", path=path, created_at=NOW, versions={}))
    arguments = ("infer", "resnet_mini", "--vendor", "cpu", "--synthetic", "--compiler", "openvino", "--dry-run")
    done = run_accelmark(*arguments)
    assert done.returncode == 1
    shown = " ".join(done.stderr.split())
    assert "engine openvino needs openvino>=2025.0, but 2024.0 is installed" in shown
    assert f"what to do: {path}/bin/python -m pip install 'openvino>=2025.0'" in shown
    assert "env create" not in shown


@pytest.mark.parametrize(("framework", "package"), [("paddle", "paddlepaddle"), ("tensorflow", "tensorflow-cpu")])
def test_a_framework_that_is_not_installed_is_reported_before_anything_starts(
    framework: str, package: str, tmp_path: Path
) -> None:
    arguments = ("train", f"llama_mini:{framework}:CPU", "--vendor", "cpu", "--synthetic", "--json")
    done = run_accelmark(*arguments, "--out", str(tmp_path / "run"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"framework {framework} needs {package}" in done.stdout
    assert f"or, in an environment of its own: accelmark env create {framework}" in done.stdout
    assert not list(tmp_path.glob("run/*/round1/*_noderank0"))


def test_the_commands_are_printed_without_running_them(tmp_path: Path) -> None:
    place, wheels = tmp_path / "here", str(tmp_path)
    options = ("--path", str(place), "--vendor", "nvidia", "--dry-run")
    shown = run_accelmark("env", "create", "jax", *options, "--wheels", wheels).stdout
    assert f"-m venv {place}" in shown
    assert f"--no-index --find-links {wheels}" in shown
    for requirement in ("pydantic>=2.9", "flax>=0.12", "jax[cuda13]>=0.10"):
        assert f"'{requirement}'" in shown
    shown = run_accelmark("env", "create", "jax", *options, "--index", "http://mirror/simple").stdout
    assert "--index-url http://mirror/simple --trusted-host mirror" in shown
    own = "--extra-index-url https://download.pytorch.org/whl/cpu"
    for given, is_used in (((), True), (("--index", "http://mirror/simple"), False), (("--wheels", wheels), False)):
        arguments = ("env", "create", "pytorch", "--path", str(place), "--vendor", "cpu", "--dry-run", *given)
        shown = run_accelmark(*arguments).stdout
        assert (own in shown) == is_used
        heading, _, constraints, install = shown.splitlines()
        assert heading == "# on localhost"
        assert constraints == f"cp /dev/null {place}/constraints.txt", "pytorch has none; pip wants the file"
        assert f"--constraint {place}/constraints.txt" in install
    assert not place.exists()


def test_environments_are_listed_and_removed(tmp_path: Path) -> None:
    path = empty_environment(tmp_path / "venv")
    register(FrameworkEnvironment(framework="jax", path=path, created_at=NOW, versions={"jax": "1.2"}))
    (listed,) = json.loads(run_accelmark("env", "list", "--json").stdout)
    assert (listed["framework"], listed["versions"], listed["exists"]) == ("jax", {"jax": "1.2"}, True)
    done = run_accelmark("env", "remove", "jax")
    assert done.returncode == 0, done.stderr
    assert not path.exists()
    assert registered() == {}
    done = run_accelmark("env", "remove", "jax")
    assert "this machine has no environment of 'jax'" in done.stderr


def test_the_hosts_of_a_cluster_use_the_directory_that_its_file_names(tmp_path: Path) -> None:
    path = empty_environment(tmp_path / "venv")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("environments: {}\n")
    done = run_accelmark("env", "remove", "jax", "--hosts", str(cluster))
    assert done.returncode == 2
    assert "names no environment of jax: add environments: {jax: DIRECTORY}, or give --path" in done.stderr
    cluster.write_text(f"environments: {{jax: {path}}}\n")
    done = run_accelmark("env", "create", "jax", "--hosts", str(cluster), "--dry-run")
    assert f"-m venv {path}" in done.stdout
    done = run_accelmark("env", "remove", "jax", "--hosts", str(cluster))
    assert done.returncode == 0, done.stderr
    assert not path.exists()


def test_an_environment_whose_own_python_the_cluster_file_names_is_made_with_python3(tmp_path: Path) -> None:
    place, cluster = tmp_path / "venv", tmp_path / "cluster.yaml"
    cluster.write_text(f"python: {place}/bin/python\n")
    options = ("--vendor", "cpu", "--hosts", str(cluster), "--path", str(place))
    assert f"python3 -m venv {place}" in run_accelmark("env", "create", "pytorch", *options, "--dry-run").stdout
    done = run_accelmark("env", "create", "pytorch", *options, "--wheels", str(tmp_path))
    assert "installing the packages of pytorch" in done.stderr
    assert (place / "bin/python").exists()


def test_a_directory_with_other_files_is_neither_taken_nor_removed(tmp_path: Path) -> None:
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").touch()
    done = run_accelmark("env", "create", "jax", "--vendor", "cpu", "--path", str(other))
    assert done.returncode == 1
    assert f"{other} is not empty and no virtual environment" in done.stderr
    done = run_accelmark("env", "remove", "jax", "--path", str(other))
    assert "was not created by accelmark env create" in done.stderr
    assert (other / "thesis.txt").exists()


def test_an_accelmark_in_site_packages_is_given_to_ranks_without_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, node = Path("/opt/venv/bin/python"), tmp_path / "node"
    node.mkdir()
    found = environment_variables(python, {"PATH": "/usr/bin", "PYTHONPATH": "/mine"}, node)
    assert found["PYTHONPATH"] == os.pathsep.join([str(SOURCE), "/mine"])
    assert found["PATH"] == "/opt/venv/bin:/usr/bin"

    installed = tmp_path / "site-packages"
    (installed / "accelmark").mkdir(parents=True)
    (installed / "torch").mkdir()
    monkeypatch.setattr(accelmark, "__file__", str(installed / "accelmark" / "__init__.py"))
    found = environment_variables(python, {"PYTHONPATH": f"{installed}:/mine"}, node)
    place, mine = found["PYTHONPATH"].split(os.pathsep)
    assert [path.name for path in Path(place).iterdir()] == ["accelmark"]
    assert (Path(place) / "accelmark").resolve() == installed / "accelmark"
    assert mine == "/mine"
