from __future__ import annotations

import pytest
from hypothesis import strategies as st

from accelmark.spec.errors import SpecError
from accelmark.spec.layers import Layer, may_change, resolve
from accelmark.spec.model import parse
from accelmark.spec.plugins.case import MUTABLE_GROUPS, TrainCaseSpec

BASE = Layer.of(
    "case.yaml", {"batch_size": 8, "end": {"max_steps": 10}, "optimizer": {"lr": 0.1}, "model": {"width": 4, "p": 0.5}}
)

words = st.text(st.characters(categories=["Ll"]), min_size=1, max_size=5)


def test_the_strongest_layer_wins_and_every_value_remembers_where_it_came_from() -> None:
    resolved = resolve(
        BASE,
        [Layer("vendor", {"batch_size": 16}), Layer("command line", {"batch_size": 32})],
        mutable=["batch_size"],
        is_open=False,
    )
    assert resolved.settings.batch_size == 32
    provenance = resolved.provenance["batch_size"]
    assert (provenance.value, provenance.layer) == (32, "command line")
    assert provenance.replaced == (("case.yaml", 8), ("vendor", 16))
    assert resolved.provenance["optimizer.momentum"].layer == "default"


def test_changing_what_the_case_fixes_is_an_error_that_names_the_layer() -> None:
    with pytest.raises(SpecError) as caught:
        resolve(BASE, [Layer("vendors/acme/config.yaml", {"optimizer.lr": 0.2})], mutable=["batch_size"], is_open=False)
    assert "vendors/acme/config.yaml: optimizer.lr: is not mutable" in str(caught.value)


def test_an_open_run_may_change_it_and_is_marked() -> None:
    resolved = resolve(BASE, [Layer("command line", {"optimizer.lr": 0.2})], mutable=[], is_open=True)
    assert resolved.settings.optimizer.lr == 0.2
    assert resolved.provenance["optimizer.lr"].forced


def test_all_problems_of_all_layers_are_reported_at_once_with_the_nearest_name() -> None:
    layers = [
        Layer("vendor", {"bach_size": 1, "model.width": "wide"}),
        Layer("command line", {"batch_size": -1, "precision": "fp12"}),
    ]
    with pytest.raises(SpecError) as caught:
        resolve(BASE, layers, mutable=["batch_size", "precision", "model"], is_open=False)
    text = str(caught.value)
    assert "vendor: bach_size: unknown setting (did you mean 'batch_size'?)" in text
    assert "vendor: model.width: must be int" in text
    assert "command line: batch_size" in text
    assert "command line: precision" in text


def test_synthetic_data_is_allowed_everywhere_because_it_marks_the_run() -> None:
    assert may_change("loader.synthetic", [])
    assert may_change("loader.num_workers", ["loader"])
    assert not may_change("loaders", ["loader"])


def test_a_case_names_groups_of_mutable_settings_and_its_tokens_are_those_of_a_sequence() -> None:
    train = {"unit": "token", "settings": {"batch_size": 1}, "mutable": ["batch", "channels_last", "execution"]}
    case = parse(TrainCaseSpec, train, "case.yaml")
    assert case.mutable == (*MUTABLE_GROUPS["batch"], "channels_last", *MUTABLE_GROUPS["execution"])
    assert may_change("optimizer.fused", case.mutable)
    assert not may_change("optimizer.lr", case.mutable)
    assert case.units_per_sample_key == "seq_length"
    assert parse(TrainCaseSpec, {**train, "units_per_sample": 7}, "case.yaml").units_per_sample_key is None
    assert parse(TrainCaseSpec, {**train, "unit": "image"}, "case.yaml").units_per_sample_key is None
    with pytest.raises(SpecError, match=r"names 'exection', which is no setting .*'execution'"):
        parse(TrainCaseSpec, {**train, "mutable": ["exection"]}, "case.yaml")
