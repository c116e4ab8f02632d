"""ImageNet-1k from the archives of ILSVRC 2012: a folder for each class, also of the validation images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from accelmark.datasets.prepare.preparation import (
    Archive,
    Preparation,
    copied,
    opened_tar,
    regular_files,
    whole_directory,
    write_whole,
)
from accelmark.datasets.verify import ProgressMeter
from accelmark.spec.errors import DataError

TRAIN: Final = "ILSVRC2012_img_train.tar"
VAL: Final = "ILSVRC2012_img_val.tar"
DEVKIT: Final = "ILSVRC2012_devkit_t12.tar.gz"
_CLASS_ARCHIVE: Final = re.compile(r"(?:.*/)?(n\d{8})\.tar")
_TRAIN_IMAGE: Final = re.compile(r"(?:.*/)?(n\d{8}_\d+\.JPEG)")
_VAL_IMAGE: Final = re.compile(r"(?:.*/)?(ILSVRC2012_val_(\d{8})\.JPEG)")
_SYNSETS: Final = "data/meta.mat"
_ANSWERS: Final = "data/ILSVRC2012_validation_ground_truth.txt"


def _unpack(archives: Mapping[str, Path], to: Path, meter: ProgressMeter) -> None:
    """Write ``train/<synset>/*.JPEG`` and ``val/<synset>/*.JPEG``; complete class folders are kept."""
    answers = _answers(archives[DEVKIT])
    _unpack_validation(archives[VAL], answers, to / "val", meter)
    if TRAIN in archives:
        _unpack_training(archives[TRAIN], to / "train", meter)


def _unpack_training(path: Path, to: Path, meter: ProgressMeter) -> None:
    with opened_tar(path) as archive:
        for name, size, stream in regular_files(archive):
            if (found := _CLASS_ARCHIVE.fullmatch(name)) is None:
                raise DataError(f"{path}: has {name}; expected an archive <synset>.tar for each class")
            folder = to / found[1]
            if not folder.exists():
                with whole_directory(folder) as part, opened_tar(Path(path, name), stream) as images:
                    for image, _, content in regular_files(images):
                        if (inside := _TRAIN_IMAGE.fullmatch(image)) is None:
                            raise DataError(f"{path}: {name} has {image}; expected <synset>_<number>.JPEG")
                        write_whole(part / inside[1], copied(content))
            meter.add(size)


def _unpack_validation(path: Path, answers: list[str], to: Path, meter: ProgressMeter) -> None:
    for synset in set(answers):
        (to / synset).mkdir(parents=True, exist_ok=True)
    with opened_tar(path) as archive:
        for name, size, stream in regular_files(archive):
            found = _VAL_IMAGE.fullmatch(name)
            if found is None or not 0 < int(found[2]) <= len(answers):
                raise DataError(f"{path}: has {name}; expected ILSVRC2012_val_00000001.JPEG to {len(answers):08}")
            target = to / answers[int(found[2]) - 1] / found[1]
            if not target.exists():
                write_whole(target, copied(stream))
            meter.add(size)


def _answers(devkit: Path) -> list[str]:
    """Return the synset of each validation image, by the development kit's numbers of the classes."""
    with opened_tar(devkit) as archive:
        held = {
            part: stream.read()
            for name, _, stream in regular_files(archive)
            for part in (_SYNSETS, _ANSWERS)
            if name.endswith(part)
        }
    if missing := sorted({_SYNSETS, _ANSWERS} - held.keys()):
        raise DataError(f"{devkit}: has no {', '.join(missing)}")
    synsets = _synsets(devkit, held[_SYNSETS])
    numbers = held[_ANSWERS].decode("ascii", "replace").split()
    strange = next(((line, each) for line, each in enumerate(numbers, 1) if synsets.get(each) is None), None)
    if strange is not None:
        raise DataError(f"{devkit}: {_ANSWERS}:{strange[0]}: {strange[1]!r} is not the number of a class")
    return [synsets[number] for number in numbers]


def _synsets(devkit: Path, content: bytes) -> dict[str, str]:
    """Return the WordNet id of each class that is not made up of others, by its number."""
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
    unpack=_unpack,
)
