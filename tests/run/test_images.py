"""Images pulled from a registry, with a script as the container engine."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Literal

import pytest

from accelmark.plan.plan import Plan
from accelmark.run.controller.execution import node_jobs
from accelmark.run.launchers import create_launcher
from accelmark.run.preflight.hosts import check_cluster, preflight_commands
from accelmark.run.sandboxes.sandbox import ImageRecipe
from accelmark.spec.cluster import ClusterSpec
from tests.run.fakes import make_plan, problems
from tests.run.test_session import drive, ends

THERE, GONE = "registry.example.com/there:1", "registry.example.com/gone:1"
ENGINE = """\
#!/bin/sh
# Keeps the names of images in a file, has a registry of one image, and runs "containers" as processes.
store=$(dirname "$0")
echo "$1" "$2" "$3" >> "$store/asked"
case $1 in
    info) ;;
    image) grep -qsx "$3" "$store/images" ;;
    manifest) [ "$3" = registry.example.com/there:1 ] || { cat "$store/refusal" >&2; exit 1; } ;;
    pull) [ "$2" = registry.example.com/there:1 ] || { cat "$store/refusal" >&2; exit 1; }
        echo "$2" >> "$store/images" ;;
    run)
        while [ "$1" != --entrypoint ]; do
            [ "$1" != --env ] || export "$2"
            shift
        done
        shift 3
        exec sh "$@" ;;
esac
"""
Engine = Literal["podman", "docker"]


@pytest.fixture
def store(plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both engines first on the PATH, and where they keep what they have."""
    store = tmp_path / "engine"
    store.mkdir()
    for name in ("podman", "docker"):
        (store / name).write_text(ENGINE)
        (store / name).chmod(0o755)
    (store / "refusal").write_text("Error: manifest unknown\n")
    monkeypatch.setenv("PATH", f"{store}:{os.environ['PATH']}")
    return store


def plan_in(image: str, engine: Engine = "podman") -> Plan:
    container = {"engine": engine, "image": image, "python": sys.executable}
    return make_plan((), cluster=ClusterSpec.model_validate({"container": container}))


def asked(store: Path, verb: str) -> list[str]:
    return [line for line in (store / "asked").read_text().splitlines() if line.startswith(verb)]


def test_an_image_is_pulled_only_where_it_is_absent(store: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        ends(drive("start", tmp_path / name, "--look", plan=plan_in(THERE)), tmp_path / name, 0, "succeeded")
    assert asked(store, "pull") == [f"pull {THERE} "]
    assert asked(store, "manifest") == [f"manifest inspect {THERE}"]


def test_an_image_that_cannot_be_pulled_fails_the_job_with_the_engines_error(store: Path, run: Path) -> None:
    (status,) = ends(drive("start", run, plan=plan_in(GONE)), run, 1, "failed")
    reason = f"localhost: the image {GONE} could not be pulled: Error: manifest unknown; repeat on that host: "
    assert status.reason == f"{reason}podman pull {GONE}"


def test_preflight_warns_of_an_image_that_is_nowhere(store: Path, tmp_path: Path) -> None:
    plan = plan_in(GONE, "docker")
    (problem,) = problems(plan, tmp_path / "run")
    assert (problem.where, problem.severity) == ("localhost", "warning")
    assert GONE in problem.what
    assert "manifest unknown" in problem.what
    assert problem.hint.endswith(f"docker pull {GONE}")
    assert problem.what in [found.what for found in asyncio.run(check_cluster(plan.cluster))], "without a run too"
    (store / "images").write_text(f"{GONE}\n")
    assert problems(plan, tmp_path / "run") == []
    assert problems(plan_in(THERE, "docker"), tmp_path / "run") == []
    assert not asked(store, "pull"), "looking pulls nothing"


def test_a_dry_run_shows_the_commands_that_look_for_an_image_and_pull_it(store: Path, tmp_path: Path) -> None:
    plan = plan_in(THERE)
    launcher, (job,) = create_launcher(plan, tmp_path), plan.jobs
    (looks,) = asyncio.run(preflight_commands(plan, launcher)).values()
    assert looks[1:] == [["podman", "image", "inspect", THERE], ["podman", "manifest", "inspect", THERE]]
    (node,) = asyncio.run(node_jobs(job, launcher))
    (agent,) = launcher.agents([node])
    assert agent.commands()[:2] == [["podman", "image", "inspect", THERE], ["podman", "pull", THERE]]


def test_the_command_that_repeats_a_build_has_no_secrets() -> None:
    given = ["--build-arg", "PIP_SOURCE=https://bob:hunter2@mirror/simple", "--build-arg=A_KEY=open5ame"]
    shown = ImageRecipe("name", [], ["podman", "build", *given, "."]).command
    masked = "--build-arg 'PIP_SOURCE=https://(left out)@mirror/simple' '--build-arg=A_KEY=(left out)'"
    assert shown == f"podman build {masked} ."
