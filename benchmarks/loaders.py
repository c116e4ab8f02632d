"""Compare the loaders of ImageNet with a plain loop over the same decoder and transforms.

Run ``python -m benchmarks.loaders [--only TEXT] [--rounds N] [--quick]`` on an idle machine. It writes made-up
photographs of 500 x 375 pixels in the layouts that cases read, each of them several times, so that an epoch takes about
3 s, and reads them as a case does and as a person would without AccelMark, in turns. It prints the table of
``loaders.md``, and replaces the measured loaders' rows of ``results/loaders.json``; with ``--quick`` it does not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from accelmark.datasets.catalogue import known_of
from accelmark.datasets.prepare.preparation import pack
from accelmark.frameworks.pytorch.batches import BatchMemory, IndexedBatches, collated
from accelmark.frameworks.pytorch.case import Place
from accelmark.spec.settings.training import LoaderSettings
from accelmark.tasks.images.data import ArrayImages
from accelmark.tasks.images.pytorch_imagenet import ImageFolder
from accelmark.train.batches import ArrayPlace, SampleBatches
from benchmarks.inference_peers import ratio

RESULTS: Final = Path(__file__).parent / "results" / "loaders.json"
CLASSES: Final = ("n01440764", "n01443537")
WIDTH: Final = 500
HEIGHT: Final = 375
QUALITY: Final = 90
SIZE: Final = 224
BATCH: Final = 64
WARM_UP: Final = 8
"""Batches."""
PLAIN: Final = "plain loop"
Batches = Callable[[], Iterator[int]]
"""Reads the images of the next epoch, and yields the number of those in each batch."""


@dataclass(frozen=True)
class Row:
    """Images per second of wall-clock time and of CPU time, and those of the loader over those of the plain loop."""

    loader: str
    per_second: float
    per_core_second: float
    plain_per_second: float
    plain_per_core_second: float
    """Of the plain loop in the same rounds."""
    first_batch_s: float
    """From the start of the first epoch to its first batch, with the start of the worker; not in the other figures."""
    ratio: tuple[float, float, float]
    """By the wall clock, with an interval of 95 %."""
    core_ratio: tuple[float, float, float]
    """By the CPU time of the process and its workers."""


def photograph(seed: int) -> bytes:
    """Return a JPEG with edges and with noise whose power falls with the square of its frequency, as photographs'."""
    chance = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None] * HEIGHT, np.fft.rfftfreq(WIDTH)[None] * WIDTH)

    def noise() -> NDArray[np.float64]:
        spectrum = np.fft.rfft2(chance.standard_normal((HEIGHT, WIDTH))) / np.maximum(frequency, 1)
        field: NDArray[np.float64] = np.fft.irfft2(spectrum, (HEIGHT, WIDTH))
        field /= field.std()
        return field

    light = noise()
    pixels = np.stack([110 + 45 * light + 15 * noise() for _ in range(3)], axis=2)
    for _ in range(6):
        top, left = (int(chance.integers(0, side - 60)) for side in (HEIGHT, WIDTH))
        pixels[top : top + 60, left : left + 60] += chance.normal(0, 40, 3)
    stream = BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=QUALITY)
    return stream.getvalue()


def write(root: Path, num_images: int, times: int = 1) -> float:
    """Write ``folders/train/<class>/*.JPEG`` and ``shards/train/*.tar``; return the mean size of an image in bytes.

    Each image is there ``times`` times: as links in the folders, as copies in the shards.
    """
    sizes = []
    for number in range(num_images):
        folder = root / "folders" / "train" / CLASSES[number % len(CLASSES)]
        folder.mkdir(parents=True, exist_ok=True)
        content = photograph(number)
        (folder / f"{number:05}.JPEG").write_bytes(content)
        for link in range(1, times):
            os.link(folder / f"{number:05}.JPEG", folder / f"{number:05}_{link}.JPEG")
        sizes.append(len(content))
    pack(known_of("imagenet").spec, root / "folders", root / "shards", allow_subset=True)
    return sum(sizes) / len(sizes)


def plain(root: Path) -> Batches:
    """Return the loop that a person would write: random resized crops, flipped, in batches of bytes."""
    files = [(path, label) for label, name in enumerate(CLASSES) for path in sorted((root / name).iterdir())]

    def box(width: int, height: int) -> tuple[int, int, int, int]:
        while True:
            area, spread = width * height * random.uniform(0.08, 1), random.uniform(math.log(3 / 4), math.log(4 / 3))
            across, down = round(math.sqrt(area * math.exp(spread))), round(math.sqrt(area / math.exp(spread)))
            if across <= width and down <= height:
                left, top = random.randint(0, width - across), random.randint(0, height - down)
                return left, top, left + across, top + down

    def image(path: Path) -> NDArray[np.uint8]:
        with Image.open(path) as file:
            decoded = file.convert("RGB")
        crop = decoded.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box(*decoded.size))
        if random.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(crop).transpose(2, 0, 1)

    def read() -> Iterator[int]:
        random.shuffle(files)
        for first in range(0, len(files) - BATCH + 1, BATCH):
            chosen = files[first : first + BATCH]
            batch = {
                "image": torch.from_numpy(np.stack([image(path) for path, _ in chosen])),
                "label": torch.tensor([label for _, label in chosen]),
            }
            yield len(batch["image"])

    return read


def loaders(root: Path) -> dict[str, Batches]:
    """Return the loaders by name, as cases build them; each call of one reads the next epoch."""
    options: dict[str, Any] = {"num_classes": len(CLASSES), "size": SIZE, "train": True}
    place = Place(0, 1, 1, torch.device("cpu"), 1)
    arrays = ArrayPlace(0, 1, shared_seed=1)

    def tensors(layout: str, num_workers: int) -> Batches:
        loader = LoaderSettings(num_workers=num_workers, prefetch=4)
        batches = IndexedBatches(ImageFolder(root / layout, "train", **options), BATCH, place, loader, train=True)
        return epochs(batches.epoch)

    def of_arrays(num_workers: int) -> Batches:
        loader = LoaderSettings(num_workers=num_workers, prefetch=4)
        batches = SampleBatches(ArrayImages(root / "folders", "train", **options), BATCH, arrays, loader, train=True)
        return epochs(batches.epoch)

    return {
        "PyTorch, class folders, no worker": tensors("folders", 0),
        "PyTorch, class folders, one worker process": tensors("folders", 1),
        "PyTorch, shards, no worker": tensors("shards", 0),
        "PyTorch, shards, one worker process": tensors("shards", 1),
        "other frameworks, class folders, no worker": of_arrays(0),
        "other frameworks, class folders, one worker thread": of_arrays(1),
    }


def epochs(epoch: Callable[[int], Iterator[Mapping[str, Any]]]) -> Batches:
    """Return a function that reads one epoch after the other."""
    number = iter(range(10**6))
    return lambda: (len(batch["image"]) for batch in epoch(next(number)))


def cpu_s() -> float:
    """Return the CPU time of this process and its workers."""
    process = psutil.Process()
    own = time.process_time()  # before the look for workers, which takes milliseconds
    return own + sum(sum(child.cpu_times()[:2]) for child in process.children(recursive=True))


def measure(root: Path, rounds: int, only: str = "") -> list[Row]:
    """Read everything by the plain loop and each loader with ``only`` in its name, in a new order each round.

    Before, some batches of each are read that are not measured.
    """
    chosen = {name: read for name, read in loaders(root).items() if only in name}
    readers = {PLAIN: plain(root / "folders" / "train"), **chosen}
    first: dict[str, float] = {}
    for name, read in readers.items():
        began, batches = time.perf_counter(), read()
        next(batches)
        first[name] = time.perf_counter() - began
        list(islice(batches, WARM_UP))
    wall: dict[str, list[float]] = {name: [] for name in readers}
    core: dict[str, list[float]] = {name: [] for name in readers}
    order = list(readers)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            began, used = time.perf_counter(), cpu_s()
            count = sum(readers[name]())
            wall[name].append((time.perf_counter() - began) / count)
            core[name].append((cpu_s() - used) / count)
    plainly = 1 / float(np.median(wall[PLAIN])), 1 / float(np.median(core[PLAIN]))
    rows = []
    for name in chosen:
        own = 1 / float(np.median(wall[name])), 1 / float(np.median(core[name]))
        ratios = ratio(wall[PLAIN], wall[name]), ratio(core[PLAIN], core[name])
        rows.append(Row(name, *own, *plainly, first[name], *ratios))
    return rows


def parts() -> dict[str, float]:
    """Return the CPU time, in us an image, of what follows the reading of a batch's images: the least of 15 tries.

    Also the ms until the first batch of images that need no reading, without a worker and with one: the start of it.
    """
    image = torch.randint(0, 256, (3, SIZE, SIZE), dtype=torch.uint8)
    samples = [{"image": image.clone(), "label": torch.tensor(0)} for _ in range(BATCH)]
    batch, memory = collated(samples, BATCH), BatchMemory(1)

    def in_new_memory() -> None:
        storage: Any = torch.UntypedStorage._new_shared(batch["image"].nbytes, device="cpu")  # type: ignore[no-untyped-call]
        room: Any = torch.empty(0, dtype=torch.uint8)
        torch.stack([sample["image"] for sample in samples], out=room.set_(storage, 0, batch["image"].shape))

    def in_memory_used_again() -> None:
        memory.stored(batch, 0, 0)
        memory._states[:] = 0

    def least(call: Callable[[], object]) -> float:
        times = []
        for _ in range(15):
            began = time.process_time()
            call()
            times.append(time.process_time() - began)
        return min(times) / BATCH * 1e6

    def first_ms(num_workers: int) -> float:
        loader, place = LoaderSettings(num_workers=num_workers), Place(0, 1, 1, torch.device("cpu"), 1)
        began = time.perf_counter()
        next(IndexedBatches(Ready(samples), BATCH, place, loader, train=True).epoch(0))
        return (time.perf_counter() - began) * 1000

    return {
        "collated": least(lambda: collated(samples, BATCH)),
        "collated in new shared memory": least(in_new_memory),
        "copied to shared memory that is used again": least(in_memory_used_again),
        "first batch without a worker, ms": min(first_ms(0) for _ in range(5)),
        "first batch with one, ms": min(first_ms(1) for _ in range(5)),
    }


def begun_within(root: Path) -> Iterator[str]:
    """Yield rows: batches before, seconds until the first batch after them, and the same where they are read.

    Files are read again and again, so that the epoch has ImageNet's 1,281,167 images. Batches are read for up to 100.
    """

    class Whole:
        def __init__(self, files: ImageFolder) -> None:
            self._files = files

        def __len__(self) -> int:
            return 1_281_167

        def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
            return self._files.read(index % len(self._files), random)

    place = Place(0, 1, 1, torch.device("cpu"), 1)
    files = ImageFolder(root / "folders", "train", num_classes=len(CLASSES), size=SIZE, train=True)
    batches = IndexedBatches(Whole(files), BATCH, place, LoaderSettings(num_workers=0), train=True)
    for skip in (0, 10, 100, 1_000, 10_000):
        began = time.perf_counter()
        next(batches.epoch(0, skip))
        direct_s, began = time.perf_counter() - began, time.perf_counter()
        if skip <= 100:
            next(islice(batches.epoch(0), skip, None))
        reading = f"{time.perf_counter() - began:.2f}" if skip <= 100 else "not measured"
        yield f"| {skip:,} | {direct_s:.2f} | {reading} |"


class Ready:
    """Samples that need no reading."""

    def __init__(self, samples: list[dict[str, Tensor]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        return self._samples[index]


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| Loader | images/s | plain loop | ratio | images/s and core | plain loop | ratio | first batch, s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        both = ["{:.3f} ({:.3f} to {:.3f})".format(*each) for each in (row.ratio, row.core_ratio)]
        wall = f"{row.per_second:.1f} | {row.plain_per_second:.1f} | {both[0]}"
        core = f"{row.per_core_second:.1f} | {row.plain_per_core_second:.1f} | {both[1]}"
        lines.append(f"| {row.loader} | {wall} | {core} | {row.first_batch_s:.2f} |")
    return "\n".join(lines)


def keep(rows: list[Row], images: int, mean_bytes: float) -> None:
    """Replace the rows of these loaders in the results."""
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": []}
    new = {row.loader: asdict(row) for row in rows}
    kept = {row["loader"]: row for row in found["rows"]} | new
    written = {"images": images, "mean_bytes": mean_bytes, "rows": list(kept.values())}
    RESULTS.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measure the loaders with this text in their names")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--times", type=int, default=5, help="files of each image")
    parser.add_argument("--parts", action="store_true", help="only print the times of parts of the way of a batch")
    parser.add_argument("--within", action="store_true", help="only print how long it takes to begin within an epoch")
    parser.add_argument("--quick", action="store_true", help="three rounds of few images; writes nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.parts:
        print("\n".join(f"{name}: {value:.1f}" for name, value in parts().items()))
        return
    with tempfile.TemporaryDirectory() as text:
        root, times = Path(text), 1 if given.quick else given.times
        mean_bytes = write(root, given.images, times)
        if given.within:
            print("\n".join(begun_within(root)))
            return
        rows = measure(root, 3 if given.quick else given.rounds, given.only)
    images = given.images * times
    print(f"{images} images of {mean_bytes / 1000:.0f} kB\n{table(rows)}")
    if not given.quick:
        keep(rows, images, mean_bytes)


if __name__ == "__main__":
    main()
