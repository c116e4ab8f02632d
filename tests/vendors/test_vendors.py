"""The vendors that AccelMark describes: chips, recipes of images, and devices for each framework.

Chips are distinguished by the names that their tools print. Their peaks add up: the products are units x operations of
a unit in a clock x clock, with the numbers of the makers' architecture papers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from accelmark.run.preflight.checks import RANK_NEEDS
from accelmark.spec.errors import RequestError
from accelmark.spec.plugins import catalog
from accelmark.spec.plugins.catalog import folders, framework_device, frameworks_of, load_case, load_vendor
from accelmark.spec.plugins.requirements import requirement_texts
from accelmark.spec.plugins.vendor import Chip
from accelmark.telemetry.forms import telemetry_of

NVIDIA = [
    ("NVIDIA H100 80GB HBM3", "H100", "SXM", 989.4, 1978.9), ("NVIDIA H100 PCIe", "H100", "PCIe", 756, 1513),
    ("NVIDIA H100 NVL", "H100", "NVL", 835.5, 1670.5), ("NVIDIA H200", "H200", "SXM", 989.4, 1978.9),
    ("NVIDIA H200 NVL", "H200", "NVL", 835.5, 1670.5), ("NVIDIA H800", "H800", "SXM", 989.5, 1979),
    ("NVIDIA H800 PCIe", "H800", "PCIe", 756, 1513), ("NVIDIA H20", "H20", "", 148, 296),
    ("NVIDIA A100-SXM4-40GB", "A100", "SXM-40GB", 312, None), ("NVIDIA A100-SXM4-80GB", "A100", "SXM-80GB", 312, None),
    ("A100-SXM4-40GB", "A100", "SXM-40GB", 312, None), ("NVIDIA A100-PCIE-40GB", "A100", "PCIe-40GB", 312, None),
    ("NVIDIA A100 80GB PCIe", "A100", "PCIe-80GB", 312, None), ("NVIDIA A800-SXM4-80GB", "A800", "SXM-80GB", 312, None),
    ("NVIDIA A800 80GB PCIe", "A800", "PCIe-80GB", 312, None), ("Tesla V100-SXM2-32GB", "V100", "SXM2", None, None),
    ("Tesla T4", "T4", "", None, None), ("NVIDIA A10", "A10", "", 125, None), ("NVIDIA L40S", "L40S", "", 362.05, 733),
    ("NVIDIA L40", "L40", "", 181.05, 362), ("NVIDIA B200", "B200", "SXM", 2250, 4500),
    ("NVIDIA L4", "L4", "", 121, 242.5),
]  # fmt: skip
"""Name as nvidia-smi prints it, chip, variant, dense bf16 and fp8 in TFLOP/s."""

UNKNOWN = [
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA A10G", "NVIDIA A100X",
    "NVIDIA H20-3e", "NVIDIA H100", "NVIDIA A800 40GB Active", "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D", "NVIDIA L40G", "Tesla V100-DGXS-32GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "",
]  # fmt: skip


@pytest.mark.parametrize(("name", "chip", "variant", "bf16", "fp8"), NVIDIA)
def test_nvidias_chips_are_distinguished_by_their_nvidia_smi_names(
    name: str, chip: str, variant: str, bf16: float, fp8: float | None
) -> None:
    found = load_vendor("nvidia").chip_of(name, None)
    assert found is not None
    assert (found.name, found.variant or "", found.peaks.bf16, found.peaks.fp8) == (chip, variant, bf16, fp8)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_slice_or_sibling_with_other_rates_is_not_matched(name: str) -> None:
    assert load_vendor("nvidia").chip_of(name, None) is None


ARITHMETIC = [
    # vendor, name, variant, precision, units, operations of a unit in a clock, clock in GHz
    ("nvidia", "H100", "SXM", "bf16", 132, 4096, 1.830), ("nvidia", "H100", "SXM", "fp8", 132, 8192, 1.830),
    ("nvidia", "H100", "SXM", "tf32", 132, 2048, 1.830), ("nvidia", "H100", "SXM", "fp32", 132, 256, 1.980),
    ("nvidia", "H100", "PCIe", "bf16", 114, 4096, 1.620), ("nvidia", "H100", "PCIe", "fp32", 114, 256, 1.755),
    ("nvidia", "H200", "SXM", "bf16", 132, 4096, 1.830), ("nvidia", "GH200", "96GB", "bf16", 132, 4096, 1.830),
    ("nvidia", "H800", "SXM", "bf16", 132, 4096, 1.830), ("nvidia", "A100", "SXM-80GB", "bf16", 108, 2048, 1.410),
    ("nvidia", "A100", "SXM-80GB", "tf32", 108, 1024, 1.410), ("nvidia", "A100", "SXM-80GB", "fp32", 108, 128, 1.410),
    ("nvidia", "A100", "SXM-80GB", "int8", 108, 4096, 1.410), ("nvidia", "A800", "PCIe-80GB", "bf16", 108, 2048, 1.410),
    ("nvidia", "A30", "", "bf16", 56, 2048, 1.440), ("nvidia", "A40", "", "bf16", 84, 1024, 1.740),
    ("nvidia", "A10", "", "bf16", 72, 1024, 1.695), ("nvidia", "L40", "", "bf16", 142, 512, 2.490),
    ("nvidia", "L4", "", "bf16", 58, 1024, 2.040), ("nvidia", "V100", "SXM2", "fp16", 80, 1024, 1.530),
    ("nvidia", "T4", "", "fp16", 40, 1024, 1.590), ("nvidia", "RTX4090", "", "bf16", 128, 512, 2.520),
    ("nvidia", "RTX3090", "", "bf16", 82, 512, 1.695), ("amd", "MI355X", "", "bf16", 256, 4096, 2.400),
    ("amd", "MI325X", "", "bf16", 304, 2048, 2.100), ("amd", "MI300X", "", "bf16", 304, 2048, 2.100),
    ("amd", "MI300X", "", "fp8", 304, 4096, 2.100), ("amd", "MI250X", "one die", "bf16", 110, 1024, 1.700),
    ("amd", "MI250", "one die", "bf16", 104, 1024, 1.700), ("amd", "MI210", "", "bf16", 104, 1024, 1.700),
    ("amd", "MI100", "", "fp16", 120, 1024, 1.502), ("intel", "Max1550", "", "bf16", 128, 4096, 1.600),
    ("intel", "Max1100", "", "bf16", 56, 4096, 1.550),
]  # fmt: skip


def chip_named(vendor: str, name: str, variant: str) -> Chip:
    (chip,) = (one for one in load_vendor(vendor).chips if (one.name, one.variant or "") == (name, variant))
    return chip


@pytest.mark.parametrize(("vendor", "name", "variant", "precision", "units", "operations", "clock_ghz"), ARITHMETIC)
def test_a_peak_is_derived_from_units_and_clock(
    vendor: str, name: str, variant: str, precision: str, units: int, operations: int, clock_ghz: float
) -> None:
    stated = getattr(chip_named(vendor, name, variant).peaks, precision)
    assert stated == pytest.approx(units * operations * clock_ghz / 1000, rel=0.005)


@pytest.mark.parametrize("name", folders("vendors"))
def test_every_vendor_has_all_that_a_vendor_needs(name: str) -> None:
    spec, folder = load_vendor(name), folders("vendors")[name]
    telemetry_of(spec, name)
    assert (folder.path / "README.md").read_text().startswith("# ")
    for image in folder.path.glob("images/*"):
        assert (image / "Dockerfile").is_file()
    names = [(chip.name, chip.variant) for chip in spec.chips]
    assert len(set(names)) == len(names)
    for chip in spec.chips:
        assert len(chip.source) > 10, chip.name
        plain = chip.device_name.replace("(NVIDIA )?", "NVIDIA ").replace("\\", "")
        assert len([other for other in spec.chips if other.matches(plain, 40.0)]) <= 1, plain
        peaks = {name: peak for name, peak in chip.peaks.model_dump().items() if peak is not None}
        assert all(peak > 0 and peak not in (1.0, 999.0) for name, peak in peaks.items() if name != "fp64")
        order = [peaks[name] for name in ("fp32", "tf32", "fp16", "fp8") if name in peaks]
        assert order == sorted(order), "no peak is larger than that of a smaller type"
    is_unready = name in ("zixiao", "hexaflake")
    assert (bool(spec.cannot_run), not spec.frameworks, spec.uses_host_cpu) == (is_unready, is_unready, name == "cpu")
    assert is_unready or framework_device(spec, "pytorch").collective_backend


@pytest.mark.parametrize(("memory_gib", "chip"), [(128.0, "Max1550"), (64.0, None), (None, None)])
def test_half_an_intel_card_does_not_get_the_whole_cards_peak(memory_gib: float | None, chip: str | None) -> None:
    vendor = load_vendor("intel")
    found = vendor.chip_of("Intel(R) Data Center GPU Max 1550", memory_gib)
    assert (found.name if found else None) == chip
    assert vendor.environment["ZE_FLAT_DEVICE_HIERARCHY"] == "COMPOSITE"


RECIPES = sorted(
    file.parent for folder in folders("vendors").values() for file in folder.path.glob("images/*/Dockerfile")
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.parts[-3]}-{recipe.name}")
def test_a_recipe_installs_what_ranks_and_cases_need(recipe: Path) -> None:
    framework = recipe.name
    texts = [need.requirement for need in RANK_NEEDS]
    for case in map(load_case, folders("cases")):
        if framework in frameworks_of(case):
            texts += requirement_texts(case.requires_for(framework))
    needs = [need for need in map(Requirement, texts) if need.marker is None or need.marker.evaluate()]
    needed = {need.name for need in needs} - {"torch"}
    content = "".join(file.read_text() for file in recipe.iterdir())
    assert needed - set(re.findall(r"[A-Za-z][\w-]*", content)) == set()
    if "BASE_IMAGE" in content:
        assert re.search(r"^# (Source|Tags): .*https?://.*, (read on )?\d{4}-\d\d-\d\d", content, re.MULTILINE)
        assert re.search("^# .*(PyTorch|torch)", content, re.MULTILINE), "the version of the framework"


HEAD = "name: acme\ntitle: Acme\nvisible_devices_env: null\nchips: []\n"


def test_a_framework_that_a_vendor_does_not_declare_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vendors" / "acme"
    folder.mkdir(parents=True)
    (folder / "vendor.yaml").write_text(f"{HEAD}frameworks:\n  jax: {{device_type: acme, collective_backend: accl}}\n")
    monkeypatch.setenv(catalog.PLUGINS_VARIABLE, str(tmp_path))
    catalog.look_again()
    with pytest.raises(RequestError, match=r"acme declares no device for framework 'pytorch' \(declared: jax\)"):
        framework_device(load_vendor("acme"), "pytorch")


def test_a_framework_may_declare_the_device_of_a_vendor_that_does_not_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "frameworks" / "bare"
    folder.mkdir(parents=True)
    (folder / "framework.yaml").write_text(
        "name: bare\ntitle: Bare\nmodule: bare\ndistributions: [bare]\nprocesses: device\ntiming: window\n"
        "devices:\n  cpu: {device_type: cpu, collective_backend: sockets}\n"
    )
    monkeypatch.setenv(catalog.PLUGINS_VARIABLE, str(tmp_path))
    catalog.look_again()
    assert framework_device(load_vendor("cpu"), "bare").collective_backend == "sockets"
