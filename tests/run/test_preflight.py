"""Problems from the facts of hosts, invalid cluster files, and preflight on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelmark.plan.plan import Plan
from accelmark.run.host import SubprocessHost
from accelmark.run.launchers import create_launcher, plan_of_hosts
from accelmark.run.launchers.ssh.connection import Wheel, wheel
from accelmark.run.onhost import command
from accelmark.run.preflight.checks import (
    DeviceFacts,
    HostFacts,
    HostsNotReadyError,
    HostState,
    PackageFacts,
    package_facts,
    package_problems,
    problems_between,
    problems_of_host,
    require_here,
)  # fmt: skip
from accelmark.run.preflight.hosts import check_cluster, require_ready
from accelmark.spec.cluster import ClusterSpec, HostSpec
from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.catalog import folders, framework_device, load_framework, load_vendor
from accelmark.spec.plugins.requirements import Need, distributions
from tests.cli.test_main import accelmark
from tests.run.fakes import make_plan, problems

CLUSTER = ClusterSpec.model_validate({"launcher": "ssh", "hosts": [{"address": "a"}, {"address": "b"}]})


def state(name: str = "a", cluster: ClusterSpec = CLUSTER, **changed: object) -> HostState:
    """Return a host without problems, but for the facts in ``changed``."""
    values: dict[str, object] = {
        "time": 0.0, "hostname": name, "boot_id": "x", "python": (3, 11, 2), "executable": "/usr/bin/python3",
        "not_writable": None, "free_mib": 1e6, "memory_mib": 1e5, "cpus": 8, "load1": 0.1,
        "busy_ports": (), "refusals": {}, "missing_directories": (), "missing_files": (), "lacking_modules": (),
        "engine_problem": None, "held_by": None, "may_clear_caches": True,
    }  # fmt: skip
    launcher = create_launcher(plan_of_hosts(cluster), Path("run"))
    return HostState(name, HostFacts.model_validate(values | changed), launcher)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({}, None),
        ({"python": (3, 8, 1)}, "is Python 3.8.1, 3.9 is needed"),
        ({"python": (3, 8, 1), "lacking_modules": ("psutil",)}, "is Python 3.8.1, 3.9 is needed"),
        ({"free_mib": 12.0}, "12 MiB are free in /var/tmp/accelmark"),
        ({"not_writable": "Read-only file system"}, "/var/tmp/accelmark cannot be written: Read-only file system"),
        ({"memory_mib": 3.0}, "3 MiB of memory are free"),
        ({"shared_memory_mib": 1.0}, "/dev/shm"),
        ({"busy_ports": (29501,)}, "port 29501 is in use"),
        ({"refusals": {"http://a:1": "Connection refused"}}, "http://a:1 cannot be reached: Connection refused"),
        ({"held_by": "run7"}, "is in use by run7"),
        ({"lacking_modules": ("psutil", "yaml")}, "/usr/bin/python3 has no psutil, PyYAML"),
    ],
)
def test_problems_of_a_host_are_errors(changed: dict[str, Any], what: str | None) -> None:
    problems = problems_of_host(state(**changed))
    assert len(problems) == (what is not None), "a Python that is too old gets no packages"
    for problem in problems:
        assert what is not None and what in problem.what  # noqa: PT018
        assert (problem.severity, bool(problem.hint)) == ("error", True)
        assert ("pip install" in problem.hint) == ("has no" in problem.what)


@pytest.mark.parametrize(("engine", "severities"), [("podman", []), ("apptainer", ["warning"])])
def test_packages_missing_on_the_host_of_a_container(engine: str, severities: list[str]) -> None:
    """Podman ends what a killed agent leaves; with Apptainer the host's Python does."""
    image = {"image": "box"} if engine == "podman" else {"image_file": "/box.sif"}
    cluster = ClusterSpec.model_validate({"container": {"engine": engine} | image})
    problems = problems_of_host(state(cluster=cluster, lacking_modules=("psutil",)))
    assert [problem.severity for problem in problems] == severities


NEEDS = [
    Need(requirement="torch>=2.6", needed_by="framework pytorch"),
    Need(requirement="transformers>=5.0", needed_by="case bert"),
    Need(requirement="tensorrt", needed_by="engine acme_rt", sdk="Acme's SDK"),
]
EXTRA = [Need(requirement="accelmark[torch]", needed_by="framework pytorch")]
INSTALLED = {"torch": "2.13.0", "numpy": "2.0.0", "safetensors": "0.5"}
NO_SAFETENSORS = INSTALLED | {"safetensors": None}
ONNX = Need(requirement="onnx>=1.17", needed_by="engine openvino")
PIP, VENV_PIP = "/usr/bin/python3 -m pip install", "/opt/venv/bin/python -m pip install"
CREATE = "accelmark env create pytorch"
CREATE_VENV = f"{CREATE} --path /opt/venv"
INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
VENV = {"environment": Path("/opt/venv")}
CPU = {"device": framework_device(load_vendor("cpu"), "pytorch")}


@pytest.mark.parametrize(
    ("needs", "versions", "options", "hints"),
    [
        (NEEDS[1:], {"torch": "2.4"}, {}, ["install tensorrt from Acme's SDK", f"{PIP} 'transformers>=5.0'"]),
        (NEEDS[:1], {"torch": "2.4.0"}, {}, [f"{PIP} 'torch>=2.6'; or, in an environment of its own: {CREATE}"]),
        (EXTRA, {}, CPU, [f"{PIP} {INDEX} 'accelmark[torch]'; or, in an environment of its own: {CREATE}"]),
        (EXTRA, NO_SAFETENSORS, CPU, [f"{PIP} 'accelmark[torch]'; or, in an environment of its own: {CREATE}"]),
        (
            EXTRA, NO_SAFETENSORS, {"is_here": False},
            [f"run there: {PIP} 'safetensors>=0.4'; or, in an environment of its own: {CREATE} --hosts CLUSTER"],
        ),
        ([*EXTRA, ONNX], INSTALLED, VENV, [f"{VENV_PIP} 'onnx>=1.17'"]),
        ([*EXTRA, ONNX], {}, VENV, [CREATE_VENV]),
        ([ONNX], {}, {"image": "acme:1"}, [f"install it in the image acme:1: {PIP} 'onnx>=1.17'"]),
        ([*EXTRA, ONNX], INSTALLED, VENV | {"is_here": False}, [f"run there: {VENV_PIP} 'onnx>=1.17'"]),
    ],
)  # fmt: skip
def test_missing_packages_are_one_problem_with_the_command_that_installs_them(
    needs: list[Need], versions: dict[str, str | None], options: Any, hints: list[str]
) -> None:
    """SDKs come from no index; the build for the device is named where the framework is lacking."""
    python = "/opt/venv/bin/python" if "environment" in options else "/usr/bin/python3"
    there = PackageFacts(executable=python, python=(3, 11, 2), versions=versions)
    assert [p.hint for p in package_problems(there, needs, [], load_framework("pytorch"), **options)] == hints


def test_a_verb_that_computes_here_recommends_the_build_for_the_device_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "torch-1.0.dist-info"  # found before the installed one
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for vendor, option in (("cpu", f"{INDEX} "), ("nvidia", "")):
        monkeypatch.setattr("accelmark.run.preflight.checks.default_vendor", lambda found=vendor: found)
        with pytest.raises(RequestError) as caught:
            require_here("accelmark automl run", "accelmark[torch]")
        assert str(caught.value).endswith(f"{sys.executable} -m pip install {option}'accelmark[torch]'")


def test_the_environments_of_a_cluster_file_are_checked_without_a_run(tmp_path: Path) -> None:
    cluster = ClusterSpec(python=sys.executable, environments={"jax": tmp_path / "venv"})
    hints = [problem.hint for problem in asyncio.run(check_cluster(cluster))]
    assert f"accelmark env create jax --path {tmp_path}/venv" in hints


def test_a_clock_that_is_off_and_a_busy_host_are_warnings() -> None:
    problems = problems_of_host(replace(state(load1=7.0), clock_offset_s=-42.0))
    warnings = [problem.what for problem in problems if problem.severity == "warning"]
    assert warnings == ["its clock is -42.0 s off this machine's", "busy: load 7.0 on 8 cores"]
    assert "--set threads=1" in problems[-1].hint, "the one idle core"


def test_differing_drivers_are_a_warning_and_an_error_where_strict(plugins: Path) -> None:
    hosts = [
        replace(state(name), devices=[DeviceFacts(name="X1", driver=driver)])
        for name, driver in (("a", "1.0"), ("b", "2.0"))
    ]
    found = list(problems_between(hosts))
    assert [(problem.where, problem.what) for problem in found] == [("b", "has driver 2.0, a has 1.0")]
    require_ready(found, make_plan(()))
    with pytest.raises(HostsNotReadyError, match=r"has driver 2\.0"):
        require_ready(found, make_plan((), strict=True))


def test_one_machine_under_two_names_is_an_error() -> None:
    (problem,) = problems_between([state("a"), replace(state("a"), name="b")])
    assert (problem.where, problem.what, problem.severity) == ("b", "is the same machine as a", "error")


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"hosts": [{"address": "-oProxyCommand=x"}]}, "begins with a dash"),
        ({"hosts": [{"address": "bench@a"}]}, "no host name or IP address"),
        ({"hosts": [{"address": "10.1.2.999"}]}, "no host name or IP address"),
        ({"hosts": [{"address": "a"}, {"address": "b", "label": "a"}]}, "duplicate hosts: a"),
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
    (tmp_path / "made_up-1.5.dist-info/RECORD").write_text("made_up.py,,\n")
    (tmp_path / "made_up.py").write_text("import a_package_that_it_needs")
    needed = asyncio.run(package_facts(host, sys.executable, ["made-up"], [], [str(tmp_path)], ["made-up"]))
    (problem,) = package_problems(needed, [], [], load_framework("pytorch"))
    assert "No module named 'a_package_that_it_needs'" in problem.what
    assert problem.hint == f"{sys.executable} -m pip install made-up"
    (problem,) = package_problems(found, [], [], load_framework("pytorch"))
    assert "import made_up fails: RuntimeError" in problem.what
    assert problem.hint == f"{sys.executable} -m pip uninstall made_up"
    jax = load_framework("jax").model_copy(update={"module": "made_up"})
    (problem,) = package_problems(found, [], [], jax, Path("/opt/venv"))
    assert problem.hint == "accelmark env create jax --path /opt/venv"
    (problem,) = package_problems(found, [], [], jax, Path("/opt/venv"), is_here=False)
    assert problem.hint == "accelmark env create jax --hosts CLUSTER", "a host has no AccelMark to make it with"


@pytest.mark.parametrize(
    ("name", "held_by"), [(None, None), (b"", "another run"), (b"/r\xc3\xbcn", "r\u00fcn"), (b"/cut \xc3", "cut \\xc3")]
)
def test_names_of_sockets_are_bytes(name: bytes | None, held_by: str | None) -> None:
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as lock:
        other.bind(b"\0made-up \xff")
        if name is not None:
            lock.bind(b"\0accelmark-host" + name)
        assert probed(is_locked=True).held_by == held_by


DEVICES = """
from accelmark.telemetry.device import DeviceInfo, DeviceSample

class Source:
    def open(self):
        return (DeviceInfo(index=0, name="Acme X1", driver="1.0"),)

    def sample(self):
        return (DeviceSample(index=0, utilisation=0.5, memory_used_mib=2048.0),)

    def close(self):
        pass
"""


def look(plan: Plan, run: Path, *given: Path) -> list[str]:
    return [problem.what for problem in problems(plan, run, *given)]


def test_a_healthy_machine_has_no_problem(plugins: Path, tmp_path: Path) -> None:
    assert look(make_plan(()), tmp_path / "run") == []


def test_data_disk_memory_and_ports_of_this_machine_are_checked(plugins: Path, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        hosts = [{"address": "localhost", "service_ports": [port]}]
        spec = ClusterSpec.model_validate({"hosts": hosts, "min_disk_mib": 10**9, "min_memory_mib": 10**9})
        found = look(make_plan((), cluster=spec), tmp_path / "run", tmp_path / "data")
    assert f"port {port} is in use" in found
    assert f"the data directory {tmp_path / 'data'} is missing" in found
    assert any(f"are free in {tmp_path / 'run'}, 1000000000 are needed" in what for what in found)
    assert any("MiB of memory are free, 1000000000 are needed" in what for what in found)


def test_devices_of_this_machine_are_checked(plugins: Path, tmp_path: Path) -> None:
    vendor = plugins / "vendors" / "acme"
    text = (vendor / "vendor.yaml").read_text()
    (vendor / "vendor.yaml").write_text(f"{text}\ntelemetry: {{detect: {{device_files: ['null']}}}}\n")
    (vendor / "telemetry.py").write_text(DEVICES)  # made up: no such device is here
    plan = make_plan(())
    node = plan.jobs[0].nodes[0].model_copy(update={"nproc": 2})
    job = plan.jobs[0].model_copy(update={"nodes": (node,)})
    found = look(plan.model_copy(update={"jobs": (job,)}), tmp_path / "run")
    assert found == [
        "has 1 devices of acme, 2 are needed",
        "device 0 (Acme X1) is not idle: 50\u202f% busy, 2048 MiB used",
    ]


def test_a_missing_container_engine_is_reported(plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for engine, program in (("podman", "podman"), ("pyxis", "enroot")):
        plan = make_plan((), cluster=ClusterSpec.model_validate({"container": {"engine": engine, "image": "x"}}))
        assert look(plan, tmp_path / engine) == [f"the container engine {program} is not on the PATH"]


def test_the_command_line_ends_with_one_table_and_leaves_nothing(plugins: Path, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = {"hosts": [{"address": "localhost", "label": "here", "service_ports": [port]}]}
        request = {"vendor": "acme", "cluster": cluster, "cases": [{"key": "toy:pytorch:X1:1:1"}]}
        (tmp_path / "file.yaml").write_text(yaml.safe_dump(request))
        run = tmp_path / "run"
        arguments = ("run", str(tmp_path / "file.yaml"), "--set", "loader.synthetic=true", "--out", str(run))
        ended, as_json = accelmark(*arguments), accelmark(*arguments, "--json")
    assert (ended.returncode, as_json.returncode) == (1, 1), ended.stdout + ended.stderr
    assert "error: hosts are not ready" in ended.stderr
    assert f"port {port} is in use" in ended.stderr
    assert any(
        f"here: port {port} is in use" in what for what in json.loads(as_json.stdout.splitlines()[-1])["problems"]
    )
    assert not run.exists()


def test_a_read_only_directory_is_reported_before_preflight(plugins: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a read-only file system")
    place = tmp_path / "place"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "none", str(place)], check=True)
    try:
        ended = accelmark("train", "toy:pytorch:X1:1:1", "--vendor", "acme", "--synthetic", "--out", str(place / "run"))
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
    assert ended.returncode == 1
    assert "the file system is read-only" in ended.stderr
