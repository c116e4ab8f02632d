"""Preflight on this machine, as ``accelmark train`` and ``run`` do it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from accelmark.plan.plan import Plan
from accelmark.run.launchers import create_launcher
from accelmark.run.preflight.hosts import Preflight
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import ClusterSpec
from tests.cli.test_main import accelmark
from tests.run.fakes import make_plan

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
    run.mkdir()
    directory = RunDirectory(run, plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelmark.run.preflight.hosts.given_data", lambda _: [(None, path) for path in given])
        found = asyncio.run(Preflight(directory, create_launcher(plan, run), plan.jobs).run())
    return [problem.what for problem in found if "busy: load" not in problem.what]


def local(**values: object) -> ClusterSpec:
    return ClusterSpec.model_validate(values)


def test_a_healthy_machine_has_no_problem(plugins: Path, tmp_path: Path) -> None:
    assert look(make_plan(()), tmp_path / "run") == []


def test_data_disk_memory_and_ports_of_this_machine_are_checked(plugins: Path, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        hosts = [{"address": "localhost", "service_ports": [port]}]
        spec = local(hosts=hosts, min_disk_mib=10**9, min_memory_mib=10**9)
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
    spec = local(container={"engine": "podman", "image": "x"})
    assert look(make_plan((), cluster=spec), tmp_path / "run") == ["the container engine podman is not on the PATH"]
    spec = local(container={"engine": "pyxis", "image": "x"})
    assert look(make_plan((), cluster=spec), tmp_path / "other") == ["the container engine enroot is not on the PATH"]


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
