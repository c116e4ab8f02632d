from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accelmark.spec.errors import SpecError
from accelmark.spec.key import CaseKey

names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9.+-]{0,8}\Z")


@given(names, names, names, st.integers(1, 999), st.integers(1, 64), st.integers(1, 9))
def test_a_key_reads_back_as_it_was_written(
    model: str, framework: str, hardware: str, nnodes: int, nproc: int, repeat: int
) -> None:
    text = f"{model}:{framework}_1.8:{hardware}:{nnodes}:{nproc}:{repeat}"
    key = CaseKey.parse(text, hardware="CPU")
    assert str(key) == text
    assert (key.framework, key.framework_version, key.world_size) == (framework, "1.8", nnodes * nproc)


def test_parts_left_out_take_their_defaults() -> None:
    assert str(CaseKey.parse("resnet_mini", hardware="H100")) == "resnet_mini:pytorch:H100:1:1:1"


def test_every_wrong_part_is_named_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        CaseKey.parse("re/snet:py torch:A100:0:x:1", hardware="CPU", where="run.yaml")
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    assert all(part in text for part in ("run.yaml", "model 're/snet'", "framework", "nnodes '0'", "nproc 'x'"))


@given(st.text(max_size=40))
@example("resnet\n")
def test_no_text_makes_the_parser_crash_or_gives_an_unsafe_directory(text: str) -> None:
    try:
        key = CaseKey.parse(text, hardware="CPU")
    except SpecError:
        return
    assert not set(key.slug) & set("/\\:;|&$` \n\"'*?<>()")
    assert not key.slug.startswith((".", "-"))
