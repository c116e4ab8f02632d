"""Problems from the facts of hosts, and invalid cluster files."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from accelmark.plan.plan import Plan
from accelmark.run.host import SubprocessHost
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.ssh.delivery import Wheel, wheel
from accelmark.run.onhost import command
from accelmark.run.preflight.check import Preflight
from accelmark.run.preflight.facts import (
    DeviceFacts,
    HostFacts,
    HostProblem,
    HostsNotReadyError,
    cluster_problems,
    device_problems,
    host_problems,
)
from accelmark.run.preflight.packages import PackageFacts, package_facts, package_problems, require_here
from accelmark.run.preflight.report import check_cluster, require_ready
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import ClusterSpec, HostSpec
from accelmark.spec.errors import RequestError
from accelmark.spec.job import TrainJob
from accelmark.spec.plugins.catalog import folders, framework_device, load_framework, load_vendor
from accelmark.spec.plugins.requirements import Need, distributions
from tests.run.fakes import make_plan

WORK = "/var/tmp/accelmark"
CLUSTER = ClusterSpec.model_validate({"launcher": "ssh", "hosts": [{"address": "a"}, {"address": "b"}]})


def facts(**changed: object) -> HostFacts:
    values: dict[str, object] = {
        "time": 0.0, "hostname": "a", "boot_id": "x", "python": (3, 11, 2), "executable": "/usr/bin/python3",
        "not_writable": None, "free_mib": 1e6, "memory_mib": 1e5, "cpus": 8, "load1": 0.1,
        "busy_ports": (), "refusals": {}, "missing_directories": (), "missing_files": (), "lacking_modules": (),
        "engine_problem": None, "held_by": None, "may_clear_caches": True,
    }  # fmt: skip
    return HostFacts.model_validate(values | changed)


def whats(problems: list[HostProblem], severity: str) -> list[str]:
    return [problem.what for problem in problems if problem.severity == severity]


def test_a_healthy_host_has_no_problem() -> None:
    assert host_problems("a", facts(), CLUSTER, 0.0, WORK) == []


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"python": (3, 9, 1)}, "/usr/bin/python3 is Python 3.9.1, 3.11 is needed"),
        ({"free_mib": 12.0}, "12 MiB are free in /var/tmp/accelmark, 1024 are needed"),
        ({"not_writable": "Read-only file system"}, "/var/tmp/accelmark cannot be written: Read-only file system"),
        ({"memory_mib": 3.0}, "3 MiB of memory are free, 512 are needed"),
        ({"busy_ports": (29501,)}, "port 29501 is in use"),
        ({"refusals": {"http://a:1": "Connection refused"}}, "http://a:1 cannot be reached: Connection refused"),
        ({"held_by": "run7"}, "is in use by run7"),
        ({"lacking_modules": ("psutil", "yaml")}, "/usr/bin/python3 has no psutil, PyYAML"),
    ],
)
def test_problems_of_a_host_are_errors(changed: dict[str, object], what: str) -> None:
    found = host_problems("a", facts(**changed), CLUSTER, 0.0, WORK)
    assert whats(found, "error") == [what]
    assert all(problem.hint for problem in found), "each problem says what to do"


@pytest.mark.parametrize(("engine", "severities"), [("podman", []), ("apptainer", ["warning"])])
def test_packages_missing_on_the_host_of_a_container(engine: str, severities: list[str]) -> None:
    """Podman ends what a killed agent leaves; with Apptainer the host's Python does."""
    image = {"image": "box"} if engine == "podman" else {"image_file": "/box.sif"}
    cluster = ClusterSpec.model_validate({"container": {"engine": engine} | image})
    found = host_problems("a", facts(lacking_modules=("psutil",)), cluster, 0.0, WORK)
    assert [problem.severity for problem in found] == severities
    assert all("what a killed agent leaves in a container there is not ended" in problem.what for problem in found)


def test_missing_packages_are_one_problem_with_the_command_that_installs_them() -> None:
    needs = [
        Need(requirement="torch>=2.6", needed_by="framework pytorch"),
        Need(requirement="transformers>=5.0", needed_by="case bert"),
        Need(requirement="safetensors", needed_by="case bert"),
    ]
    versions = {"torch": "2.4.0+cpu", "transformers": None, "safetensors": None}
    there = PackageFacts(executable="/usr/bin/python3", python=(3, 11, 2), versions=versions)
    (problem,) = package_problems("a", there, needs, ["safetensors"], load_framework("pytorch"))
    assert problem.what == (
        "framework pytorch needs torch>=2.6, but 2.4.0+cpu is installed; "
        "case bert needs transformers>=5.0, which is not installed"
    )
    assert problem.hint == "/usr/bin/python3 -m pip install 'torch>=2.6' 'transformers>=5.0'"
    (problem,) = package_problems("a", there, needs[:1], [], load_framework("pytorch"))
    assert problem.hint == (
        "/usr/bin/python3 -m pip install 'torch>=2.6'; or, in an environment of its own: accelmark env create pytorch"
    ), "which has no transformers"


def test_the_build_for_the_device_is_recommended_where_the_framework_is_lacking() -> None:
    needs = [Need(requirement="accelmark[torch]", needed_by="framework pytorch")]
    device = framework_device(load_vendor("cpu"), "pytorch")
    there = partial(PackageFacts, executable="/usr/bin/python3", python=(3, 11, 2))
    installed = {"torch": "2.13.0", "numpy": "2.0.0", "safetensors": None}
    for versions, option in (
        (dict.fromkeys(installed), "--extra-index-url https://download.pytorch.org/whl/cpu "),
        (installed, ""),
    ):
        found = there(versions=versions)
        (problem,) = package_problems("a", found, needs, [], load_framework("pytorch"), device=device)
        assert problem.hint.startswith(f"/usr/bin/python3 -m pip install {option}'accelmark[torch]'; or")


def test_a_verb_that_computes_here_recommends_the_build_for_the_device_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "torch-1.0.dist-info"  # found before the installed one
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for vendor, option in (("cpu", "--extra-index-url https://download.pytorch.org/whl/cpu "), ("nvidia", "")):
        monkeypatch.setattr("accelmark.run.preflight.packages.default_vendor", lambda found=vendor: found)
        with pytest.raises(RequestError) as caught:
            require_here("accelmark automl run", "accelmark[torch]")
        assert str(caught.value) == (
            "accelmark automl run needs torch>=2.11, but 1.0 is installed: "
            f"run {sys.executable} -m pip install {option}'accelmark[torch]'"
        )


def test_in_an_environment_its_own_pip_installs_what_its_creation_does_not() -> None:
    needs = [
        Need(requirement="accelmark[torch]", needed_by="framework pytorch"),
        Need(requirement="onnx>=1.17", needed_by="engine openvino"),
    ]
    versions: dict[str, str | None] = {"torch": "2.13.0", "numpy": "2.0.0", "safetensors": "0.5", "onnx": None}
    create, install = (
        "accelmark env create pytorch --path /opt/venv",
        "/opt/venv/bin/python -m pip install 'onnx>=1.17'",
    )
    framework, place = load_framework("pytorch"), Path("/opt/venv")
    hints = []
    for lacking in ({}, {"torch": None}, {"torch": None, "onnx": "1.18"}):
        found = PackageFacts(executable="/opt/venv/bin/python", python=(3, 11, 2), versions=versions | lacking)
        hints += [problem.hint for problem in package_problems("a", found, needs, [], framework, place)]
    assert hints == [install, f"{create}; then {install}", create]
    found = PackageFacts(executable="/opt/venv/bin/python", python=(3, 11, 2), versions=versions)
    (problem,) = package_problems("a", found, needs, [], framework, place, is_here=False)
    assert problem.hint == f"run there: {install}"


def test_packages_of_another_host_are_installed_there_without_accelmark() -> None:
    needs = [Need(requirement="accelmark[torch]", needed_by="framework pytorch")]
    versions = {"torch": "2.13.0", "numpy": "2.0.0", "safetensors": None}
    there = PackageFacts(executable="/usr/bin/python3", python=(3, 11, 2), versions=versions)
    (problem,) = package_problems("a", there, needs, [], load_framework("pytorch"), is_here=False)
    assert problem.hint == (
        "run there: /usr/bin/python3 -m pip install 'safetensors>=0.4'; "
        "or, in an environment of its own: accelmark env create pytorch --hosts CLUSTER"
    )


def test_the_environments_of_a_cluster_file_are_checked_without_a_run(tmp_path: Path) -> None:
    cluster = ClusterSpec(python=sys.executable, environments={"jax": tmp_path / "venv"})
    hints = [problem.hint for problem in asyncio.run(check_cluster(cluster))]
    assert f"accelmark env create jax --path {tmp_path}/venv" in hints


def test_a_package_of_an_sdk_is_not_installed_from_an_index() -> None:
    needs = [
        Need(requirement="onnx>=1.17", needed_by="engine acme_rt"),
        Need(requirement="tensorrt", needed_by="engine acme_rt", sdk="Acme's SDK"),
    ]
    there = PackageFacts(executable="/usr/bin/python3", python=(3, 11, 2), versions={"onnx": None, "tensorrt": None})
    found = package_problems("a", there, needs, [], load_framework("pytorch"))
    assert [problem.hint for problem in found] == [
        "install tensorrt from Acme's SDK",
        "/usr/bin/python3 -m pip install 'onnx>=1.17'",
    ]


def test_a_clock_that_is_off_and_a_busy_host_are_warnings() -> None:
    found = host_problems("a", facts(load1=7.0), CLUSTER, -42.0, WORK)
    assert whats(found, "warning") == ["its clock is -42.0 s off this machine's", "busy: load 7.0 on 8 cores"]
    assert "--set threads=1" in found[-1].hint, "the one idle core"


def test_idle_cores_are_no_advice_where_all_jobs_state_their_threads(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(name: str, found: HostFacts, *rest: Any, **options: Any) -> list[HostProblem]:
        return host_problems(name, found.model_copy(update={"cpus": 8, "load1": 7.0}), *rest, **options)

    monkeypatch.setattr("accelmark.run.preflight.check.host_problems", busy)
    plan = make_plan((), ())
    free, run = plan.jobs[0], tmp_path / "run"
    run.mkdir()
    assert isinstance(free.job.work, TrainJob)
    settings = free.job.work.settings.model_copy(update={"threads": 2})
    work = free.job.work.model_copy(update={"settings": settings})
    limited = free.model_copy(update={"job": free.job.model_copy(update={"work": work})})
    for jobs, is_advised in (((limited, limited), False), ((limited, free), True), ((), True)):
        found = asyncio.run(Preflight(RunDirectory(run, plan), create_launcher(plan, run), jobs).run())
        (hint,) = [problem.hint for problem in found if problem.what.startswith("busy: ")]
        assert ("--set threads=1" in hint) == is_advised


def test_too_few_and_busy_devices_are_reported() -> None:
    busy = DeviceFacts(name="X1", utilisation=0.9, memory_used_mib=5000.0)
    found = device_problems("a", [busy], "acme", 2)
    assert whats(found, "error") == ["has 1 devices of acme, 2 are needed"]
    assert whats(found, "warning") == ["device 0 (X1) is not idle: 90\u202f% busy, 5000 MiB used"]


def test_differing_drivers_are_a_warning_and_an_error_where_strict(plugins: Path) -> None:
    devices = {"a": [DeviceFacts(name="X1", driver="1.0")], "b": [DeviceFacts(name="X1", driver="2.0")]}
    found = cluster_problems({"a": facts(), "b": facts(hostname="b")}, devices, CLUSTER)
    assert [str(problem) for problem in found] == [
        "b: has driver 2.0, a has 1.0 (use hosts of one kind: the slowest limits a job)"
    ]
    make: Callable[..., Plan] = make_plan
    require_ready(found, make(()))
    with pytest.raises(HostsNotReadyError, match=r"has driver 2\.0"):
        require_ready(found, make((), strict=True))


def test_one_machine_under_two_names_is_an_error() -> None:
    found = cluster_problems({"a": facts(), "b": facts()}, {}, CLUSTER)
    assert [str(problem) for problem in found] == ["b: is the same machine as a (list each host once)"]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"hosts": [{"address": "-oProxyCommand=x"}]}, "begins with a dash"),
        ({"hosts": [{"address": "bench@a"}]}, "user and port have keys of their own"),
        ({"hosts": [{"address": "a:2222"}]}, "user and port have keys of their own"),
        ({"hosts": [{"address": "10.1.2.999"}]}, "no host name or IP address"),
        ({"hosts": [{"address": "a"}, {"address": "b", "label": "a"}]}, "duplicate hosts: a"),
        ({"environment": {"A=B": "x"}}, "not valid variable names"),
        ({"container": {"engine": "podman", "image_file": "x.tar"}}, "image_file needs image"),
        ({"hosts": []}, "at least 1 item"),
    ],
)
def test_an_invalid_cluster_file_is_refused(changed: dict[str, object], what: str) -> None:
    values = {"launcher": "ssh", "hosts": [{"address": "a"}, {"address": "b"}]}
    with pytest.raises(ValueError, match=what):
        ClusterSpec.model_validate(values | changed)


def test_the_wheel_is_reproducible(plugins: Path) -> None:
    wheel.cache_clear()
    first = wheel()
    wheel.cache_clear()
    assert wheel() == first
    (plugins / "vendors" / "acme" / "notes.txt").write_text("x")
    wheel.cache_clear()
    second = wheel()
    wheel.cache_clear()
    assert isinstance(second, Wheel)
    assert second.sha256 != first.sha256


def probed(**asked: object) -> HostFacts:
    """Return what the probe reports of this machine."""
    request: dict[str, object] = {
        "work_directory": "/tmp", "mounted": None, "is_locked": False, "locked_file": None, "ports": [], "urls": [],
        "directories": [], "files": [], "engine": None, "modules": [], "python_path": [],
    }  # fmt: skip
    done = subprocess.run(
        command(sys.executable, "probe"), input=json.dumps(request | asked) + "\n", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return HostFacts.model_validate_json(done.stdout)


def test_a_shared_directory_that_is_missing_on_a_host_is_reported_and_not_made(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    found = probed(work_directory=str(shared / "accelmark"), mounted=str(shared))
    assert (found.not_writable, shared.exists()) == (f"{shared} is missing", False)
    shared.mkdir()
    assert probed(work_directory=str(shared / "accelmark"), mounted=str(shared)).not_writable is None


@pytest.mark.parametrize("is_given", [True, False])
def test_the_probe_finds_packages_on_the_python_path_of_this_machines_ranks(is_given: bool, tmp_path: Path) -> None:
    (tmp_path / "made_up.py").touch()
    (tmp_path / "made_up-1.5.dist-info").mkdir()
    (tmp_path / "made_up-1.5.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.5\n")
    found = probed(modules=["made_up"], python_path=[str(tmp_path)] if is_given else [])
    assert found.lacking_modules == (() if is_given else ("made_up",))


def test_every_framework_names_a_package_for_each_device_so_that_its_absence_is_noticed() -> None:
    for vendor in folders("vendors"):
        for framework in (*folders("frameworks"), *load_vendor(vendor).frameworks):
            spec = load_framework(framework)
            try:
                device = framework_device(load_vendor(vendor), framework)
            except RequestError:
                continue
            needs = [Need(requirement=one, needed_by="it") for one in (*spec.requires, *device.requires)]
            assert set(distributions(needs)) & set(spec.distributions), f"{framework} on {vendor}"


def test_packages_are_read_from_the_python_that_runs_ranks_and_broken_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "made_up.py").write_text("raise RuntimeError('operator made_up::nms does not exist')")
    (tmp_path / "made_up-1.5.dist-info").mkdir()
    (tmp_path / "made_up-1.5.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.5\n")
    host = SubprocessHost(HostSpec(address="localhost"))
    ask = partial(package_facts, host, sys.executable, ["made-up"], ["made_up", "not_installed"])
    assert asyncio.run(ask()).versions == {"made-up": None}
    found = asyncio.run(ask([str(tmp_path)]))
    assert found.versions == {"made-up": "1.5"}
    assert found.broken == {"made_up": "RuntimeError: operator made_up::nms does not exist"}
    (problem,) = package_problems("a", found, [], [], load_framework("pytorch"))
    assert "import made_up fails: RuntimeError" in problem.what
    assert problem.hint == f"{sys.executable} -m pip uninstall made_up"
    jax = load_framework("jax").model_copy(update={"module": "made_up"})
    (problem,) = package_problems("a", found, [], [], jax, Path("/opt/venv"))
    assert problem.hint == "accelmark env create jax --path /opt/venv"
    (problem,) = package_problems("a", found, [], [], jax, Path("/opt/venv"), is_here=False)
    assert problem.hint == "accelmark env create jax --hosts CLUSTER", "a host has no AccelMark to make it with"
