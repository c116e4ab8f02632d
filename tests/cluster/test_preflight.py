"""Preflight on real hosts: all problems at once, firewalls, clocks, service ports, and devices in containers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from accelmark.plan.plan import Plan
from accelmark.run.launchers.ssh.connection import wheel
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem
from accelmark.spec.plugins.requirements import Need
from tests.cluster.bed import Bed
from tests.cluster.boxed import write_rootfs
from tests.cluster.conftest import done, drive, signalled, statuses, stepping
from tests.cluster.test_containers import in_container
from tests.run.fakes import problems, wait_for

pytestmark = pytest.mark.cluster
MakePlan = Callable[..., Plan]


def look(plan: Plan, *given: Path) -> list[Problem]:
    return problems(plan, Path("/nowhere/run"), *given)


def test_healthy_hosts_have_no_problem(plan: MakePlan) -> None:
    assert look(plan((), num_hosts=4)) == []


def test_every_problem_of_every_host_is_reported_at_once(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    lines = (bed.root / "known_hosts").read_text().splitlines()
    other_key = lines[0].split(" ", 1)[1]
    known.write_text("\n".join([lines[0], f"{bed.address(2)} {other_key}", *lines[2:]]) + "\n")
    made = plan((), num_hosts=4, on={"known_hosts": known})
    data = Path("/var/tmp/accelmark/data")
    (bed.work(1) / "data").mkdir()
    bed.stop_sshd(3)
    try:
        with squatter(bed, 1, 29501):
            begun = time.monotonic()
            found = look(made, data)
            assert time.monotonic() - begun < 60
    finally:
        bed.sshd(3)
        shutil.rmtree(bed.work(1) / "data")
    problems = {problem.where: problem.what for problem in found}
    assert problems["n1"] == "port 29501 is in use"
    assert problems["n2"].startswith("its host key has changed: it is not the one in ")
    assert all(problem.hint not in problem.what for problem in found), "what to do is said once"
    assert [problem.hint.partition(";")[0] for problem in found if problem.where == "n2"] == ["find out why"]
    assert "cannot be reached at" in problems["n3"]
    assert problems["n4"] == "the data directory /var/tmp/accelmark/data is missing"


def test_the_hosts_of_a_cluster_file_are_checked_without_a_run(
    cluster: Callable[..., ClusterSpec], bed: Bed, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    values = cluster(3).model_dump(mode="json", exclude_unset=True)
    values["hosts"] = [{**host, "key": "/nowhere"} if host["label"] != "n1" else host for host in values["hosts"]]
    file.write_text(yaml.safe_dump(values | {"vendor": "cpu"}))
    argv = [sys.executable, "-m", "accelmark", "preflight", str(file)]
    found = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "300"})
    assert (found.returncode, found.stdout) == (1, "1 of 3 hosts are ready\n"), found
    rows = [line for line in found.stderr.splitlines() if "/nowhere" in line]
    assert [row[:9] for row in rows] == ["error: n2", "error: n3"], found.stderr

    n1, n2, n3 = values["hosts"]
    file.write_text(yaml.safe_dump(values | {"vendor": "cpu", "hosts": [n2], "spares": [n3, n1]}))
    found = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "300"})
    shown = "1 of 3 hosts are ready\na run would use spares: n1 for n2\n"
    assert (found.returncode, found.stdout) == (0, shown), found


@pytest.mark.parametrize("changed", [{}, {"work_directory": "/var/tmp/accelmark/other"}])
def test_a_second_coordinator_finds_the_host_in_use(plan: MakePlan, tmp_path: Path, changed: dict[str, object]) -> None:
    first, second = tmp_path / f"first-{'ü' * 60}", tmp_path / "second"  # the name of the lock ends inside a letter
    process = drive("start", first, plan=plan(("steps=100000",)))
    wait_for(lambda: "rank0.out.log" in str(list(first.glob("*/*/*/*"))), "the first run")
    made = plan((), on=changed)
    found = [problem.what for problem in look(made)]
    code, out, _ = done(drive("start", second, plan=made))
    signalled(process, signal.SIGTERM)
    assert any("is in use by first-" in what for what in found), found
    assert (code, statuses(second)[0].state) == (1, "failed"), out
    assert (statuses(second)[0].reason or "").startswith("the host is in use by first-")


def test_shell_metacharacters_are_literal(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    evil = "a b;touch /var/tmp/accelmark/pwned $(id) 'q' \"d\" *"
    work = f"/var/tmp/accelmark/{evil.replace('/', '-')}"
    made = plan((), on={"environment": {"EVIL": evil, "PYTHONPATH": "/opt/lib"}, "work_directory": work})
    job = made.jobs[0]
    script = "import json,os,sys; print(json.dumps([os.environ['EVIL'], sys.argv[1], os.environ['PYTHONPATH']]))"
    node = job.nodes[0].model_copy(update={"command": ("python", "-c", script, evil)})
    hosts = (made.cluster.hosts[0].model_copy(update={"label": evil}),)
    node = node.model_copy(update={"host": evil})
    made = made.model_copy(
        update={
            "cluster": made.cluster.model_copy(update={"hosts": hosts}),
            "jobs": (job.model_copy(update={"nodes": (node,)}),),
        }
    )
    run = tmp_path / "run $(touch pwned); 'x'"
    assert [problem.what for problem in look(made, Path(work) / "data")] == [
        f"the data directory {work}/data is missing"
    ]
    done(drive("start", run, plan=made))
    log = next(run.glob("*/round1/*/start_pytorch_task.log"))
    variable, argument, path = json.loads(log.read_text())
    assert (variable, argument) == (evil, evil)
    assert path == f"{work}/code/{wheel().directory}:/opt/lib", "the delivered code comes first"
    assert "telemetry recorder" not in (log.parent / "exit.json").read_text()
    assert not list(bed.root.rglob("pwned"))


SOURCE = '''
"""Simulated devices: a file on each host lists them."""

import json
from pathlib import Path

from accelmark.telemetry.device import DeviceInfo, DeviceSample

DEVICES = Path("/var/tmp/accelmark/devices.json")


class Source:
    def open(self):
        return tuple(
            DeviceInfo(index=index, name="Acme X1", driver=device["driver"])
            for index, device in enumerate(json.loads(DEVICES.read_text()))
        )

    def sample(self):
        return tuple(
            DeviceSample(index=index, utilisation=device["busy"], memory_used_mib=0.0)
            for index, device in enumerate(json.loads(DEVICES.read_text()))
        )

    def close(self):
        pass
'''


def test_missing_and_busy_devices_and_differing_drivers_are_reported(plan: MakePlan, bed: Bed, plugins: Path) -> None:
    with_devices(plugins)
    devices: tuple[list[tuple[str, float]], ...] = ([("1.0", 0.0)], [("2.0", 0.0)], [("1.0", 0.9)], [])
    for number, has in enumerate(devices, start=1):
        content = json.dumps([{"driver": driver, "busy": busy} for driver, busy in has])
        (bed.work(number) / "devices.json").write_text(content)
    found = {(problem.where, problem.what): problem.severity for problem in look(plan((), num_hosts=4))}
    wheel.cache_clear()
    assert found[("n2", "has driver 2.0, n1 has 1.0")] == "warning"
    assert found[("n3", "device 0 (Acme X1) is not idle: 90\u202f% busy, 0 MiB used")] == "warning"
    assert found[("n4", "has no device of acme, 1 are needed")] == "error"
    assert not [what for host, what in found if host == "n1"]


def test_a_spare_replaces_a_host_that_is_not_ready(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    spares = [{"address": bed.address(number), "label": f"n{number}"} for number in (3, 4)]
    bed.stop_sshd(2)
    bed.stop_sshd(3)
    try:
        _, out, err = done(
            drive("start", tmp_path / "run", "--look", plan=plan((), num_hosts=2, on={"spares": spares}))
        )
    finally:
        bed.sshd(2)
        bed.sshd(3)
    assert [status.state for status in statuses(tmp_path / "run")] == ["succeeded"], out + err
    used = RunDirectory.open(tmp_path / "run").plan
    assert [host.name for host in used.cluster.hosts] == ["n1", "n4"]
    assert [node.host for node in used.jobs[0].nodes] == ["n1", "n4"]
    notes = [event.reason or "" for event in RunDirectory.open(tmp_path / "run").events()]
    assert any("host n2" in note and "replaced by the spare n3" in note for note in notes), notes
    assert any("host n3" in note and "replaced by the spare n4" in note for note in notes), notes


@contextmanager
def squatter(bed: Bed, number: int, port: int) -> Iterator[None]:
    body = f"import socket, time; s = socket.create_server(('', {port})); print(flush=True); time.sleep(300)"
    process = subprocess.Popen(bed.enter(number, sys.executable, "-c", body), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def test_a_firewall_on_the_master_port_is_reported(plan: MakePlan, bed: Bed) -> None:
    rule = ["INPUT", "--source", bed.address(3), "--protocol", "tcp", "--dport", "29501", "--jump", "DROP"]
    subprocess.run(bed.enter(1, "iptables", "--append", *rule), check=True)
    try:
        found = look(plan((), num_hosts=4))
    finally:
        subprocess.run(bed.enter(1, "iptables", "--delete", *rule), check=True)
    assert [problem.where for problem in found] == ["n3"]
    assert found[0].what == f"cannot reach n1 at {bed.address(1)} port 29501: timed out"


def test_every_host_gets_the_addresses_of_all_servers(plan: MakePlan, bed: Bed, run: Path) -> None:
    hosts = [{"address": bed.address(n), "label": f"n{n}", "service_ports": [2220 + n]} for n in (1, 2)]
    made = plan((), num_hosts=2, on={"hosts": hosts})
    script = "import json, os, sys; sys.stdout.write(json.dumps(dict(os.environ)))"
    nodes = tuple(node.model_copy(update={"command": ("python", "-c", script)}) for node in made.jobs[0].nodes)
    job = made.jobs[0].model_copy(update={"nodes": nodes})
    done(drive("start", run, plan=made.model_copy(update={"jobs": (job,)})))
    workers = [f"{bed.address(1)}:2221", f"{bed.address(2)}:2222"]
    for noderank in (0, 1):
        told = json.loads(next(run.glob(f"*/round1/*_noderank{noderank}/start_bare_task.log")).read_text())
        assert (told["BARE_SERVERS"], told["RANK"]) == (" ".join(workers), str(noderank))
        assert told["FLAGPERF_HOSTS"] == f"{bed.address(1)},{bed.address(2)}"
        assert told["FLAGPERF_HOSTS_PORTS"] == "2221,2222"


def with_devices(plugins: Path) -> None:
    """Give the made-up vendor devices that stand in a file of each host: real ones are not here."""
    vendor = plugins / "vendors" / "acme"
    text = (vendor / "vendor.yaml").read_text()
    (vendor / "vendor.yaml").write_text(f"{text}\ntelemetry: {{detect: {{device_files: ['null']}}}}\n")
    (vendor / "telemetry.py").write_text(SOURCE)
    wheel.cache_clear()


def test_devices_are_read_in_the_jobs_image(plan: MakePlan, bed: Bed, plugins: Path, run: Path, tmp_path: Path) -> None:
    """On the host where its Python can; inside the image where it is there; else it is said that nobody looked."""
    with_devices(plugins)
    recipe = plugins / "vendors" / "acme" / "images" / "pytorch"
    recipe.mkdir(parents=True)
    write_rootfs(recipe / "rootfs.tar")
    (recipe / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\nLABEL made.for=devices\n")  # by no other test
    wheel.cache_clear()
    (bed.work(1) / "devices.json").write_text(json.dumps([{"driver": "1.0", "busy": 0.75}]))
    container = in_container("podman")
    busy = "device 0 (Acme X1) is not idle: 75\u202f% busy, 0 MiB used"

    def seen(python: str) -> list[str]:
        return [problem.what for problem in look(plan((), on={"container": container, "python": python}))]

    assert seen(sys.executable) == [busy]
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = str(bare / "bin" / "python")
    assert seen(python) == ["devices of acme cannot be read before the image is there"]
    spec = {"container": container, "python": python}
    code, out, err = done(drive("start", run, plan=plan((), on=spec)))  # builds the image
    assert code == 0, out + err
    assert seen(python) == [busy]
    made = plan((), on=spec)
    needs = (Need(requirement="made-up>=1", needed_by="case toy"), Need(requirement="numpy", needed_by="case toy"))
    (lacking,) = look(made.model_copy(update={"jobs": (made.jobs[0].model_copy(update={"requires": needs}),)}))
    assert lacking.what == "case toy needs made-up>=1, which is not installed"
    assert "install it in the image accelmark-acme-pytorch:" in lacking.hint
    wheel.cache_clear()


def test_a_refused_run_leaves_nothing_and_resume_repeats_preflight(plan: MakePlan, bed: Bed, run: Path) -> None:
    with squatter(bed, 1, 29501):
        code, _, err = done(drive("start", run, "--look", plan=plan((), num_hosts=2)))
    assert (code, err.strip(), run.exists()) == (1, f"error: {taken()}", False)

    process = drive("start", run, "--look", plan=plan(("steps=100000", "first=hang"), num_hosts=2))
    wait_for(lambda: stepping(run), "a step that came home")
    for pid, line in bed.processes().items():
        if "accelmark.run.agent" in line and " sh -c " not in line:
            os.kill(pid, signal.SIGKILL)
    done(process)
    assert [status.state for status in statuses(run)] == ["lost"]
    with squatter(bed, 1, 29501):
        code, _, err = done(drive("resume", run, "--look"))
    assert (code, err.strip(), statuses(run)[0].state) == (1, f"error: {taken()}", "lost")
    process = drive("resume", run, "--look")
    wait_for(lambda: statuses(run)[0].state == "running" and stepping(run), "the second attempt", 60)
    signalled(process)
    assert statuses(run)[0].attempt == 2


def taken() -> str:
    return "n1: port 29501 is in use (find the process: ss -ltnp sport = :29501; or set master_port)"
