"""What a node agent records so that others can check it: environment, clocks, data, bytecode."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import marshal
import os
import shutil
import site
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

import accelmark
from accelmark.run.agent.file_watch import BytecodeCheck, FileWatch, LogEvents
from accelmark.run.agent.host import UNWATCHED, environment_record, start_files
from accelmark.run.agent.task import AgentTask
from accelmark.run.controller.data import DataFetcher
from accelmark.spec.errors import DataError
from accelmark.spec.job import JobSpec
from accelmark.spec.log.records import AdaptationRecord, EnvironmentRecord
from accelmark.spec.plugins.catalog import SKIPPED, is_hashed, load_framework
from accelmark.spec.plugins.framework import module_command
from tests.cases.infer_of import job_of
from tests.cases.job_of import job_of as job_file

OURS = str(Path(accelmark.__file__).parents[1])


def recorded(node: Path, ambient: dict[str, str], script: dict[str, str], cluster: dict[str, str]) -> EnvironmentRecord:
    task = AgentTask(
        run="run", host="here", noderank=0, nnodes=1, nproc=1, num_ranks=1, command=("python",),
        job_file=node / "job.json", environment=cluster,
    )  # fmt: skip
    final = ambient | cluster | script
    record = AdaptationRecord(environment=script)
    return environment_record(task, node, final, ambient, record, load_framework("pytorch"))


@pytest.mark.parametrize(
    ("where", "origin"),
    [(0, "shell"), (1, "environment_variables.sh"), (2, "cluster file or vendor.yaml")],
    ids=["shell", "script", "cluster"],
)
def test_loaders_and_numeric_switches_are_found_whoever_sets_them(tmp_path: Path, where: int, origin: str) -> None:
    layers: list[dict[str, str]] = [{}, {}, {}]
    layers[where] = {"LD_PRELOAD": "/x/clock.so", "ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "PYTHONPATH": f"{OURS}:/x"}
    record = recorded(tmp_path, *layers)
    assert {name: (one.origin, one.value) for name, one in record.loaders.items()} == {
        "LD_PRELOAD": (origin, "/x/clock.so"),
        "PYTHONPATH": (origin, "/x"),
    }
    assert record.numeric_switches["ONEDNN_DEFAULT_FPMATH_MODE"].value == "BF16"


def test_accelmarks_own_paths_and_harmless_values_are_no_finding_and_private_values_are_not_stored(
    tmp_path: Path,
) -> None:
    own = {"PYTHONPATH": f"{OURS}:{tmp_path / 'site'}", "ONEDNN_DEFAULT_FPMATH_MODE": "strict", "MY_NOTES": "private"}
    record = recorded(tmp_path, own, {}, {"API_TOKEN": "hunter22"})
    assert (record.loaders, record.numeric_switches) == ({}, {})
    assert record.variables["MY_NOTES"].value is None
    assert "hunter22" not in record.model_dump_json()


@pytest.mark.parametrize("library", ["libc.so.6", "libz.so.1"])
def test_a_library_path_is_found_where_it_replaces_a_library_of_pythons_own(tmp_path: Path, library: str) -> None:
    for name in (f"replaced/{library}", "devices/libcuda.so.1"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    shell = {"LD_LIBRARY_PATH": f"{tmp_path / 'devices'}:/usr/lib:{tmp_path / 'replaced'}"}
    assert recorded(tmp_path, shell, {}, {}).loaders["LD_LIBRARY_PATH"].value == str(tmp_path / "replaced")


def test_a_module_in_the_working_directory_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('json.py of the working directory')")
    done = subprocess.run(module_command(sys.executable, "json.tool", "--help"), cwd=tmp_path, check=False)
    assert done.returncode == 0


def test_a_start_file_is_found_unless_it_adds_a_directory_or_belongs_to_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path / "none"))
    (tmp_path / "directory.pth").write_text("/opt/packages\n")
    packaged = "import _hook\n"
    (tmp_path / "packaged.pth").write_text(packaged)
    record = tmp_path / "hook-1.dist-info" / "RECORD"
    record.parent.mkdir()
    digest = base64.urlsafe_b64encode(hashlib.sha256(packaged.encode()).digest()).rstrip(b"=").decode()
    record.write_text(f"packaged.pth,sha256={digest},{len(packaged)}\n")
    assert list(start_files()) == []
    (tmp_path / "slow.pth").write_text("import time; time.time = lambda: 0\n")
    (tmp_path / "packaged.pth").write_text(packaged + "import more\n")
    assert list(start_files()) == [str(tmp_path / "packaged.pth"), str(tmp_path / "slow.pth")]


def test_data_that_is_replaced_or_restored_is_found(tmp_path: Path) -> None:
    file = tmp_path / "train.bin"
    file.write_bytes(b"images")
    watch = FileWatch([tmp_path])
    file.read_bytes()
    assert watch.changed() == ()
    kept = tmp_path / "kept"
    file.rename(kept)
    file.write_bytes(b"labels")
    assert watch.changed() == (str(kept), str(file))
    stamp = kept.stat()
    kept.rename(file)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert watch.changed() == (str(file),)


def test_a_directory_that_is_moved_away_and_back_is_found(tmp_path: Path) -> None:
    images = tmp_path / "cache" / "images"
    (images / "train").mkdir(parents=True)
    (images / "train" / "0.png").write_bytes(b"image")
    (tmp_path / "data").symlink_to("cache/images")
    for moved in (images / "train", images, tmp_path / "cache"):
        watch = FileWatch([tmp_path / "data"])
        (images / "scratch").write_bytes(b"")
        (images / "scratch").unlink()
        (tmp_path / "beside").mkdir(exist_ok=True)
        assert (watch.problem, watch.changed()) == (None, ())
        kept = moved.rename(tmp_path / "kept")
        shutil.copytree(kept, moved)
        shutil.rmtree(moved)
        kept.rename(moved)
        assert any(name.endswith(f"{moved.name}/ (moved)") for name in watch.changed()), watch.changed()


def test_a_readme_which_no_hash_of_a_folder_covers_may_change(tmp_path: Path) -> None:
    assert all(name in SKIPPED or not is_hashed(name) for name in UNWATCHED)
    readme, notes = tmp_path / "README.md", tmp_path / "notes.txt"
    readme.touch()
    watch = FileWatch([tmp_path], UNWATCHED)
    readme.write_text("a table of results\n")
    assert watch.changed() == ()
    notes.touch()
    assert watch.changed() == (str(notes),)


def test_a_link_to_data_that_is_replaced_and_put_back_is_found(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.bin").write_bytes(name.encode())
    link = tmp_path / "data"
    link.symlink_to("good")
    watch = FileWatch([link])
    assert watch.changed() == ()
    kept = link.rename(tmp_path / "kept")
    link.symlink_to("bad")
    link.unlink()
    kept.rename(link)
    assert watch.changed() == (str(link),)


def test_bytecode_of_other_code_with_the_sources_time_and_size_is_found(tmp_path: Path) -> None:
    source = tmp_path / "hooks.py"
    source.write_text("FACTOR = 1\n")
    cached = Path(importlib.util.cache_from_source(str(source)))
    cached.parent.mkdir()
    state = source.stat()

    def write(text: str, mtime: int) -> None:
        header = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, mtime, state.st_size)
        cached.write_bytes(header + marshal.dumps(compile(text, str(source), "exec", dont_inherit=True)))

    write("FACTOR = 1\n", int(state.st_mtime))
    check = BytecodeCheck([tmp_path])
    assert check.found() == ()
    assert check.found() == ()
    write("FACTOR = 2\n", int(state.st_mtime) - 5)  # Python compiles the source again
    assert check.found() == ()
    write("FACTOR = 2\n", int(state.st_mtime))
    assert check.found() == (str(cached),)
    cached.rename(tmp_path / "extra.pyc")
    assert check.found() == (str(tmp_path / "extra.pyc"),)


def test_events_are_timed_when_they_appear_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "rank0.out.log"
    events = LogEvents(log)

    def write() -> None:
        for event in ("TRAIN_START", "TRAIN_END"):
            with log.open("a") as file:
                file.write(f"noise\n[PerfLog] {json.dumps({'event': event})}\n")
            time.sleep(0.3)

    writer, began_s = threading.Thread(target=write), time.monotonic()
    writer.start()
    while writer.is_alive():
        events.look()
        time.sleep(0.01)
    events.look()
    took_s = time.monotonic() - began_s
    span_s = events.seen["TRAIN_END"][1].mono_s - events.seen["TRAIN_START"][0].mono_s
    assert 0.2 < span_s <= took_s
    assert sys.platform != "linux" or events.seen["TRAIN_END"][0].uptime_s is not None


def test_weights_which_no_case_declares_are_recorded(tmp_path: Path) -> None:
    weights = tmp_path / "vit_l_16" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"12345678")
    benchmark = tmp_path / "mmlu"
    benchmark.mkdir()
    job = job_of("vit_l_16", tmp_path, {"weights": weights, "mmlu": benchmark})
    first = DataFetcher()(job, print)
    assert first.keys() == job.data_dirs.keys(), "the rule dataset requires a record of each"
    weights.write_bytes(b"123456789")
    second = DataFetcher()(job, print)
    assert second["weights"].fingerprint != first["weights"].fingerprint
    assert second["mmlu"] == first["mmlu"]


def test_inference_needs_no_part_of_the_data_that_only_training_reads(tmp_path: Path) -> None:
    image = tmp_path / "imagenet" / "val" / "n01440764" / "1.JPEG"
    image.parent.mkdir(parents=True)
    image.write_bytes(b"jpeg")
    data, fetcher = {"imagenet": tmp_path / "imagenet"}, DataFetcher()
    inference = job_of("resnet50", tmp_path, data).model_copy(update={"open": True})
    alone = fetcher(inference, print)["imagenet"]
    training = JobSpec.model_validate_json(job_file("resnet50", tmp_path / "job", data, {}).read_bytes())
    with pytest.raises(DataError, match="expected train/<class>"):
        fetcher(training, print)
    (tmp_path / "imagenet" / "train" / "n01440764").mkdir(parents=True)
    (tmp_path / "imagenet" / "train" / "n01440764" / "2.JPEG").write_bytes(b"jpeg")
    assert fetcher(inference, print)["imagenet"] == alone
    assert fetcher(training, print)["imagenet"] != alone, "the records of a run with both tasks are separate"


def test_many_files_are_verified_with_progress_and_remembered_in_little_memory(tmp_path: Path) -> None:
    folder = tmp_path / "imagenet" / "val" / "n01440764"
    folder.mkdir(parents=True)
    for number in range(2000):
        (folder / f"{number}.JPEG").write_bytes(b"jpeg")
    job = job_of("resnet50", tmp_path, {"imagenet": tmp_path / "imagenet"}).model_copy(update={"open": True})
    reports: list[str] = []
    fetcher = DataFetcher()
    tracemalloc.start()
    record = fetcher(job, reports.append)["imagenet"]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    steps = ("counting the files of", "hashing names and sizes of", "looking for changes in")
    assert [any(f"{step} imagenet" in report for report in reports) for step in steps] == [True] * 3
    assert size < 100 * 2000
    assert fetcher(job, print)["imagenet"] is record
    image = folder / "7.JPEG"
    times = image.stat()
    image.write_bytes(b"gepj")
    os.utime(image, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fetcher(job, print)["imagenet"] is not record
