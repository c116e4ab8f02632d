"""Data sets and weights from archives in the layout of the published ones, which here are small."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import py7zr
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from tokenizers import Tokenizer
from transformers import RTDetrResNetBackbone, RTDetrResNetConfig
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.datasets.catalogue import known_datasets, preparation_of, preparations
from accelmark.datasets.prepare import published
from accelmark.datasets.prepare.preparation import Preparation, prepare
from accelmark.datasets.spec import DatasetSpec
from accelmark.frameworks.pytorch.model.hugging_face import load_backbone
from accelmark.spec.errors import DataError
from accelmark.tasks.detection.pytorch import BoxedImages
from accelmark.tasks.images.data import ArrayImages
from accelmark.tasks.language.data import TokenShards
from accelmark.tasks.recommendation.pytorch import ClickLog
from accelmark.tasks.speech.pytorch import Recordings
from accelmark.tasks.text.pytorch import JsonLines, Parallel, Table
from tests.cases.tiny_data import save_indexed, save_tokenizer, tar

SYNSETS = ("n01440764", "n01443537")


def made(name: str, source: Path, to: Path) -> Mapping[str, Path]:
    """Prepare with the hashes of the small archives in place of the published ones."""
    spec, preparation = own(name, source)
    return prepare(spec, preparation, source, to, allow_subset=True)


def own(name: str, source: Path) -> tuple[DatasetSpec, Preparation]:
    spec, preparation = preparation_of(name)
    archives = [
        archive._replace(md5=hashlib.md5((source / archive.name).read_bytes(), usedforsecurity=False).hexdigest())
        for archive in preparation.archives
        if (source / archive.name).is_file()
    ]
    return spec, replace(preparation, archives=archives)


def jpeg(value: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((40, 50, 3), value, np.uint8)).save(stream, "JPEG")
    return stream.getvalue()


@pytest.fixture
def ilsvrc(tmp_path: Path) -> Path:
    """The three archives of ILSVRC 2012 with two classes; the classes' numbers are not in the order of their names."""
    folder = tmp_path / "archives"
    folder.mkdir()
    classes = {
        f"{synset}.tar": tar(
            folder / f"{synset}.tar", {f"{synset}_{number}.JPEG": jpeg(90 * label) for number in (7, 10026)}
        )
        for label, synset in enumerate(SYNSETS)
    }
    for name in classes:
        (folder / name).unlink()
    tar(folder / published.IMAGENET_TRAIN, classes)
    tar(folder / published.IMAGENET_VAL, {f"ILSVRC2012_val_{number:08}.JPEG": jpeg(number) for number in (1, 2, 3)})
    row = [("ILSVRC2012_ID", "f8"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "f8")]
    rows = np.array(
        [(1, SYNSETS[1], "goldfish", "", 0), (2, SYNSETS[0], "tench", "", 0), (1001, "n00001740", "entity", "", 2)], row
    )
    stream: Any = io.BytesIO()
    savemat(stream, {"synsets": rows.reshape(-1, 1)})
    answers = b"2\n1\n1\n"
    kit = {"data/meta.mat": stream.getvalue(), "data/ILSVRC2012_validation_ground_truth.txt": answers}
    tar(folder / published.IMAGENET_KIT, {f"ILSVRC2012_devkit_t12/{name}": content for name, content in kit.items()})
    return folder


def test_imagenet_is_sorted_by_class_with_the_development_kit(tmp_path: Path, ilsvrc: Path) -> None:
    to = tmp_path / "imagenet"
    assert len(made("imagenet", ilsvrc, to)) == 3
    found = sorted(path.relative_to(to).as_posix() for path in to.rglob("*.JPEG"))
    assert found == [
        *(f"train/{synset}/{synset}_{number}.JPEG" for synset in SYNSETS for number in (10026, 7)),
        "val/n01440764/ILSVRC2012_val_00000001.JPEG",
        "val/n01443537/ILSVRC2012_val_00000002.JPEG",
        "val/n01443537/ILSVRC2012_val_00000003.JPEG",
    ]
    images = ArrayImages(to, "train", num_classes=2, size=8, train=False)
    assert images.read(3, np.random.default_rng(0))["label"] == 1
    assert not list(to.rglob("*.part"))


def test_an_interrupted_preparation_continues_after_the_last_class(tmp_path: Path, ilsvrc: Path) -> None:
    to = tmp_path / "imagenet"
    whole = (ilsvrc / published.IMAGENET_TRAIN).read_bytes()
    (ilsvrc / published.IMAGENET_TRAIN).write_bytes(whole[:12_000])
    with pytest.raises(
        DataError, match=rf"{published.IMAGENET_TRAIN}.* tar archive; download it again: unexpected end of data"
    ):
        made("imagenet", ilsvrc, to)
    begun, first = to / ".train.part", to / "train" / SYNSETS[0]
    before = (begun / SYNSETS[0]).stat()
    assert [path.name for path in begun.iterdir() if not path.name.startswith(".")] == [SYNSETS[0]]
    (ilsvrc / published.IMAGENET_TRAIN).write_bytes(whole)
    made("imagenet", ilsvrc, to)
    assert first.stat().st_ino == before.st_ino
    assert len(list(to.glob("train/*/*.JPEG"))) == 4


def test_another_archive_than_the_published_one_is_refused_before_anything_is_unpacked(
    tmp_path: Path, ilsvrc: Path
) -> None:
    spec, preparation = preparation_of("imagenet")
    with pytest.raises(
        DataError, match=rf"{published.IMAGENET_VAL}: has MD5 \w+, .*29b22e2961454d5413ddabcf34fc5622"
    ) as caught:
        prepare(spec, preparation, ilsvrc, tmp_path / "to")
    assert published.IMAGENET_TRAIN in str(caught.value), "all damaged archives are named at once"
    assert not list((tmp_path / "to").iterdir())


def test_validation_images_alone_are_enough_for_inference(tmp_path: Path, ilsvrc: Path) -> None:
    (ilsvrc / published.IMAGENET_TRAIN).unlink()
    made("imagenet", ilsvrc, tmp_path / "to")
    assert len(list((tmp_path / "to").glob("val/*/*.JPEG"))) == 3


def test_librispeech_is_unpacked_by_subset(tmp_path: Path) -> None:
    text = "".join(f"19-198-{number:04} SOME WORDS\n" for number in range(2))
    for subset in ("train-clean-100", "train-clean-360", "test-clean"):
        chapter = f"LibriSpeech/{subset}/19/198"
        recordings = {f"{chapter}/19-198-{number:04}.flac": b"fLaC" + bytes(number) for number in range(2)}
        files = {"LibriSpeech/README.TXT": b"text", **recordings, f"{chapter}/19-198.trans.txt": text.encode()}
        tar(tmp_path / f"{subset}.tar.gz", files)
    to = tmp_path / "librispeech"
    assert sorted(made("librispeech", tmp_path, to)) == [
        "test-clean.tar.gz", "train-clean-100.tar.gz", "train-clean-360.tar.gz"
    ]  # fmt: skip
    assert len(Recordings(to, ["train-clean-100", "train-clean-360", "test-clean"])) == 6


def test_wmt14_is_parallel_text_with_a_tokenizer(tmp_path: Path) -> None:
    for name, stem in published.CORPORA.items():
        english, german = b"one \xe2\x80\xa8two\ntwo\nthree\r\n", b"eins\n\ndrei\n"
        tar(tmp_path / name, {f"training/{stem}.en": english, f"training/{stem}.de": german})
    segments = "".join(f'<seg id="{number}">A &amp; {number}</seg>\n' for number in range(3003))
    sides = ("newstest2014-deen-src.en.sgm", "newstest2014-deen-ref.de.sgm")
    tar(tmp_path / published.NEWSTEST, {f"test-full/{name}": f"<doc>{segments}</doc>".encode() for name in sides})
    to = tmp_path / "wmt14"
    made("wmt14", tmp_path, to)
    train = Parallel([to / "train/text.en", to / "train/text.de"])
    assert [train.row(index) for index in range(len(train))] == [
        ("one \u2028two", "eins"),  # no end of a line
        ("three", "drei"),
    ] * 3
    test = Parallel([to / "test/text.en", to / "test/text.de"])
    assert (len(test), test.row(3)) == (3003, ("A & 3", "A & 3"))
    assert (to / "tokenizer/tokenizer.json").is_file()


def test_cnn_dailymail_is_articles_with_their_highlights(tmp_path: Path) -> None:
    addresses = {"train": ["http://a/1", "http://a/2"], "val": ["http://b/1"]}
    names = {url: hashlib.sha1(url.encode()).hexdigest() for urls in addresses.values() for url in urls}  # noqa: S324
    for split, urls in addresses.items():
        (tmp_path / published.LISTS[split]).write_text("\n".join(urls) + "\n")
    story = 'First line\n\nHe said: "Yes."\n\n@highlight\n\nOne\n\n@highlight\n\nTwo!\n'
    paths = {url: f"cnn/stories/{name}.story" for url, name in names.items()}
    tar(tmp_path / published.STORIES[0], {paths["http://a/1"]: story.encode(), paths["http://b/1"]: b"Text."})
    tar(tmp_path / published.STORIES[1], {"dailymail/stories/0.story": b"in no list"})
    with pytest.raises(DataError, match=rf"lack 1 stories of all_train\.txt, for example {names['http://a/2']}"):
        made("cnn_dailymail", tmp_path, tmp_path / "to")
    assert not (tmp_path / "to" / "train").exists()
    tar(tmp_path / published.STORIES[1], {paths["http://a/2"]: "Zweiter\u201d".encode()})
    made("cnn_dailymail", tmp_path, tmp_path / "to")
    rows = JsonLines(tmp_path / "to/train/train.jsonl", ["article", "highlights"])
    assert [rows.row(index) for index in range(len(rows))] == [
        ('First line . He said: "Yes."', "One .\nTwo!"),
        ("Zweiter\u201d", ""),
    ]
    assert len(JsonLines(tmp_path / "to/val/val.jsonl", ["article"])) == 1


def test_samsum_has_the_published_number_of_dialogues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "SAMSUM_DIALOGUES", {"train.json": 2, "val.json": 1, "test.json": 1})
    entry = {"id": "1", "dialogue": "A: hi\r\nB: hi", "summary": "A greets B."}

    def pack(train: int) -> None:
        with py7zr.SevenZipFile(tmp_path / published.SAMSUM, "w") as archive:
            for split, number in (("train", train), ("val", 1), ("test", 1)):
                archive.writestr(json.dumps([entry] * number), f"{split}.json")

    pack(1)
    with pytest.raises(DataError, match=r"train\.json has 1 dialogues instead of 2"):
        made("samsum", tmp_path, tmp_path / "other")
    pack(2)
    made("samsum", tmp_path, tmp_path / "to")
    assert json.loads((tmp_path / "to/corpus/train.json").read_text()) == [entry, entry]
    (tmp_path / published.SAMSUM).write_bytes((tmp_path / published.SAMSUM).read_bytes()[:-20])
    with pytest.raises(DataError, match=r"corpus\.7z: is not a readable 7z archive"):
        made("samsum", tmp_path, tmp_path / "other")


def test_sst2_is_unpacked_as_the_case_reads_it(tmp_path: Path) -> None:
    table = b"sentence\tlabel\na good film\t1\n"
    zipped(tmp_path / published.SST2, {f"SST-2/{split}.tsv": table for split in ("train", "dev", "test")})
    made("sst2", tmp_path, tmp_path / "to")
    assert Table(tmp_path / "to/SST-2/train.tsv", ["sentence", "label"]).row(0) == ("a good film", "1")


def test_lambada_is_novels_as_tokens_and_passages(tmp_path: Path) -> None:
    novels = {"train-novels/Romance/1.txt": b"the cat sat", "train-novels/a/2.txt": b"a"}
    files = {
        published.NOVELS: tar(tmp_path / published.NOVELS, novels),
        published.PASSAGES: "the cat sat on the mat\nthe d\u00f4g sat\n".encode(),
    }
    tar(tmp_path / published.LAMBADA, {f"lambada-dataset/{name}": content for name, content in files.items()})
    save_tokenizer(tmp_path / published.GPT2_TOKENIZER, ["the cat sat on the mat"], [published.GPT2_END])
    to = tmp_path / "to"
    made("lambada", tmp_path, to)
    tokenizer = Tokenizer.from_file(str(to / "tokenizer/tokenizer.json"))
    end = [tokenizer.token_to_id(published.GPT2_END)]
    tokens = [*tokenizer.encode("the cat sat").ids, *end, *tokenizer.encode("a").ids, *end]
    assert TokenShards(to, "train", len(tokens), 1, 100).window(0).tolist() == tokens
    passages = JsonLines(to / "val/test.jsonl", ["text"])
    assert [passages.row(index) for index in range(len(passages))] == [
        ("the cat sat on the mat",),
        ("the d\u00f4g sat",),
    ]


def test_every_data_set_says_how_it_is_obtained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELMARK_CACHE", str(tmp_path))
    known = {each.spec.name: each for each in known_datasets()}
    assert known["fashion_mnist"].obtained == "fetched when needed"
    assert known["imagenet"].obtained == "prepared from archives"
    assert {"resnet50", "swin", "vit_l_16"} <= set(known["imagenet"].cases)
    assert known["ade20k"].obtained == "by hand"
    assert preparations().keys() <= set(known)
    assert all(each.spec.how_to_get for each in known.values())


def test_the_command_prepares_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ilsvrc: Path) -> None:
    monkeypatch.setenv("ACCELMARK_CACHE", str(tmp_path / "cache"))
    listed = CliRunner().invoke(app, ["data", "list", "--json"])
    assert listed.exit_code == 0, listed.output
    found = {row["name"]: row for row in json.loads(listed.stdout)}
    assert found["fashion_mnist"]["bytes"] == 54_950_048
    assert "fetched when needed" in CliRunner().invoke(app, ["data", "list"]).stdout
    shown = CliRunner().invoke(app, ["data", "list", "imagenet"]).stdout
    assert all(text in shown for text in ("licence: ImageNet terms", "how to get it: Ask for access", "layout: train/"))
    one = json.loads(CliRunner().invoke(app, ["data", "list", "imagenet", "--json"]).stdout)
    assert one == found["imagenet"]
    assert "did you mean 'imagenet'?" in str(CliRunner().invoke(app, ["data", "list", "imagnet"]).exception)
    words = ["data", "prepare", "imagenet", "--from", str(ilsvrc), "--to", str(tmp_path / "to")]
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, DataError), "the archives are not the published ones"
    monkeypatch.setattr("accelmark.datasets.catalogue.preparation_of", lambda name: whole(name, ilsvrc))
    prepared = CliRunner().invoke(app, words)
    assert prepared.exit_code == 0, prepared.output
    assert f"ImageNet-1k (ILSVRC 2012) is in {tmp_path / 'to'}" in prepared.stdout
    assert "verifying archives" in prepared.stderr


def whole(name: str, source: Path) -> tuple[DatasetSpec, Preparation]:
    """Return the data set without the numbers of the published one."""
    spec, preparation = own(name, source)
    parts = tuple(part.model_copy(update={"classes": 2, "files": None}) for part in spec.tree)
    return spec.model_copy(update={"tree": parts}), preparation


def zipped(path: Path, files: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def test_coco_has_its_images_and_boxes(tmp_path: Path) -> None:
    """Of two training images one has no box."""
    folder, to = tmp_path / "archives", tmp_path / "coco"
    folder.mkdir()
    files = {}
    for split, numbers in (("train2017", (1, 2)), ("val2017", (3,))):
        images = [{"id": number, "file_name": f"{number:012}.jpg", "width": 50, "height": 40} for number in numbers]
        box = {"id": 9, "image_id": numbers[0], "category_id": 5, "bbox": [1, 2, 30, 20], "iscrowd": 0}
        content = {"images": images, "annotations": [box], "categories": [{"id": 5}]}
        files[f"annotations/instances_{split}.json"] = json.dumps(content).encode()
        zipped(folder / f"{split}.zip", {f"{split}/{number:012}.jpg": jpeg(number) for number in numbers})
    zipped(folder / published.COCO_ANNOTATIONS, {**files, "annotations/captions_val2017.json": b"{}"})
    made("coco", folder, to)
    assert sorted(path.name for path in (to / "annotations").iterdir()) == [
        "instances_train2017.json",
        "instances_val2017.json",
    ]
    assert [len(BoxedImages(to, "train2017", num_classes=1, train=train)) for train in (True, False)] == [1, 2]
    before = (to / "train2017" / "000000000001.jpg").stat()
    made("coco", folder, to)
    assert (to / "train2017" / "000000000001.jpg").stat().st_ino == before.st_ino


def test_c4_is_sorted_into_splits_after_a_check_against_its_indexes(tmp_path: Path) -> None:
    source, to = tmp_path / "mlperf", tmp_path / "c4"
    source.mkdir()
    for name in published.C4_SETS.values():
        save_indexed(source / name, range(14), [5, 9])
    spec, preparation = preparation_of("c4_llama3")
    prepare(spec, preparation, source, to)
    assert len(TokenShards(to, "train", 7, 7, 100)) == 2
    assert TokenShards(to, "val", 7, 7, 100).window(1).tolist() == list(range(7, 14))
    tokens = source / f"{published.C4_SETS['val']}.bin"
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.raises(DataError, match=rf"{tokens}: has 52 bytes, c4-validation.*\.idx expects 56"):
        prepare(spec, preparation, source, tmp_path / "again")
    index = source / f"{published.C4_SETS['train']}.idx"
    index.write_bytes(b"x" * 99)
    with pytest.raises(DataError, match=r"en_6_text_document.idx: is not an index of Megatron-LM"):
        prepare(spec, preparation, source, tmp_path / "third")


def test_criteo_has_the_lists_of_ids_of_mlperf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists are those of NumPy's global generator with seed 0, drawn table by table."""
    rows, ids = [50, 3, 20], [2, 1, 4]
    monkeypatch.setattr(published, "_sizes", lambda: (rows, ids))
    source, to = tmp_path / "days", tmp_path / "criteo"
    source.mkdir()
    random = np.random.default_rng(1)
    given = {}
    for day, count in ((0, 5), (23, 4)):
        given[day] = random.integers(0, 2**31, (count, 3)).astype(np.int32)
        np.save(source / f"day_{day}_sparse.npy", given[day])
        np.save(source / f"day_{day}_dense.npy", random.random((count, 13), np.float32))
        np.save(source / f"day_{day}_labels.npy", np.ones((count, 1), np.int32))
    made("criteo", source, to)
    log = ClickLog(to / "train", 13, rows, ids)
    found = log.read(0, 5)["ids"]
    np.random.seed(0)
    drawn = [np.random.randint(0, count, (count, width - 1)) for count, width in zip(rows, ids, strict=True)]
    for sample, mine in zip(given[0], found, strict=True):
        expected: list[int] = []
        for one, count, table in zip(sample, rows, drawn, strict=True):
            expected += [one % count, *table[one % count]]
        assert mine.tolist() == expected
    assert len(ClickLog(to / "val", 13, rows, ids)) == 4


def authors_name(name: str) -> str:
    """Return the name in RT-DETR's code (``rtdetr_pytorch/src/nn/backbone/presnet.py``) of a weight."""
    part = name.removeprefix("encoder.").split(".")
    kind = {"convolution": "conv", "normalization": "norm"}[part[-2]]
    if part[0] == "embedder":
        return f"conv1.conv1_{int(part[2]) + 1}.{kind}.{part[-1]}"
    inner = "short.conv" if part[4:6] == ["shortcut", "1"] else "short"
    if part[4] == "layer":
        inner = f"branch2{'abc'[int(part[5])]}"
    return f"res_layers.{part[1]}.blocks.{part[3]}.{inner}.{kind}.{part[-1]}"


def prepared(content: Any, directory: Path) -> Path:
    source = directory / "archives"
    source.mkdir()
    torch.save(content, source / published.RESNET50_VD)
    prepare(*preparation_of("resnet50_vd_weights"), source, directory / "to")
    return directory / "to"


def test_resnet50_vd_is_read_by_the_backbone_of_rt_detr(tmp_path: Path) -> None:
    """All of a tensor's elements are its number."""
    backbone = RTDetrResNetBackbone(RTDetrResNetConfig())
    state = backbone.state_dict()
    kept = [name for name in state if not name.endswith("num_batches_tracked")]
    numbers = {name: torch.tensor(float(number)).expand(state[name].shape) for number, name in enumerate(kept)}
    published = {authors_name(name): value for name, value in numbers.items()}
    assert "res_layers.1.blocks.0.short.conv.conv.weight" in published
    to = prepared(published | {"conv1.conv1_1.norm.num_batches_tracked": torch.tensor(0)}, tmp_path)
    load_backbone(backbone, to)
    state = backbone.state_dict()
    assert [name for name, value in numbers.items() if not torch.equal(state[name], value)] == []


class Command:
    """An object whose unpickling makes a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self._path,)


def test_code_in_the_file_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with pytest.raises(DataError, match="PyTorch cannot read it as weights alone"):
        prepared({"conv1.conv1_1.conv.weight": Command(ran)}, tmp_path)
    assert not ran.exists()
    pickle.loads(pickle.dumps(Command(ran)))  # noqa: S301
    assert ran.exists(), "an ordinary reader runs it"
