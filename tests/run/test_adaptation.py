"""A vendor's folder for a case, applied on this machine, and the environment of ranks."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

import accelmark
from accelmark.plan.request import adaptation_files, requirements_file
from accelmark.run.agent.adaptation import apply_adaptation
from accelmark.run.agent.agent import rank_environment
from accelmark.run.agent.task import AgentTask
from accelmark.run.controller.execution import node_jobs
from accelmark.run.launchers import create_launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.run.sandboxes.sandbox import model_files
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import RunError
from accelmark.spec.job import InferJob
from accelmark.spec.plugins.catalog import FolderRef, load_framework
from accelmark.spec.settings.inference import InferSettings
from tests.cluster.boxed import KERNEL, SETUP, write_index
from tests.run.fakes import job_spec, make_plan
from tests.run.test_session import drive, ends

CarryOut = Callable[..., dict[str, str]]
OURS = str(Path(accelmark.__file__).parents[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "acme" / "cases" / "toy-pytorch"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def carry(folder: Path, tmp_path: Path) -> CarryOut:
    """Carry the folder out with a package index of one package and no other."""
    index = write_index(tmp_path / "index") / "simple"

    def body() -> dict[str, str]:
        node = tmp_path / "node"
        node.mkdir()
        environment = os.environ | {"PIP_INDEX_URL": index.as_uri(), "PIP_CONFIG_FILE": os.devnull}
        environment, _ = apply_adaptation(
            folder, requirements_file(folder, tmp_path), node, environment, load_framework("pytorch"), sys.executable
        )
        return environment

    return body


def test_a_package_that_is_missing_is_installed_for_the_ranks_alone(folder: Path, carry: CarryOut) -> None:
    (folder / "requirements.txt").write_text("pydantic  # is here\nacme-notes\n")
    environment = carry()
    site = Path(environment["PYTHONPATH"].partition(os.pathsep)[0])
    assert sorted(path.name for path in site.glob("[!_]*")) == ["acme_notes-1.0.dist-info", "acme_notes.py"]
    assert importlib.util.find_spec("acme_notes") is None
    record = json.loads((site.parent / "adaptation.json").read_text())
    assert record["installed"] == ["acme-notes==1.0"]


def test_a_package_that_cannot_be_installed_is_named(folder: Path, carry: CarryOut) -> None:
    (folder / "requirements.txt").write_text("acme-notes\nno-such-package-anywhere==9.9\n")
    with pytest.raises(RunError, match=r"requirements\.txt: cannot be installed .*no-such-package-anywhere==9\.9"):
        carry()


def test_the_first_errors_of_the_compiler_are_reported(folder: Path, carry: CarryOut) -> None:
    (folder / "csrc").mkdir()
    (folder / "csrc" / "setup.py").write_text(SETUP)
    (folder / "csrc" / "kernel.cpp").write_text(KERNEL.replace("std::iota", "std::jota"))
    with pytest.raises(RunError, match=r"csrc: cannot be installed .*kernel\.cpp:9:\d+: error: .jota. is not a member"):
        carry()


def test_a_failing_script_is_reported_with_its_output(folder: Path, carry: CarryOut) -> None:
    (folder / "environment_variables.sh").write_text("echo error: no toolkit at /opt/acme >&2\nfalse || exit 3\n")
    with pytest.raises(RunError, match=r"variables\.sh: cannot be sourced \(exit code 3\): error: no toolkit"):
        carry()


@pytest.mark.parametrize(
    ("script", "left"), [("export PYTHONPATH=/opt/lib", ["/opt/lib"]), ("unset PYTHONPATH", []), ("", None)]
)
def test_accelmark_is_importable_whatever_a_script_does_to_pythonpath(
    folder: Path, carry: CarryOut, monkeypatch: pytest.MonkeyPatch, script: str, left: list[str] | None
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{OURS}:/own")
    (folder / "environment_variables.sh").write_text(f"{script}\n")
    assert carry()["PYTHONPATH"].split(os.pathsep) == [OURS, *(["/own"] if left is None else left)]


def test_the_vendors_requirements_replace_the_cases(tmp_path: Path) -> None:
    vendor, case = tmp_path / "vendor", tmp_path / "case"
    vendor.mkdir()
    case.mkdir()
    assert requirements_file(vendor, case) is None
    (case / "requirements.txt").touch()
    assert requirements_file(None, case) == requirements_file(vendor, case) == case / "requirements.txt"
    (vendor / "requirements.txt").touch()
    assert requirements_file(vendor, case) == vendor / "requirements.txt"


def test_a_job_whose_kernel_does_not_compile_fails_and_the_next_case_runs(plugins: Path, run: Path) -> None:
    csrc = plugins / "vendors" / "acme" / "cases" / "toy0-pytorch" / "csrc"
    csrc.mkdir(parents=True)
    (csrc / "setup.py").write_text(SETUP)
    (csrc / "kernel.cpp").write_text("no C++ at all\n")
    plan = make_plan((), ())
    damaged, sound = plan.jobs
    job = damaged.job.model_copy(update={"adaptation": adaptation_files(csrc.parent)})
    plan = plan.model_copy(update={"jobs": (damaged.model_copy(update={"job": job}), sound)})
    first, _ = ends(drive("start", run, plan=plan), run, 1, "failed", "succeeded")
    assert "kernel.cpp:1:1: error: " in (first.reason or "")
    node = next(run.glob("toy0*/round1/*_noderank0"))
    assert "kernel.cpp" in (node / "adaptation.log").read_text()
    assert not (node / "site").exists()


def test_a_container_uses_a_packages_folder_and_mounts_named_models(plugins: Path, tmp_path: Path) -> None:
    plan = make_plan((), cluster=ClusterSpec.model_validate({"container": {"engine": "podman", "image": "box"}}))
    extern = FolderRef(name="toy0-pytorch", path=tmp_path, package="acme.cases.toy0-pytorch", sha256="0" * 64)
    settings = InferSettings(batch_size=1, no_validation=True, exist_onnx_path="/models/a.onnx", compiler="eager")
    infer = InferJob(unit="image", metric="top1", tolerance=0.1, reference=None, settings=settings, parameters={})
    (planned,) = plan.jobs
    job = planned.job.model_copy(update={"extern": extern, "work": infer})
    directory = RunDirectory.create(tmp_path / "run", plan)
    launcher = create_launcher(plan, directory.path)
    (node,) = asyncio.run(node_jobs(planned.model_copy(update={"job": job}), launcher))
    assert node.job.extern == extern.model_copy(update={"package": None})
    assert model_files(job) == (Path("/models/a.onnx"),)


PURE = "from setuptools import setup\nsetup(name='acme-kernels', version='0.1', {what})\n"


@pytest.mark.parametrize(
    ("files", "what", "taken"),
    [
        ({"sitecustomize.py": ""}, "py_modules=['sitecustomize']", "sitecustomize.py"),
        ({"accelmark/__init__.py": ""}, "packages=['accelmark']", "accelmark"),
        ({"torch/__init__.py": ""}, "packages=['torch']", "torch"),
        ({"json.py": ""}, "py_modules=['json']", "json.py"),
        ({"acme.pth": "import os"}, "data_files=[('', ['acme.pth'])]", "acme.pth"),
    ],
)
def test_installing_a_reserved_module_name_is_refused(
    folder: Path, carry: CarryOut, files: dict[str, str], what: str, taken: str
) -> None:
    for name, text in files.items():
        (folder / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "csrc" / name).write_text(text)
    (folder / "csrc" / "setup.py").write_text(PURE.format(what=what))
    with pytest.raises(RunError, match=rf"csrc: installs {taken}, which would replace"):
        carry()


@pytest.mark.parametrize(
    ("ambient", "asked", "path"),
    [
        (OURS, "/opt/lib:/opt/more", f"{OURS}:/opt/lib:/opt/more"),
        (f"/own:{OURS}/", f"/opt/lib:{OURS}", f"{OURS}:/opt/lib"),
        (OURS, None, OURS),
        ("/own", "/opt/lib", "/opt/lib"),
        (None, "/opt/lib", "/opt/lib"),
        (None, None, None),
    ],
)
def test_a_pythonpath_of_the_cluster_file_comes_after_accelmark(
    make_task: Callable[..., AgentTask], tmp_path: Path, ambient: str | None, asked: str | None, path: str | None
) -> None:
    task = make_task().model_copy(update={"environment": {"PYTHONPATH": asked} if asked else {}})
    found = rank_environment(task, job_spec(), tmp_path, {"PYTHONPATH": ambient} if ambient else {})
    assert found.get("PYTHONPATH") == path


def test_installed_packages_do_not_hide_those_on_pythonpath(
    make_task: Callable[..., AgentTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: OURS)
    task = make_task().model_copy(update={"environment": {"PYTHONPATH": "/opt/lib"}})
    assert rank_environment(task, job_spec(), tmp_path, {"PYTHONPATH": OURS})["PYTHONPATH"] == "/opt/lib"
