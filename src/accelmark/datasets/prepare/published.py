"""Data sets and weights made from their published files."""

from __future__ import annotations

import hashlib
import html
import json
import lzma
import re
import zipfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import psutil

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
from accelmark.datasets.shards import PACKAGE, features, indexed_tokens, integers, opened, records
from accelmark.spec.errors import UNREADABLE, DataError, RequestError, raising
from accelmark.spec.plugins.catalog import load_case
from accelmark.spec.plugins.requirements import require

IMAGENET_TRAIN: Final = "ILSVRC2012_img_train.tar"
IMAGENET_VAL: Final = "ILSVRC2012_img_val.tar"
IMAGENET_KIT: Final = "ILSVRC2012_devkit_t12.tar.gz"


def _write_imagenet_training(archives: Archives, folder: Path) -> None:
    """Write ``<synset>/*.JPEG``; complete class folders are kept."""
    for name, stream in archives.members(IMAGENET_TRAIN):
        synset = folder / PurePosixPath(name).stem
        if not synset.exists():
            with whole_directory(synset) as part:
                for image, _, content in files_in(archives.paths[IMAGENET_TRAIN] / name, stream):
                    write_whole(part / PurePosixPath(image).name, copied(content))


def _write_imagenet_validation(archives: Archives, folder: Path) -> None:
    """Sort the images into the folders of their classes."""
    synsets = _validation_synsets(archives)
    for synset in set(synsets):
        (folder / synset).mkdir(exist_ok=True)
    for name, stream in archives.members(IMAGENET_VAL):
        image = PurePosixPath(name)
        number = int(image.stem.rpartition("_")[2])
        write_whole(folder / synsets[number - 1] / image.name, copied(stream))


def _validation_synsets(archives: Archives) -> list[str]:
    """Return the WordNet id of each validation image, by the development kit's numbers of the classes."""
    from scipy.io import loadmat

    contents = {
        PurePosixPath(name).name: stream.read()
        for name, stream in archives.members(IMAGENET_KIT)
        if name.endswith(("data/meta.mat", "data/ILSVRC2012_validation_ground_truth.txt"))
    }
    damaged = raising(DataError, f"{archives.paths[IMAGENET_KIT]}: is not the published kit", *UNREADABLE)
    with damaged:
        file: Any = BytesIO(contents["meta.mat"])  # which scipy reads, but its types do not mention
        rows: Any = loadmat(file, squeeze_me=True)["synsets"]
        synsets = {str(int(row[0])): str(row[1]) for row in rows if int(row[4]) == 0}  # without subclasses
        answers = contents["ILSVRC2012_validation_ground_truth.txt"].decode("ascii").split()
        return [synsets[answer] for answer in answers]


COCO_SPLITS: Final = ("train2017", "val2017")
COCO_ANNOTATIONS: Final = "annotations_trainval2017.zip"


def _write_annotations(archives: Archives, folder: Path) -> None:
    names = [f"instances_{split}.json" for split in COCO_SPLITS]
    archives.extract(COCO_ANNOTATIONS, {f"annotations/{name}": folder / name for name in names})


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


RESNET50_VD: Final = "ResNet50_vd_ssld_v2_pretrained_from_paddle.pth"
_RESNET_NAMES: Final = {
    r"^conv1\.conv1_1\.": "embedder.embedder.0.",
    r"^conv1\.conv1_2\.": "embedder.embedder.1.",
    r"^conv1\.conv1_3\.": "embedder.embedder.2.",
    r"^res_layers\.": "encoder.stages.",
    r"\.blocks\.": ".layers.",
    r"\.branch2a\.": ".layer.0.",
    r"\.branch2b\.": ".layer.1.",
    r"\.branch2c\.": ".layer.2.",
    r"\.short\.conv\.(conv|norm)\.": r".shortcut.1.\1.",
    r"\.short\.": ".shortcut.",
    r"\.conv\.": ".convolution.",
    r"\.norm\.": ".normalization.",
}
"""Parts of the authors' names -> those of transformers, replaced in this order."""


def read_weights(path: Path) -> dict[str, Any]:
    """Return what a file of PyTorch has by name, without running code in it; raises DataError where it is damaged."""
    import torch

    unreadable = f"{path}: PyTorch cannot read it as weights alone; download it again"
    with raising(DataError, unreadable, *UNREADABLE, UnpicklingError):
        return dict(torch.load(path, weights_only=True, map_location="cpu"))


def check_weights(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], title: str) -> None:
    """Raise DataError where names or shapes of weights are not those of a model."""
    for name in sorted(expected.keys() | found.keys()):
        shapes = [tuple(getattr(each[name], "shape", ())) if name in each else None for each in (found, expected)]
        if shapes[0] != shapes[1]:
            raise DataError(f"{path}: has other weights than {title}: {name} of {shapes[0]}, expected {shapes[1]}")


def _write_resnet50_vd(archives: Archives, folder: Path) -> None:
    """Write ``model.safetensors`` and ``config.json``; counters of steps, without meaning here, are left out."""
    import torch
    from safetensors.torch import save_file
    from transformers import RTDetrResNetBackbone, RTDetrResNetConfig

    path, config = archives.paths[RESNET50_VD], RTDetrResNetConfig()
    with torch.device("meta"):
        model = RTDetrResNetBackbone(config).state_dict()
    expected, weights = (
        {name: value for name, value in weights.items() if not name.endswith(".num_batches_tracked")}
        for weights in (model, read_weights(path))
    )
    for part, other in _RESNET_NAMES.items():
        weights = {re.sub(part, other, name): value for name, value in weights.items()}
    check_weights(path, weights, expected, "ResNet-50-vd")
    config.save_pretrained(folder)
    contiguous = {name: value.contiguous() for name, value in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


_RECORDS: Final = "tfrecord"
_BERT_SPLITS: Final = {
    "train": (
        "2048_shards_uncompressed",
        "hdf5/training-4320/hdf5_4320_shards_varlength",
        "hdf5/training-4320/hdf5_4320_shards_uncompressed",
        "hdf5/training_4320/hdf5_4320_shards_varlength",
        "hdf5/training_4320/hdf5_4320_shards_uncompressed",
        _RECORDS,
    ),
    "val": ("eval_set_uncompressed", "hdf5/eval_varlength", "hdf5/eval", _RECORDS),
}
"""Split -> directories that may have it; the first that exists is used."""
_BERT_CHECKPOINTS: Final = ("model.ckpt-28252.pt", "phase1/model.ckpt-28252.pt")
_COLUMNS: Final = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids")
_UNUSED: Final = ("bert.pooler.", "cls.seq_relationship.", "cls.predictions.decoder.", "bert.embeddings.position_ids")
"""Weights of the prediction of the next sentence, those that are tied to others, and no weights."""
_OF_WORDS: Final = ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")
_INNER: Final = "bert.encoder.layer.0.intermediate.dense.weight"
_BERT_VOCABULARY: Final = 30522


def _chosen(names: tuple[str, ...], what: str, archives: Archives) -> Path:
    if chosen := [archives.paths[name] for name in names if name in archives.paths]:
        return chosen[0]
    raise RequestError(f"{what}: none of {', '.join(names)} is in the directory")


def _write_split(split: str, archives: Archives, folder: Path) -> None:
    """Link the files of HDF5, or write one for each of TFRecord."""
    source = _chosen(_BERT_SPLITS[split], split, archives)
    is_converted = source.name == _RECORDS
    pattern = {"train": "part-*", "val": "eval_*"}[split] if is_converted else "*.hdf5"
    files = sorted(source.glob(pattern))
    if not files:
        raise DataError(f"{source}: has no {pattern}")
    if is_converted:
        require(str(source), PACKAGE)
    for file in files:
        target = folder / f"{file.stem}.hdf5"
        if not is_converted:
            archives.link(file, target)
        elif not target.exists():
            _convert(file, target)


def _convert(source: Path, target: Path) -> None:
    """Write the samples of a file of TFRecord to HDF5."""
    import h5py

    expected = f"expected integers {', '.join(_COLUMNS)}, as many in each sample"
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    with opened(source) as content:
        for row, place in enumerate(records(source, content, verify=True)):
            with raising(DataError, f"{source}: record {row}: {expected}", KeyError, ValueError):
                found = features(content, place)
                for name, rows in columns.items():
                    rows.append(integers(content, found[name]).astype(np.uint16))
    unfinished = target.with_suffix(".part")
    with h5py.File(unfinished, "w") as file, raising(DataError, f"{source}: {expected}", ValueError):
        for name, rows in columns.items():
            file[name] = np.stack(rows)
    unfinished.rename(target)


def _write_checkpoint(archives: Archives, folder: Path) -> None:
    """Write ``model.safetensors`` with the names of transformers."""
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertForMaskedLM

    path = _chosen(_BERT_CHECKPOINTS, "the initial checkpoint", archives)
    stored = read_weights(path)
    found = {
        # MLPerf's scripts pad the vocabulary to a multiple of eight.
        name.replace(".dense_act.", ".dense."): value[:_BERT_VOCABULARY] if name in _OF_WORDS else value
        for name, value in stored.get("model", stored).items()
        if not name.startswith(_UNUSED)
    }
    layers = {name.split(".")[3] for name in found if name.startswith("bert.encoder.layer.")}
    width, inner = (getattr(found.get(name), "shape", (1, 1)) for name in (_OF_WORDS[0], _INNER))
    sizes: dict[str, Any] = {"hidden_size": width[1], "intermediate_size": inner[0], "num_hidden_layers": len(layers)}
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=1)).state_dict()
    expected = {name: value for name, value in model.items() if not name.startswith(_UNUSED)}
    check_weights(path, found, expected, "BERT")
    save_file({name: value.float().contiguous() for name, value in found.items()}, folder / "model.safetensors")


def _count(to: Path) -> str:
    import h5py

    counts = dict.fromkeys(_BERT_SPLITS, 0)
    for split in counts:
        for path in (to / split).glob("*.hdf5"):
            with h5py.File(path) as file:
                counts[split] += len(file["input_ids"])
    return ", ".join(f"{count:,} samples in {split}" for split, count in counts.items())


_BLOCK: Final = 1 << 20
"""Rows that are drawn, and ids that are written, at a time; the drawn numbers depend on it."""
_CRITEO_SUMS: Final = Path(__file__).with_name("criteo.md5")
"""From https://github.com/facebookresearch/dlrm, torchrec_dlrm/md5sums_preprocessed_criteo_click_logs_dataset.txt."""
_CRITEO_DAYS: Final = [f"day_{number}" for number in range(24)]


def _write_days(days: Sequence[str], archives: Archives, folder: Path) -> None:
    """Write labels, dense features and lists of ids of the days that are there."""
    lists = _id_lists(*_sizes())
    for day in (day for day in days if f"{day}_sparse.npy" in archives.paths):
        for kind in ("labels", "dense"):
            archives.place(f"{day}_{kind}.npy", folder)
        target = folder / f"{day}_sparse_multi_hot.npz"
        if target.exists():
            continue
        part = folder / f".{target.name}.part"
        ids = np.load(archives.paths[f"{day}_sparse.npy"], mmap_mode="r", allow_pickle=False)
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
            for number, table in enumerate(lists):
                with archive.open(f"{number}.npy", "w", force_zip64=True) as file:
                    header = {"descr": "<i4", "fortran_order": False, "shape": (len(ids), table.shape[1])}
                    np.lib.format.write_array_header_1_0(file, header)
                    for start in range(0, len(ids), _BLOCK):
                        file.write(table[ids[start : start + _BLOCK, number] % len(table)].astype("<i4").tobytes())
        part.replace(target)


def _sizes() -> tuple[list[int], list[int]]:
    """Return the numbers of rows and of ids of each table of the case."""
    train = load_case("dlrm_dcnv2").train
    assert train is not None  # noqa: S101 - it has a training side
    model: Any = train.settings["model"]
    rows, ids = ([int(part) for part in str(model[name]).split(",")] for name in ("table_rows", "table_ids"))
    return rows, ids


def _id_lists(rows: Sequence[int], num_ids: Sequence[int]) -> Sequence[npt.NDArray[np.int32]]:
    """Draw MLPerf's lists for each table, (rows, ids): each begins with its id, the others are uniform over the table.

    Raises RequestError: they do not fit into the memory that is free.
    """
    needed, free = 4 * sum(np.multiply(rows, num_ids).tolist()), psutil.virtual_memory().available
    if needed > free:
        sizes = f"{needed / 2**30:,.1f} GiB of memory, {free / 2**30:,.1f} GiB are free"
        raise RequestError(f"the lists of ids need {sizes}")
    random = np.random.RandomState(0)
    lists = []
    for count, width in zip(rows, num_ids, strict=True):
        table = np.empty((count, width), np.int32)
        table[:, 0] = np.arange(count)
        for start in range(0, count, _BLOCK):
            part = table[start : start + _BLOCK, 1:]
            part[:] = random.randint(0, count, size=part.shape)
        lists.append(table)
    return lists


C4_SETS: Final = {"train": "c4-train.en_6_text_document", "val": "c4-validation-91205-samples.en_text_document"}
"""Split -> indexed data set of Megatron-LM with tokens of Llama 3.1's vocabulary, as MLPerf Training publishes it."""


def _write_c4(split: str, archives: Archives, folder: Path) -> None:
    """Link or copy a set, after its size is compared with its index."""
    tokens, index = (f"{C4_SETS[split]}.{part}" for part in ("bin", "idx"))
    indexed_tokens(archives.paths[tokens], archives.paths[index])
    for name in (tokens, index):
        archives.place(name, folder)


STORIES: Final = ("cnn_stories.tgz", "dailymail_stories.tgz")
LISTS: Final = {"train": "all_train.txt", "val": "all_val.txt"}
"""Split -> list of the addresses of its articles (version 3.0.0); a story is named by the SHA-1 of its address."""
_SENTENCE_ENDS: Final = (".", "!", "?", "...", "'", "`", '"', "\u2019", "\u201d", ")")


def _write_stories(split: str, archives: Archives, folder: Path) -> None:
    """Write ``<split>.jsonl`` in the order of the archives."""
    lines = archives.paths[LISTS[split]].read_bytes().splitlines()
    left = {hashlib.sha1(line.strip(), usedforsecurity=False).hexdigest() for line in lines if line.strip()}
    with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
        for member, stream in (entry for name in STORIES for entry in archives.members(name)):
            story = member.rpartition("/")[2].removesuffix(".story")
            if story in left:
                left.remove(story)
                article, highlights = _split_story(stream.read().decode("utf-8"))
                file.write(json.dumps({"article": article, "highlights": highlights}) + "\n")
    if left:
        problem = f"lack {len(left):,} stories of {LISTS[split]}, for example {min(left)}.story"
        raise DataError(f"{' and '.join(STORIES)} in {archives.paths[STORIES[0]].parent} {problem}")


def _split_story(text: str) -> tuple[str, str]:
    """Return the article in one line, and its highlights in a line each; lines that lack a full stop get one."""
    article: list[str] = []
    highlights: list[str] = []
    target = article
    for line in filter(None, map(str.strip, text.splitlines())):
        if line == "@highlight":
            target = highlights
        else:
            target.append(line if line.endswith(_SENTENCE_ENDS) else f"{line} .")
    return " ".join(article), "\n".join(highlights)


_CPM_VOCABULARY: Final = "chinese_vocab.model"
_CPM_WEIGHTS: Final = "cpm_model_states_medium.pt"
_DIALOGUES: Final = {
    "train": Archive("train.txt", "65bdbb2b3a8d3b61dbe63ea1a67eec62"),
    "val": Archive("valid.txt", "b7d8356e0d921b512f9b6860138f2174"),
}
"""With the MD5 sums that FlagPerf's loader compares (``training/benchmarks/cpm/pytorch/dataloaders/dataloader.py``)."""
_ROW: Final = 201
_PIECES: Final = str.maketrans(" \n", "\u2582\u2583")
"""Characters of CPM's vocabulary for a space and the end of a line."""


def _write_dialogues(split: str, archives: Archives, folder: Path) -> None:
    """Write ``tokens.npy``: each line's tokens and its end, cut into rows of 201; the last row is padded."""
    import jieba
    from sentencepiece import SentencePieceProcessor

    tokenizer: Any = SentencePieceProcessor(model_file=str(archives.paths[_CPM_VOCABULARY]))
    end, pad = (tokenizer.piece_to_id(piece) for piece in ("<eod>", "<pad>"))
    tokens = array("H")
    with archives.paths[_DIALOGUES[split].name].open(encoding="utf-8") as lines:
        for line in lines:
            words = " ".join(word.translate(_PIECES) for word in jieba.cut(line))
            tokens.extend([*tokenizer.encode(words), end])
            tokens.extend([pad] * (-len(tokens) % _ROW))
    np.save(folder / "tokens.npy", np.frombuffer(tokens, np.uint16))


LAMBADA: Final = "lambada-dataset.tar.gz"
GPT2_TOKENIZER: Final = "tokenizer.json"
NOVELS: Final = "train-novels.tar"
PASSAGES: Final = "lambada_test_plain_text.txt"
GPT2_END: Final = "<|endoftext|>"
"""Token after each novel."""


def _write_novels(archives: Archives, folder: Path) -> None:
    """Write ``novels.bin``: the tokens of GPT-2 as little-endian uint16, with the end of a text after each novel."""
    from tokenizers import Tokenizer

    path, file = archives.paths[LAMBADA], archives.paths[GPT2_TOKENIZER]
    with raising(DataError, f"{file}: is not a tokenizer", Exception):  # tokenizers raises this class itself
        tokenizer = Tokenizer.from_file(str(file))
    end = tokenizer.token_to_id(GPT2_END)
    if end is None or tokenizer.get_vocab_size() > np.iinfo(np.uint16).max + 1:
        raise DataError(f"{file}: is not GPT-2's: it has no token {GPT2_END}, or more than 65,536 tokens")

    def tokens(novels: IO[bytes]) -> Iterator[bytes]:
        for name, _, stream in files_in(path, novels):
            if name.endswith(".txt"):
                ids = tokenizer.encode(stream.read().decode("utf-8"), add_special_tokens=False).ids
                yield np.array([*ids, end], "<u2").tobytes()

    for name, stream in archives.members(LAMBADA):
        if name.endswith(f"/{NOVELS}"):
            write_whole(folder / "novels.bin", tokens(stream))
            return
    raise DataError(f"{path}: has no {NOVELS}; download it again")


def _write_passages(archives: Archives, folder: Path) -> None:
    """Write the passages to ``test.jsonl`` as JSON lines; a model predicts the last word of each."""
    plain = folder / PASSAGES
    archives.extract(LAMBADA, {PASSAGES: plain})
    lines = plain.read_bytes().decode("utf-8").split("\n")
    write_whole(folder / "test.jsonl", (f"{json.dumps({'text': line})}\n".encode() for line in lines if line.strip()))
    plain.unlink()


SAMSUM: Final = "corpus.7z"
SAMSUM_DIALOGUES: Final = {"train.json": 14_732, "val.json": 818, "test.json": 819}
"""File -> number of its dialogues, as in table 2 of the paper (arXiv:1911.12237)."""


def _write_samsum(archives: Archives, folder: Path) -> None:
    import py7zr

    path = archives.paths[SAMSUM]
    damage = py7zr.exceptions.ArchiveError, lzma.LZMAError, EOFError, OSError
    with raising(DataError, f"{path}: is not a readable 7z archive", *damage), py7zr.SevenZipFile(path) as archive:
        archive.extract(folder, targets=list(SAMSUM_DIALOGUES))
    for name, expected in SAMSUM_DIALOGUES.items():
        if (number := len(json.loads((folder / name).read_bytes()))) != expected:
            raise DataError(f"{path}: {name} has {number:,} dialogues instead of {expected:,}")


SST2: Final = "SST-2.zip"


def _write_sst2(archives: Archives, folder: Path) -> None:
    archives.extract(SST2, {f"SST-2/{name}": folder / name for name in ("train.tsv", "dev.tsv")})


CORPORA: Final = {
    "training-parallel-europarl-v7.tgz": "europarl-v7.de-en",
    "training-parallel-commoncrawl.tgz": "commoncrawl.de-en",
    "training-parallel-nc-v9.tgz": "news-commentary-v9.de-en",
}
"""Archive -> name of its parallel files without the language, in the order in which they are written."""
NEWSTEST: Final = "test-full.tgz"
_TEST_FILES: Final = {"en": "newstest2014-deen-src.en.sgm", "de": "newstest2014-deen-ref.de.sgm"}
_TEST_SENTENCES: Final = 3003
_SEGMENT: Final = re.compile(r"<seg[^>]*>(.*?)</seg>", re.DOTALL)
_LANGUAGES: Final = ("en", "de")


def _write_pairs(archives: Archives, folder: Path) -> None:
    """Append the pairs of all corpora in which both sentences have text."""
    with (folder / "text.en").open("wb") as english, (folder / "text.de").open("wb") as german:
        for name, stem in CORPORA.items():
            texts = [folder / f"{stem}.{language}" for language in _LANGUAGES]
            archives.extract(name, {text.name: text for text in texts})
            with texts[0].open("rb") as first, texts[1].open("rb") as second:
                for pair in zip(first, second, strict=True):
                    sentences = [b" ".join(sentence.split()) for sentence in pair]
                    if all(sentences):
                        english.write(sentences[0] + b"\n")
                        german.write(sentences[1] + b"\n")
            for text in texts:
                text.unlink()


def _write_newstest(archives: Archives, folder: Path) -> None:
    """Write the sentences of newstest2014, which are segments of SGML files."""
    archives.extract(NEWSTEST, {name: folder / name for name in _TEST_FILES.values()})
    for language, name in _TEST_FILES.items():
        text = (folder / name).read_text(encoding="utf-8")
        lines = [" ".join(html.unescape(segment).split()) for segment in _SEGMENT.findall(text)]
        if len(lines) != _TEST_SENTENCES:
            path = archives.paths[NEWSTEST]
            raise DataError(f"{path}: {name} has {len(lines)} sentences; expected {_TEST_SENTENCES}")
        (folder / f"text.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / name).unlink()


def _train_tokenizer(archives: Archives, folder: Path) -> None:
    """Train the tokenizer that the README of the case ``transformer`` describes, on the text of both languages."""
    from tokenizers import SentencePieceBPETokenizer

    texts = [str(folder.parent / "train" / f"text.{language}") for language in _LANGUAGES]
    tokenizer = SentencePieceBPETokenizer()
    tokenizer.train(texts, vocab_size=37_000, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))


PREPARATIONS: Final[Mapping[str, Preparation]] = {
    "imagenet": Preparation(
        archives=[
            Archive(IMAGENET_TRAIN, "1d675b47d978889d74fa0da5fadfb00e", needed=False),
            Archive(IMAGENET_VAL, "29b22e2961454d5413ddabcf34fc5622"),
            Archive(IMAGENET_KIT, "fa75699e90414af021442c21a62c3abf"),
        ],
        parts={
            "val": Part((IMAGENET_VAL, IMAGENET_KIT), _write_imagenet_validation),
            "train": Part((IMAGENET_TRAIN,), _write_imagenet_training),
        },
    ),
    "coco": Preparation(
        archives=[
            Archive("train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2"),
            Archive("val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80"),
            Archive(COCO_ANNOTATIONS, "f4bbac642086de4f52a3fdda2de5fa2c"),
        ],
        parts={
            "annotations": Part((COCO_ANNOTATIONS,), _write_annotations),
            **{split: Part((f"{split}.zip",), partial(_write_coco_images, split)) for split in COCO_SPLITS},
        },
        unpacked_ratio=1.02,
    ),
    "librispeech": Preparation(
        archives=[Archive(f"{subset}.tar.gz", md5, needed=subset in _NEEDED) for subset, md5 in _SUBSETS.items()],
        parts={subset: Part((f"{subset}.tar.gz",), partial(_write_subset, subset)) for subset in _SUBSETS},
        unpacked_ratio=1.05,
    ),
    "bert_tokens": Preparation(
        archives=[
            Archive(name, None, needed=False)
            for name in dict.fromkeys((*_BERT_SPLITS["train"], *_BERT_SPLITS["val"], *_BERT_CHECKPOINTS))
        ],
        parts={
            **{split: Part((), partial(_write_split, split)) for split in _BERT_SPLITS},
            "initial": Part((), _write_checkpoint),
        },
        requires=("accelmark[torch]", "accelmark[models]", "h5py>=3.10"),
        count=_count,
    ),
    "criteo": Preparation(
        archives=[
            Archive(name, md5) for md5, name in map(str.split, _CRITEO_SUMS.read_text(encoding="ascii").splitlines())
        ],
        parts={
            "train": Part((), partial(_write_days, _CRITEO_DAYS[:-1])),
            "val": Part((), partial(_write_days, _CRITEO_DAYS[-1:])),
        },
        unpacked_ratio=5.7,
    ),
    "resnet50_vd_weights": Preparation(
        archives=[Archive(RESNET50_VD, None)],
        parts={"hf": Part((RESNET50_VD,), _write_resnet50_vd)},
        requires=("accelmark[torch]", "accelmark[models]"),
    ),
    "c4_llama3": Preparation(
        archives=[Archive(f"{name}.{part}", None) for name in C4_SETS.values() for part in ("idx", "bin")],
        parts={
            split: Part((f"{name}.idx", f"{name}.bin"), partial(_write_c4, split)) for split, name in C4_SETS.items()
        },
    ),
    "cnn_dailymail": Preparation(
        archives=[Archive(name, None) for name in (*STORIES, *LISTS.values())],
        parts={split: Part((*STORIES, name), partial(_write_stories, split)) for split, name in LISTS.items()},
        unpacked_ratio=2.7,
    ),
    "cpm_dialogues": Preparation(
        archives=[*_DIALOGUES.values(), Archive(_CPM_VOCABULARY, None), Archive(_CPM_WEIGHTS, None)],
        parts={
            **{
                split: Part((text.name, _CPM_VOCABULARY), partial(_write_dialogues, split))
                for split, text in _DIALOGUES.items()
            },
            "initial": Part((_CPM_WEIGHTS,), lambda archives, folder: archives.place(_CPM_WEIGHTS, folder)),
        },
        requires=("accelmark[chinese]",),
    ),
    "lambada": Preparation(
        archives=[Archive(LAMBADA, None), Archive(GPT2_TOKENIZER, None)],
        parts={
            "train": Part((LAMBADA, GPT2_TOKENIZER), _write_novels),
            "val": Part((LAMBADA,), _write_passages),
            "tokenizer": Part((GPT2_TOKENIZER,), lambda archives, folder: archives.place(GPT2_TOKENIZER, folder)),
        },
        unpacked_ratio=2.0,
        requires=("accelmark[models]",),
    ),
    "samsum": Preparation(
        archives=[Archive(SAMSUM, None)],
        parts={"corpus": Part((SAMSUM,), _write_samsum)},
        unpacked_ratio=4.0,
        requires=("accelmark[archives]",),
    ),
    "sst2": Preparation(
        archives=[Archive(SST2, "9f81648d4199384278b86e315dac217c")],
        parts={"SST-2": Part((SST2,), _write_sst2)},
        unpacked_ratio=2.0,
    ),
    "wmt14": Preparation(
        archives=[
            Archive("training-parallel-europarl-v7.tgz", "c52404583294a1b609e56d45b2ed06f5"),
            Archive("training-parallel-commoncrawl.tgz", "7e0acbe86b0d7816300e14650f5b2bd4"),
            Archive("training-parallel-nc-v9.tgz", "92e42b68f9d3c2ae9722e6d1c2623e21"),
            Archive(NEWSTEST, None),
        ],
        parts={
            "train": Part(tuple(CORPORA), _write_pairs),
            "test": Part((NEWSTEST,), _write_newstest),
            "tokenizer": Part((), _train_tokenizer),
        },
        requires=("accelmark[models]",),
    ),
}
