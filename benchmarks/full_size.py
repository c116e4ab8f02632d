"""Measure what a rank does with full-size data before its first step, on made-up data of that size.

Run ``python -m benchmarks.full_size [--only TEXT]`` on an idle machine; it needs 4 GB of disk below ``--to``, which
keeps the data for the next call, and 4 GB of memory. Each part runs in a process of its own. It prints the rows of
``full_size.md``. ``PYTHONPATH=<another checkout>/src`` measures that checkout.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

IMAGES: Final = 1_281_167
"""Of ImageNet's training split."""
WIKIPEDIA: Final = 156_725_653
"""Samples of MLPerf's BERT."""
LAST_DAY: Final = 89_137_319
"""Samples of the evaluation of MLPerf's DLRM-DCNv2, the first half of day 23."""
CONVERSATIONS: Final = 665_298
"""Of LLaVA-1.5."""
_LINKS: Final = 60_000
"""Of one file: ext4 allows 65,000."""


def _class_folders(root: Path) -> Path:
    """Link an image 1,281,167 times in 1,000 folders."""
    for number in range(IMAGES if not (root / "val").exists() else 0):
        folder, source = root / "train" / f"n{number % 1000:08d}", root / f"{number // _LINKS}.JPEG"
        folder.mkdir(parents=True, exist_ok=True)
        if not number % _LINKS:
            source.write_bytes(b"jpeg")
        os.link(source, folder / f"{folder.name}_{number}.JPEG")
    for number in range(1000):
        (root / "val" / f"n{number:08d}").mkdir(parents=True, exist_ok=True)
        (root / "val" / f"n{number:08d}" / "a.JPEG").touch()
    return root


def class_folders(root: Path) -> Callable[[], object]:
    from accelmark.datasets.images import ClassFolders

    folder = _class_folders(root) / "train"
    return lambda: ClassFolders(folder, 1000)


def verification(root: Path) -> Callable[[], object]:
    """The coordinator's, before the first start."""
    from accelmark.run.controller.data import DataFetcher
    from accelmark.spec.job import JobSpec
    from tests.cases.job_of import job_of

    file = job_of("resnet50", root.with_name("job"), {"imagenet": _class_folders(root)}, {})
    job = JobSpec.model_validate_json(file.read_bytes()).model_copy(update={"open": True})
    fetcher, reports = DataFetcher(), list[str]()
    return lambda: (fetcher, fetcher(job, reports.append))


def shards(root: Path) -> Callable[[], object]:
    """A tenth of ImageNet's images."""
    from accelmark.datasets.images import ShardedImages

    for number in range(10 if not root.exists() else 0):
        root.mkdir(parents=True, exist_ok=True)
        with tarfile.open(root / f"{number}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for index in range(number, IMAGES // 10, 10):
                label = index // 10 % 1000
                for suffix, content in (("jpg", bytes(900)), ("cls", b"%d" % label)):
                    member = tarfile.TarInfo(f"n{label:08d}_{index}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return lambda: ShardedImages(root, 1000)


def order(_: Path) -> Callable[[], object]:
    """Of the samples of Wikipedia, for one rank of 8."""
    from accelmark.frameworks.pytorch.batches import permutation
    from accelmark.train.batches import ArrayPlace, Share

    batches = Share(WIKIPEDIA, 32, ArrayPlace(3, 8, 1), train=True).indices(permutation, 0)
    return lambda: (next(batches), batches)


def conversations(root: Path) -> Callable[[], object]:
    from accelmark.tasks.conversation.pytorch import Conversations

    file, text = root / "conversations" / "a.json", "a café where people read and take photographs of it "
    if not file.exists():
        turn = [{"from": who, "value": text * times} for who, times in (("human", 1), ("gpt", 4))]
        file.parent.mkdir(parents=True)
        with file.open("w", encoding="utf-8") as out:
            for number in range(CONVERSATIONS):
                out.write(("," if number else "[") + json.dumps({"id": number, "conversations": turn * 5}))
            out.write("]")
    return lambda: Conversations(root)


def boxes(root: Path) -> Callable[[], object]:
    from accelmark.tasks.detection.pytorch import BoxedImages

    file = root / "annotations" / "instances_train2017.json"
    if not file.exists():
        outline, images, count = [round(0.37 * each, 2) for each in range(50)], 118_287, 860_001
        file.parent.mkdir(parents=True)
        named = [{"id": each, "file_name": f"{each:012}.jpg", "height": 480, "width": 640} for each in range(images)]
        found = [
            {"id": each, "image_id": each % images, "bbox": [9, 9, 99, 99], "category_id": 1, "segmentation": [outline]}
            for each in range(count)
        ]
        content = {"images": named, "annotations": found, "categories": [{"id": each} for each in range(1, 81)]}
        file.write_text(json.dumps(content), encoding="utf-8")
        del named, found, content
    return lambda: BoxedImages(root, "train2017", num_classes=80, train=True)


def area(_: Path) -> Callable[[], object]:
    """Over the held-out half day of Criteo, an eighth of it."""
    from accelmark.tasks.recommendation.pytorch import area_under_curve

    random = np.random.default_rng(0)
    scores = random.standard_normal(LAST_DAY // 8).astype(np.float32)
    scored = np.stack([scores, random.random(len(scores)) < 0.03], 1).astype(np.float64)
    return lambda: area_under_curve(scored)


PARTS: Final[dict[str, Callable[[Path], Callable[[], object]]]] = {
    "index of class folders, ImageNet": class_folders,
    "verification before the start, ImageNet": verification,
    "index of tar shards, a tenth of ImageNet": shards,
    "first order, Wikipedia of BERT": order,
    "index of conversations, LLaVA": conversations,
    "index of boxes, COCO": boxes,
    "area under the curve, an eighth of Criteo's held-out half day": area,
}


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def measure(name: str, to: Path) -> str:
    """Return a row of the table: seconds, and MiB that stay and that are taken at most."""
    measured = PARTS[name](to / PARTS[name].__name__.replace("verification", "class_folders"))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, began = _resident_mib(), time.perf_counter()
    kept: Any = measured()
    seconds, after = time.perf_counter() - began, _resident_mib()
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 2**10
    del kept
    return f"| {name} | {seconds:.2f} | {after - before:,.0f} | {peak - before:,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measure the parts with this text in their names")
    parser.add_argument("--to", type=Path, default=Path("/tmp/accelmark-full-size"), help="directory of the data")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        print(measure(given.part, given.to), flush=True)
        return
    for name in PARTS:
        if given.only in name:
            subprocess.run([sys.executable, "-m", "benchmarks.full_size", "--to", given.to, "--part", name], check=True)


if __name__ == "__main__":
    main()
