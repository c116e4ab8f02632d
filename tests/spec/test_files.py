from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accelmark.spec.errors import SpecError
from accelmark.spec.key import CaseKey
from accelmark.spec.model import parse, read_yaml
from accelmark.spec.plugins.catalog import case_hash, folders, load_case, load_vendor, tree_hash
from accelmark.spec.runfile import RunSpec
from accelmark.spec.secret import is_secret, secrets_in, shown, without_userinfo


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: 1\na: 2\n", "line 2, column 1: is not valid YAML: duplicate key 'a'"),
        ("a: [1\n", "line 2, column 1"),
        ("- 1\n", "must be a mapping, found list"),
        ("a: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
    ],
)
def test_a_bad_file_is_named_with_its_place(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(content)
    with pytest.raises(SpecError) as caught:
        read_yaml(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_unknown_keys_of_a_run_file_come_all_at_once_with_suggestions() -> None:
    written = {"nam": "x", "cases": [{"key": "a", "setings": {}}], "cluster": {"hosts": [{"adress": "h"}]}}
    with pytest.raises(SpecError) as caught:
        parse(RunSpec, written, "run.yaml")
    for known in ("nam: unknown key (did you mean 'name'?)", "'settings'?", "'address'?"):
        assert known in str(caught.value)


def test_two_vendors_with_one_name_and_a_folder_with_another_name_than_its_file_are_refused(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    (other / "vendors" / "acme").mkdir(parents=True)
    (other / "vendors" / "acme" / "vendor.yaml").write_text("name: acme\n")
    monkeypatch.setenv("ACCELMARK_PLUGINS", f"{plugins}:{other}")
    with pytest.raises(SpecError, match=rf"(?s){other}.*{plugins}"):
        folders("vendors")
    (plugins / "cases" / "toy").rename(plugins / "cases" / "tory")
    with pytest.raises(SpecError, match="is 'toy', but the folder is 'tory'"):
        load_case("tory")


def test_a_chip_is_matched_by_its_whole_name_only(plugins: Path) -> None:
    vendor = load_vendor("acme")
    card = vendor.chip_of("ACME X1 card", 32.0)
    assert card is not None
    assert card.variant == "Card"
    assert vendor.chip_of("Acme X1", 80.0) is None
    assert vendor.chip_of("Acme X1", None) is None
    assert vendor.chip_of("Acme X2", 32.0) is None


def test_the_hash_of_a_folder_sees_every_byte_and_name_but_no_caches_and_of_a_vendors_also_readmes_and_links(
    plugins: Path,
) -> None:
    folder = plugins / "cases" / "toy"
    before = tree_hash(folder)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"x")
    (folder / "README.md").write_text("| accuracy | 0.97 |\n")  # tables of results are written into it anew
    assert tree_hash(folder) == before
    linked = plugins / "linked"
    linked.mkdir()
    (folder / "more").symlink_to(linked)
    (linked / "code.py").write_text("1")
    assert tree_hash(folder) == before
    whole = tree_hash(folder, whole=True)
    (linked / "code.py").write_text("2")
    assert len({before, whole, tree_hash(folder, whole=True)}) == 3
    (folder / "pytorch.py").write_text("#")
    changed = tree_hash(folder)
    (folder / "pytorch.py").rename(folder / "jax.py")
    assert len({before, changed, tree_hash(folder)}) == 3


def test_the_hash_of_training_is_independent_of_inference_and_serving_alone(plugins: Path) -> None:
    folder = plugins / "cases" / "toy"
    described = folder / "case.yaml"
    text = described.read_text()
    train, infer = case_hash(folder, "train"), case_hash(folder, "infer")
    described.write_text(f"{text}infer: {{metric: accuracy}}\nserve: {{}}\n")
    for name in ("infer_pytorch.py", "serve.py"):
        (folder / name).write_text("#")
    (folder / "infer").mkdir()
    (folder / "infer" / "weights.safetensors").write_bytes(b"x")
    assert case_hash(folder, "train") == train
    assert case_hash(folder, "infer") != infer
    described.write_text(text.replace("version: 1", "version: 2"))
    assert case_hash(folder, "train") != train
    described.write_text("infer: &settings {lr: 1.0}\ntrain: *settings\n")
    aliased = case_hash(folder, "train")
    described.write_text("infer: &settings {lr: 2.0}\ntrain: *settings\n")
    assert case_hash(folder, "train") != aliased
    for damaged in (b"a: [", b"- 1", b"\xff"):
        described.write_bytes(damaged)
        assert case_hash(folder, "train") != train


def test_a_single_word_is_a_case_and_a_path_is_a_cluster_file() -> None:
    run = parse(RunSpec, {"cases": ["resnet_mini:pytorch:CPU:1:1"], "cluster": "cluster.yaml"}, "run.yaml")
    assert run.cases[0].key == "resnet_mini:pytorch:CPU:1:1"
    assert run.cluster == Path("cluster.yaml")


names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9.+-]{0,8}\Z")


@given(names, names, names, st.integers(1, 999), st.integers(1, 64), st.integers(1, 9))
def test_a_key_reads_back_as_it_was_written(
    model: str, framework: str, hardware: str, nnodes: int, nproc: int, repeat: int
) -> None:
    text = f"{model}:{framework}_1.8:{hardware}:{nnodes}:{nproc}:{repeat}"
    key = CaseKey.parse(text, hardware="CPU")
    assert str(key) == text
    assert (key.framework, key.framework_version, key.world_size) == (framework, "1.8", nnodes * nproc)


def test_parts_left_out_take_their_defaults_and_every_wrong_part_is_named() -> None:
    assert str(CaseKey.parse("resnet_mini", hardware="H100")) == "resnet_mini:pytorch:H100:1:1:1"
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a @ https://bob:h@nter2@host/x@y and b@c", "a @ https://(left out)@host/x@y and b@c"),
        ("git+https://token@host", "git+https://(left out)@host"),
        ("git+ssh://git@host/x ssh://u:p@host", "git+ssh://git@host/x ssh://(left out)@host"),
        ("https://host/simple?a=b@c https://(left out)@host", "https://host/simple?a=b@c https://(left out)@host"),
        (r'"https://host\nsomebody@host"', r'"https://host\nsomebody@host"'),
    ],
)
def test_only_the_user_part_of_an_address_is_left_out(text: str, expected: str) -> None:
    assert without_userinfo(text) == expected


def test_secret_names_are_recognised() -> None:
    assert all(map(is_secret, ("HF_TOKEN", "aws_secret_access_key", "PGPASSWORD", "MY_AUTH")))
    assert not any(map(is_secret, ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "AUTHOR")))


def test_secrets_are_found_and_replaced_everywhere() -> None:
    plan = {"environment": {"A_KEY": "sesame", "B_KEY": "true", "N": "1"}, "options": ["--env=C_TOKEN=tulip"], "n": 1}
    assert set(secrets_in(plan)) == {"sesame", "tulip"}
    expected = {
        "environment": {"A_KEY": "(left out)", "B_KEY": "(left out)", "N": "1"},
        "options": ["--env=C_TOKEN=(left out)"],
        "n": 1,
    }
    assert shown(plan, secrets_in(plan)) == expected


def test_a_list_whose_only_entry_is_wrong_is_not_called_too_short() -> None:
    with pytest.raises(SpecError) as caught:
        parse(RunSpec, {"name": "march", "cases": [{"key": "toy", "synthetic": True}]}, "run.yaml")
    assert [problem.key for problem in caught.value.problems] == ["cases.0.synthetic"]
    with pytest.raises(SpecError, match="cases: needs at least 1 of them"):
        parse(RunSpec, {"name": "march", "cases": []}, "run.yaml")
