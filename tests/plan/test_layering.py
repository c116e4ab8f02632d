"""Which of a vendor's configuration files apply to a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.plan.adaptation import (
    Capabilities,
    adaptation_files,
    host_capabilities,
    requirements_file,
    vendor_layers,
)
from accelmark.spec.key import CaseKey
from accelmark.spec.plugins.catalog import load_vendor
from accelmark.spec.plugins.vendor import CapabilityFile

KEY = CaseKey(model="toy", framework="pytorch", hardware="X1", nnodes=2, nproc=8)
HERE = Capabilities({"fp8": "vendor.yaml, chip X1", "amx_bf16": "/proc/cpuinfo"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, suffix in enumerate(("", "_amx_bf16", "_fp8", "_int4", "_X1x2x8", "_X1x1x8"), start=1):
        (tmp_path / f"config{suffix}.yaml").write_text(f"batch_size: {number}\n")
    (tmp_path / "infer_fp8.yaml").write_text("batch_size: 7\n")
    return tmp_path


def test_files_of_capabilities_lie_between_the_vendors_file_and_that_of_the_scale(folder: Path) -> None:
    layers, files = vendor_layers([folder], "acme", KEY, HERE, "config")
    names = [layer.name.rpartition("/")[2] for layer in layers]
    assert names == ["config.yaml", "config_amx_bf16.yaml", "config_fp8.yaml", "config_X1x2x8.yaml"]
    assert layers[2].name == f"vendors/acme/cases/{folder.name}/config_fp8.yaml"
    reasons = {file.file.rpartition("/")[2]: file.reason for file in files if not file.applied}
    assert reasons == {
        "config_int4.yaml": "the device is not known to have int4 (known: amx_bf16, fp8)",
        "config_X1x1x8.yaml": "the scale is X1x2x8",
    }
    applied = {file.file.rpartition("/")[2]: file.reason for file in files if file.applied}
    assert applied["config_amx_bf16.yaml"] == "the device has amx_bf16 (/proc/cpuinfo)"


def test_files_may_lie_in_the_folder_config_as_in_flagperf(folder: Path) -> None:
    (folder / "config").mkdir()
    for name in ("config.yaml", "config_X1x2x8.yaml"):
        (folder / name).rename(folder / "config" / name)
    (folder / "config" / "environment_variables.sh").touch()
    (folder / "config" / "requirements.txt").write_text("acme==1.0\n")
    layers, _ = vendor_layers([folder], "acme", KEY, HERE, "config")
    names = [layer.name.rpartition(f"{folder.name}/")[2] for layer in layers]
    assert names == ["config/config.yaml", "config_amx_bf16.yaml", "config_fp8.yaml", "config/config_X1x2x8.yaml"]
    contents = adaptation_files(folder)
    assert contents is not None
    assert (contents.has_environment, contents.requirements) == (True, ("acme==1.0",))
    assert requirements_file(folder) == folder / "config" / "requirements.txt"


def test_a_file_of_an_extension_is_stronger_than_the_vendors_own(folder: Path) -> None:
    extension = folder / "plugins/vendors/acme/cases" / folder.name
    extension.mkdir(parents=True)
    (extension / "config.yaml").write_text("batch_size: 9\n")
    layers, _ = vendor_layers([folder, extension], "acme", KEY, HERE, "config")
    assert layers[-1].values == {"batch_size": 9}
    assert layers[-1].name == f"vendors/acme/cases/{folder.name}/config.yaml in {folder / 'plugins'}"


def test_capabilities_of_a_host_are_read_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx512f amx_bf16 amx_tile\n")
    tests = {
        "amx_bf16": CapabilityFile(file=tmp_path / "cpuinfo", pattern=r"\bamx_bf16\b"),
        "amx_int8": CapabilityFile(file=tmp_path / "cpuinfo", pattern=r"\bamx_int8\b"),
        "sve": CapabilityFile(file=tmp_path / "missing", pattern="sve"),
    }
    vendor = load_vendor("cpu").model_copy(update={"capabilities": tests})
    assert host_capabilities(vendor) == {"amx_bf16": str(tmp_path / "cpuinfo")}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx avx2 f16c", {"avx2", "emulated_bf16"}),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", {"avx2", "avx512_bf16"}),
        ("Features\t: fp asimd sve bf16", set()),
        ("Features\t: fp asimd sve", {"emulated_bf16"}),
    ],
)
def test_a_cpu_without_instructions_for_bf16_emulates_it(flags: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\nbogomips\t: 1\n")
    own = load_vendor("cpu")
    tests = {name: one.model_copy(update={"file": tmp_path / "cpuinfo"}) for name, one in own.capabilities.items()}
    assert set(host_capabilities(own.model_copy(update={"capabilities": tests}))) == expected
