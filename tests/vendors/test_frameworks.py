"""Devices of a vendor per framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE, folders, framework_device, load_vendor, look_again

HEAD = "name: acme\ntitle: Acme\nvisible_devices_env: null\nchips: []\n"


def test_every_platform_that_runs_declares_pytorch() -> None:
    for name in folders("vendors"):
        vendor = load_vendor(name)
        assert vendor.cannot_run or framework_device(vendor, "pytorch").collective_backend, name


def test_a_framework_that_a_vendor_does_not_declare_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vendors" / "acme"
    folder.mkdir(parents=True)
    (folder / "vendor.yaml").write_text(f"{HEAD}frameworks:\n  jax: {{device_type: acme, collective_backend: accl}}\n")
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path))
    look_again()
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
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path))
    look_again()
    assert framework_device(load_vendor("cpu"), "bare").collective_backend == "sockets"
