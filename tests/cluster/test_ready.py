"""Preflight on real hosts: firewalls, clocks, service ports, devices in containers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from accelmark.plan.plan import Plan
from accelmark.run.launchers.ssh.delivery import wheel
from accelmark.run.preflight.facts import HostsNotReadyError
from accelmark.run.preflight.hosts import require_ready
from accelmark.spec.plugins.requirements import Need
from tests.cluster.bed import Bed
from tests.cluster.conftest import done, drive, statuses, stepping
from tests.cluster.skeleton import mounts, write_rootfs
from tests.cluster.test_preflight import SOURCE, look
from tests.run.fakes import wait_for

pytestmark = pytest.mark.cluster
MakePlan = Callable[..., Plan]


@contextmanager
def squatter(bed: Bed, number: int, port: int) -> Iterator[None]:
    """Have somebody else listen at a port of a host."""
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


def test_a_service_port_in_use_is_reported(plan: MakePlan, bed: Bed) -> None:
    hosts = [{"address": bed.address(n), "label": f"n{n}", "service_ports": [2222, 2223]} for n in (1, 2)]
    with squatter(bed, 2, 2223):
        found = look(plan((), num_hosts=2, on={"hosts": hosts}))
    assert [(problem.where, problem.what) for problem in found] == [("n2", "port 2223 is in use")]


def test_every_host_gets_the_addresses_of_all_servers(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    hosts = [{"address": bed.address(n), "label": f"n{n}", "service_ports": [2220 + n]} for n in (1, 2)]
    made = plan((), num_hosts=2, on={"hosts": hosts})
    script = "import json, os, sys; sys.stdout.write(json.dumps(dict(os.environ)))"
    nodes = tuple(node.model_copy(update={"command": ("python", "-c", script)}) for node in made.jobs[0].nodes)
    run = tmp_path / "run"
    job = made.jobs[0].model_copy(update={"nodes": nodes})
    done(drive("start", run, plan=made.model_copy(update={"jobs": (job,)})))
    workers = [f"{bed.address(1)}:2221", f"{bed.address(2)}:2222"]
    for noderank in (0, 1):
        told = json.loads(next(run.glob(f"*/round1/*_noderank{noderank}/start_bare_task.log")).read_text())
        assert (told["BARE_SERVERS"], told["RANK"]) == (" ".join(workers), str(noderank))
        assert told["FLAGPERF_HOSTS"] == f"{bed.address(1)},{bed.address(2)}"
        assert told["FLAGPERF_HOSTS_PORTS"] == "2221,2222"


def test_a_host_with_a_wrong_clock_is_reported(plan: MakePlan, bed: Bed) -> None:
    """By libfaketime for all that a login on n2 starts, since a namespace has no wall clock of its own to set."""
    libraries = list(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not libraries:
        pytest.skip("needs libfaketime")
    config = bed.home(2) / "sshd_config"
    before = config.read_text()
    bed.stop_sshd(2)
    config.write_text(f"{before.rstrip()} LD_PRELOAD={libraries[0]} FAKETIME=-90\n")
    bed.sshd(2)
    wait_for(lambda: (bed.home(2) / "sshd.pid").exists(), "sshd")
    try:
        found = look(plan((), num_hosts=2))
    finally:
        bed.stop_sshd(2)
        config.write_text(before)
        bed.sshd(2)
        wait_for(lambda: (bed.home(2) / "sshd.pid").exists(), "sshd")
    (problem,) = found
    assert (problem.where, problem.severity) == ("n2", "warning")
    offset = float(problem.what.removeprefix("its clock is ").split(" ")[0])
    assert -100 < offset < -60, problem.what


def test_an_unknown_host_is_named_before_anything_starts(plan: MakePlan) -> None:
    found = look(plan((), on={"hosts": [{"address": "no-such-host.invalid", "label": "n1"}]}))
    assert [problem.where for problem in found] == ["n1"]
    assert found[0].what.startswith("cannot be reached at no-such-host.invalid port 22")


def test_hosts_with_differing_drivers_are_refused_where_strict(plan: MakePlan, bed: Bed, plugins: Path) -> None:
    with_devices(plugins)
    for number, driver in ((1, "1.0"), (2, "2.0")):
        (bed.work(number) / "devices.json").write_text(json.dumps([{"driver": driver, "busy": 0.0}]))
    made = plan((), num_hosts=2)
    found = look(made)
    wheel.cache_clear()
    require_ready(found, made)
    with pytest.raises(HostsNotReadyError, match=r"n2: has driver 2\.0, n1 has 1\.0"):
        require_ready(found, made.model_copy(update={"strict": True}))


def test_a_key_with_more_devices_than_a_host_has_is_refused(plan: MakePlan, bed: Bed, plugins: Path) -> None:
    with_devices(plugins)
    (bed.work(1) / "devices.json").write_text(json.dumps([{"driver": "1.0", "busy": 0.0}] * 2))
    made = plan(())
    node = made.jobs[0].nodes[0].model_copy(update={"nproc": 4})
    job = made.jobs[0].model_copy(update={"nodes": (node,)})
    found = look(made.model_copy(update={"jobs": (job,)}))
    wheel.cache_clear()
    assert [str(problem) for problem in found] == [
        "n1: has 2 devices of acme, 4 are needed (see 'accelmark doctor' there)"
    ]


def with_devices(plugins: Path) -> None:
    """Give the made-up vendor devices that stand in a file of each host: real ones are not here."""
    vendor = plugins / "vendors" / "acme"
    text = (vendor / "vendor.yaml").read_text()
    (vendor / "vendor.yaml").write_text(f"{text}\ntelemetry: {{detect: {{device_files: ['null']}}}}\n")
    (vendor / "telemetry.py").write_text(SOURCE)
    wheel.cache_clear()


def test_devices_are_read_in_the_jobs_image(plan: MakePlan, bed: Bed, plugins: Path, tmp_path: Path) -> None:
    """On the host where its Python can; inside the image where it is there; else it is said that nobody looked."""
    with_devices(plugins)
    recipe = plugins / "vendors" / "acme" / "images" / "pytorch"
    recipe.mkdir(parents=True)
    write_rootfs(recipe / "rootfs.tar")
    (recipe / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\nLABEL made.for=devices\n")  # by no other test
    wheel.cache_clear()
    (bed.work(1) / "devices.json").write_text(json.dumps([{"driver": "1.0", "busy": 0.75}]))
    container = {"engine": "podman", "mounts": mounts(), "python": sys.executable}
    busy = "device 0 (Acme X1) is not idle: 75\u202f% busy, 0 MiB used"

    def seen(python: str) -> list[str]:
        return [problem.what for problem in look(plan((), on={"container": container, "python": python}))]

    assert seen(sys.executable) == [busy]
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = str(bare / "bin" / "python")
    assert seen(python) == ["devices of acme cannot be read before the image is there"]
    run = tmp_path / "run"
    spec = {"container": {**container, "mounts": [*mounts(), *mounted_tests()]}, "python": python}
    code, out, err = done(drive("start", run, plan=plan((), on=spec)))  # builds the image
    assert code == 0, out + err
    assert seen(python) == [busy]
    made = plan((), on=spec)
    needs = (Need(requirement="made-up>=1", needed_by="case toy"), Need(requirement="numpy", needed_by="case toy"))
    (lacking,) = look(made.model_copy(update={"jobs": (made.jobs[0].model_copy(update={"requires": needs}),)}))
    assert lacking.what == "case toy needs made-up>=1, which is not installed"
    assert "install it in the image accelmark-acme-pytorch:" in lacking.hint
    wheel.cache_clear()


def mounted_tests() -> list[str]:
    fakes = Path(__file__).parents[1] / "run"
    return [f"{fakes}:{fakes}:ro"]


def test_a_refused_run_leaves_nothing_and_resume_repeats_preflight(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    run = tmp_path / "run"
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
    process.send_signal(signal.SIGINT)
    done(process)
    assert statuses(run)[0].attempt == 2


def taken() -> str:
    return "n1: port 29501 is in use (find the process: ss -ltnp sport = :29501; or set master_port)"
