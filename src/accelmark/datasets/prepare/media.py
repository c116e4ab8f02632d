"""Images and speech from their published archives: ImageNet-1k, COCO 2017, LibriSpeech."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, Final

from accelmark.datasets.prepare.preparation import (
    Archive,
    Archives,
    Part,
    Preparation,
    copied,
    files_in,
    whole_directory,
    write_whole,
)
from accelmark.spec.errors import UNREADABLE, DataError, raising

TRAIN: Final = "ILSVRC2012_img_train.tar"
VAL: Final = "ILSVRC2012_img_val.tar"
DEVKIT: Final = "ILSVRC2012_devkit_t12.tar.gz"


def _write_imagenet_training(archives: Archives, folder: Path) -> None:
    """Write ``<synset>/*.JPEG``; complete class folders are kept."""
    for name, stream in archives.members(TRAIN):
        synset = folder / PurePosixPath(name).stem
        if not synset.exists():
            with whole_directory(synset) as part:
                for image, _, content in files_in(archives.paths[TRAIN] / name, stream):
                    write_whole(part / PurePosixPath(image).name, copied(content))


def _write_imagenet_validation(archives: Archives, folder: Path) -> None:
    """Sort the images into the folders of their classes."""
    synsets = _validation_synsets(archives)
    for synset in set(synsets):
        (folder / synset).mkdir(exist_ok=True)
    for name, stream in archives.members(VAL):
        image = PurePosixPath(name)
        number = int(image.stem.rpartition("_")[2])
        write_whole(folder / synsets[number - 1] / image.name, copied(stream))


def _validation_synsets(archives: Archives) -> list[str]:
    """Return the WordNet id of each validation image, by the development kit's numbers of the classes."""
    from scipy.io import loadmat

    contents = {
        PurePosixPath(name).name: stream.read()
        for name, stream in archives.members(DEVKIT)
        if name.endswith(("data/meta.mat", "data/ILSVRC2012_validation_ground_truth.txt"))
    }
    damaged = raising(DataError, f"{archives.paths[DEVKIT]}: is not the published kit", *UNREADABLE)
    with damaged:
        file: Any = BytesIO(contents["meta.mat"])  # which scipy reads, but its types do not mention
        rows: Any = loadmat(file, squeeze_me=True)["synsets"]
        synsets = {str(int(row[0])): str(row[1]) for row in rows if int(row[4]) == 0}  # without subclasses
        answers = contents["ILSVRC2012_validation_ground_truth.txt"].decode("ascii").split()
        return [synsets[answer] for answer in answers]


SPLITS: Final = ("train2017", "val2017")
ANNOTATIONS: Final = "annotations_trainval2017.zip"


def _write_annotations(archives: Archives, folder: Path) -> None:
    names = [f"instances_{split}.json" for split in SPLITS]
    archives.extract(ANNOTATIONS, {f"annotations/{name}": folder / name for name in names})


def _write_coco_images(split: str, archives: Archives, folder: Path) -> None:
    """Write the images that the annotations list."""
    content = json.loads((folder.parent / "annotations" / f"instances_{split}.json").read_bytes())
    names = [image["file_name"] for image in content["images"]]
    archives.extract(f"{split}.zip", {f"{split}/{name}": folder / name for name in names})


_SPEECH_FILE: Final = re.compile(r"LibriSpeech/([a-z0-9-]+)/(\d+/\d+)/([\d-]+\.(?:flac|trans\.txt))")
_SUBSETS: Final = {
    "train-clean-100": "2a93770f6d5c6c964bc36631d331a522",
    "train-clean-360": "c0e676e450a7ff2f54aeade5171606fa",
    "train-other-500": "d1a0fd59409feb2c614ce4d30c387708",
    "dev-clean": "42e2234ba48799c1f50f24a7926300a1",
    "dev-other": "c8d0bcc9cca99d4f8b62fcc847357931",
    "test-clean": "32fa31d27d2e1cad72775fee3f4849a9",
    "test-other": "fb5a50374b501bb3bac4815ee91d3135",
}
"""Subset -> MD5 of its archive at openslr.org."""
_NEEDED: Final = ("train-clean-100", "test-clean")


def _write_subset(subset: str, archives: Archives, folder: Path) -> None:
    """Write ``<speaker>/<chapter>/*`` of a subset; its recordings are those of its transcripts."""
    name = f"{subset}.tar.gz"
    for member, stream in archives.members(name):
        match = _SPEECH_FILE.fullmatch(member)
        if match is not None and match[1] == subset:
            place = folder / match[2]
            place.mkdir(parents=True, exist_ok=True)
            write_whole(place / match[3], copied(stream))
    recordings = {path.stem for path in folder.glob("*/*/*.flac")}
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*/*/*.trans.txt")]
    lines = {line.partition(" ")[0] for text in texts for line in text.splitlines()}
    if not recordings or recordings != lines:
        what = f"has {len(recordings)} recordings and {len(lines)} lines of transcripts"
        raise DataError(f"{archives.paths[name]}: {what}, which do not match")


PREPARATIONS: Final[Mapping[str, Preparation]] = {
    "imagenet": Preparation(
        archives=[
            Archive(TRAIN, "1d675b47d978889d74fa0da5fadfb00e", needed=False),
            Archive(VAL, "29b22e2961454d5413ddabcf34fc5622"),
            Archive(DEVKIT, "fa75699e90414af021442c21a62c3abf"),
        ],
        parts={
            "val": Part((VAL, DEVKIT), _write_imagenet_validation),
            "train": Part((TRAIN,), _write_imagenet_training),
        },
    ),
    "coco": Preparation(
        archives=[
            Archive("train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2"),
            Archive("val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80"),
            Archive(ANNOTATIONS, "f4bbac642086de4f52a3fdda2de5fa2c"),
        ],
        parts={
            "annotations": Part((ANNOTATIONS,), _write_annotations),
            **{split: Part((f"{split}.zip",), partial(_write_coco_images, split)) for split in SPLITS},
        },
        unpacked_ratio=1.02,
    ),
    "librispeech": Preparation(
        archives=[Archive(f"{subset}.tar.gz", md5, needed=subset in _NEEDED) for subset, md5 in _SUBSETS.items()],
        parts={subset: Part((f"{subset}.tar.gz",), partial(_write_subset, subset)) for subset in _SUBSETS},
        unpacked_ratio=1.05,
    ),
}
