"""ImageNet-1k from the archives of ILSVRC 2012: a folder for each class, also of the validation images."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from accelmark.datasets.prepare.preparation import (
    Archive,
    Archives,
    Part,
    Preparation,
    copied,
    whole_directory,
    write_whole,
)
from accelmark.spec.errors import DataError

TRAIN: Final = "ILSVRC2012_img_train.tar"
VAL: Final = "ILSVRC2012_img_val.tar"
DEVKIT: Final = "ILSVRC2012_devkit_t12.tar.gz"
_CLASS_ARCHIVE: Final = re.compile(r"(?:.*/)?(n\d{8})\.tar")
_TRAIN_IMAGE: Final = re.compile(r"(?:.*/)?(n\d{8}_\d+\.JPEG)")
_VAL_IMAGE: Final = re.compile(r"(?:.*/)?(ILSVRC2012_val_(\d{8})\.JPEG)")
_SYNSETS: Final = "data/meta.mat"
_ANSWERS: Final = "data/ILSVRC2012_validation_ground_truth.txt"


def _write_training(archives: Archives, folder: Path) -> None:
    """Write ``<synset>/*.JPEG``; complete class folders are kept."""
    path = archives.paths[TRAIN]
    for name, stream in archives.members(TRAIN):
        if (archive := _CLASS_ARCHIVE.fullmatch(name)) is None:
            raise DataError(f"{path}: has {name}; expected an archive <synset>.tar for each class")
        if not (folder / archive[1]).exists():
            with whole_directory(folder / archive[1]) as part:
                for image, content in archives.tar_members(path / name, stream):
                    if (inside := _TRAIN_IMAGE.fullmatch(image)) is None:
                        raise DataError(f"{path}: {name} has {image}; expected <synset>_<number>.JPEG")
                    write_whole(part / inside[1], copied(content))


def _write_validation(archives: Archives, folder: Path) -> None:
    answers, path = _answers(archives), archives.paths[VAL]
    for synset in set(answers):
        (folder / synset).mkdir(exist_ok=True)
    for name, stream in archives.members(VAL):
        match = _VAL_IMAGE.fullmatch(name)
        if match is None or not 0 < int(match[2]) <= len(answers):
            raise DataError(f"{path}: has {name}; expected ILSVRC2012_val_00000001.JPEG to {len(answers):08}")
        write_whole(folder / answers[int(match[2]) - 1] / match[1], copied(stream))


def _answers(archives: Archives) -> list[str]:
    """Return the synset of each validation image, by the development kit's numbers of the classes."""
    devkit = archives.paths[DEVKIT]
    contents = {
        part: stream.read()
        for name, stream in archives.members(DEVKIT)
        for part in (_SYNSETS, _ANSWERS)
        if name.endswith(part)
    }
    if missing := sorted({_SYNSETS, _ANSWERS} - contents.keys()):
        raise DataError(f"{devkit}: has no {', '.join(missing)}")
    synsets = _synsets(devkit, contents[_SYNSETS])
    numbers = contents[_ANSWERS].decode("ascii", "replace").split()
    if strange := [number for number in numbers if number not in synsets]:
        raise DataError(f"{devkit}: {_ANSWERS}: {strange[0]!r} is not the number of a class")
    return [synsets[number] for number in numbers]


def _synsets(devkit: Path, content: bytes) -> dict[str, str]:
    """Return the WordNet id of each class that has no subclasses, by its number."""
    from scipy.io import loadmat

    try:
        file: Any = BytesIO(content)  # which scipy reads, but its types do not mention
        rows: Any = loadmat(file, squeeze_me=True)["synsets"]
        return {str(int(row[0])): str(row[1]) for row in rows if int(row[4]) == 0}
    except (ValueError, KeyError, IndexError, TypeError, NotImplementedError) as error:
        raise DataError(f"{devkit}: {_SYNSETS} is not the published table of classes: {error}") from error


PREPARATION: Final = Preparation(
    archives=(
        Archive(TRAIN, "1d675b47d978889d74fa0da5fadfb00e", needed=False),
        Archive(VAL, "29b22e2961454d5413ddabcf34fc5622"),
        Archive(DEVKIT, "fa75699e90414af021442c21a62c3abf"),
    ),
    parts={"val": Part((VAL, DEVKIT), _write_validation), "train": Part((TRAIN,), _write_training)},
)
