"""Tiny data sets in the layouts of the public ones, which a model can learn."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import wave
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.sparse import csr_matrix
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaForCausalLM

from accelmark.spec.plugins.catalog import load_case
from accelmark.tasks.speech.pytorch import RATE_HZ

WORDS = ("ONE", "TWO", "SIX", "TEN")
NUMBERS = {"ONE": "eins", "TWO": "zwei", "SIX": "sechs", "TEN": "zehn"}


def imagenet(root: Path) -> Mapping[str, Path]:
    """Two classes that differ in colour."""
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 3)):
        for label, synset in enumerate(("n01440764", "n01443537")):
            folder = root / "imagenet" / split / synset
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = random.integers(0, 60, (40, 50, 3), dtype=np.uint8)
                pixels[..., label] += 150
                Image.fromarray(pixels).save(folder / f"{synset}_{index}.JPEG", quality=95)
    return places(root, "imagenet")


def write_idx(
    folder: Path, prefix: str, images: NDArray[np.uint8], labels: NDArray[np.uint8], *, packed: bool = False
) -> None:
    """Write a split of Fashion-MNIST."""
    for name, values in (("images-idx3", images), ("labels-idx1", labels)):
        head = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}i", *values.shape)
        path, content = folder / f"{prefix}-{name}-ubyte", head + values.tobytes()
        if packed:
            path, content = path.with_name(f"{path.name}.gz"), gzip.compress(content)
        path.write_bytes(content)


def write(path: Path, content: str | bytes) -> None:
    """Write a file, with its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def places(root: Path, *names: str) -> Mapping[str, Path]:
    """Return the directories of data sets below ``root``, by their names."""
    return {name: root / name for name in names}


def json_lines(rows: Iterable[Mapping[str, str]]) -> str:
    """Return a JSON object in each line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def tar(path: Path, files: Mapping[str, bytes]) -> bytes:
    """Write a tar archive, packed where its name says so, and return its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = path.suffix in (".gz", ".tgz")
    with tarfile.open(path, "w:gz") if packed else tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path.read_bytes()


def save_indexed(stem: Path, tokens: Sequence[int], lengths: list[int], kind: int = 4, dtype: str = "<i4") -> None:
    """Write an indexed data set of Megatron-LM: sequences of these lengths."""
    content = np.array(tokens, dtype)
    starts = np.cumsum([0, *lengths[:-1]]) * content.itemsize
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, kind, len(lengths), len(lengths) + 1)
    index += np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes()
    write(stem.with_name(f"{stem.name}.bin"), content.tobytes())
    write(stem.with_name(f"{stem.name}.idx"), index + np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def npy(array: NDArray[Any]) -> bytes:
    """Return an array in NumPy's format."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def save_tokenizer(path: Path, texts: list[str], special: list[str]) -> Tokenizer:
    """Train a byte-level tokenizer of at most 100 tokens besides the bytes, the special ones first."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=100, special_tokens=special))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def sentences(count: int) -> list[tuple[str, str]]:
    """Return numbers in English and in German."""
    random = np.random.default_rng(1)
    chosen = [random.choice(WORDS, 3) for _ in range(count)]
    return [(" ".join(words), " ".join(NUMBERS[word] for word in words)) for words in chosen]


def sst2(root: Path) -> Mapping[str, Path]:
    """Sentences that are good or bad."""
    rows = [("a good film", 1), ("a bad film", 0), ("good and long", 1), ("bad and short", 0)]
    for split, times in (("train", 4), ("dev", 1)):
        lines = [f"{text}\t{label}\n" for text, label in rows * times]
        write(root / "sst2/SST-2" / f"{split}.tsv", "sentence\tlabel\n" + "".join(lines))
    save_tokenizer(root / "distilbert/hf/tokenizer.json", [text for text, _ in rows], ["<pad>"])
    return places(root, "sst2", "distilbert")


def lambada(root: Path) -> Mapping[str, Path]:
    """A text that repeats itself."""
    text = "the cat sat on the mat and the dog sat on the rug . " * 60
    tokenizer = save_tokenizer(root / "lambada/tokenizer/tokenizer.json", [text], ["<end>"])
    write(root / "lambada/train/a.npy", npy(np.array(tokenizer.encode(text).ids, np.uint16)))
    passages = ["the cat sat on the mat", "the dog sat on the rug"]
    write(root / "lambada/val/test.jsonl", json_lines({"text": passage} for passage in passages))
    return places(root, "lambada")


def tokens(name: str, first: int = 0, *, indexed: bool = False) -> Callable[[Path], Mapping[str, Path]]:
    """Return a writer of shards of ten tokens in turns: bare files, or an indexed data set of Megatron-LM."""

    def writer(root: Path) -> Mapping[str, Path]:
        for split in ("train", "val"):
            folder = root / name / split
            shard = (first + np.arange(16 * 40 + 1) % 10).astype("<u2")
            if indexed:
                save_indexed(folder / "a", shard.tolist(), [len(shard)], 8, "<u2")
            else:
                write(folder / "a.bin", shard.tobytes())
                np.save(folder / "b.npy", shard[: 16 * 20 + 1])
        return places(root, name)

    return writer


def record(root: Path) -> Mapping[str, Path]:
    """Queries with three choices; the first repeats the passage's token, in FlagPerf's files for GLM."""
    length, random = 24, np.random.default_rng(2)
    for split, count in (("train", 24), ("eval", 6)):
        rows = 3 * count
        text, target = (np.zeros((rows, length), np.int64) for _ in range(2))
        text[:], target[:, 20:22] = 10 + np.arange(rows)[:, None] // 3 % 5, 40 + random.integers(0, 5, (rows, 1))
        target[::3, 20:22] = text[::3, :2]
        positions = np.tile(np.stack((np.arange(length), np.arange(length) // 20)), (rows, 1))
        matrices = {
            "text": text,
            "target": target,
            "logit_mask": target > 0,
            "position": positions,
            "mask": np.full((1, rows), 20),
            "choice_start_end": 3 * np.arange(count)[:, None] + [0, 3],
        }
        if split == "eval":
            matrices |= {"answer_start_end": np.arange(count)[:, None] + [0, 1], "answer_idx": np.zeros((1, count))}
        folder = root / "glm_record/ReCoRD/glm_train_eval_hdf5_sparse" / f"{split}_hdf5"
        folder.mkdir(parents=True)
        with h5py.File(folder / f"{split}_sparse.hdf5", "w") as file:
            for name, matrix in matrices.items():
                sparse = csr_matrix(matrix.astype(np.int64))
                group = file.create_group(name)
                group.attrs.update(h5sparse_format="csr", h5sparse_shape=sparse.shape)
                for part in ("data", "indices", "indptr"):
                    group[part] = getattr(sparse, part)
    return places(root, "glm_record")


def dialogues(root: Path) -> Mapping[str, Path]:
    """Rows of CPM's tokens; the last five are padding."""
    for split in ("train", "val"):
        rows = np.tile(10 + np.arange(17) % 10, (24, 1))
        rows[:, 12:] = 5
        write(root / "cpm_dialogues" / split / "tokens.npy", npy(rows.astype(np.uint16).reshape(-1)))
    return places(root, "cpm_dialogues")


def megatron_gpt2(net: nn.Module, *, block_positions: nn.Embedding | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of a ``GPT2Model`` under the names of the first Megatron-LM; GLM has positions of blocks."""
    names = {
        "h.": "transformer.layers.",
        "wte.": "word_embeddings.",
        "wpe.": "position_embeddings." if block_positions is None else "transformer.position_embeddings.",
        "ln_f.": "transformer.final_layernorm.",
        "ln_1.": "input_layernorm.",
        "ln_2.": "post_attention_layernorm.",
        "attn.c_attn.": "attention.query_key_value.",
        "attn.c_proj.": "attention.dense.",
        "mlp.c_fc.": "mlp.dense_h_to_4h.",
        "mlp.c_proj.": "mlp.dense_4h_to_h.",
    }
    state = {}
    for name, weight in net.state_dict().items():
        stored = weight.T.contiguous() if ".c_" in name and name.endswith("weight") else weight
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state[name] = stored
    if block_positions is not None:
        state["transformer.block_position_embeddings.weight"] = block_positions.weight.detach()
    return state


def samsum(root: Path) -> Mapping[str, Path]:
    """Dialogues of numbers with their translations as summaries, and a tokenizer next to Llama's weights."""
    for split, count in (("train", 40), ("val", 12)):
        entries = [{"id": "1", "dialogue": english, "summary": german} for english, german in sentences(count)]
        write(root / "samsum/corpus" / f"{split}.json", json.dumps(entries))
    texts = [text for pair in sentences(40) for text in pair]
    save_tokenizer(root / "llama2_7b_weights/hf/tokenizer.json", texts, ["<unk>", "</s>"])
    return places(root, "samsum", "llama2_7b_weights")


def cnn_dailymail(root: Path) -> Mapping[str, Path]:
    """Numbers with a summary."""
    for split, count in (("train", 16), ("val", 4)):
        rows = [{"article": english, "highlights": german} for english, german in sentences(count)]
        write(root / "cnn_dailymail" / split / f"{split}.jsonl", json_lines(rows))
    texts = [text for pair in sentences(16) for text in pair]
    save_tokenizer(root / "t5_small/hf/tokenizer.json", texts, ["<pad>", "</s>"])
    return places(root, "cnn_dailymail", "t5_small")


def wmt14(root: Path) -> Mapping[str, Path]:
    """Numbers in two languages."""
    for split, count in (("train", 16), ("test", 4)):
        for column, language in enumerate(("en", "de")):
            lines = [f"{pair[column]}\n" for pair in sentences(count)]
            write(root / "wmt14" / split / f"text.{language}", "".join(lines))
    texts = [text for pair in sentences(16) for text in pair]
    save_tokenizer(root / "wmt14/tokenizer/tokenizer.json", texts, ["<pad>", "</s>"])
    return places(root, "wmt14")


def save_tone(path: Path, words: list[str], rate: int = RATE_HZ) -> None:
    """Write a recording of 0.2 s a word, each word a tone of its own."""
    save_tones(path, [200 + 150 * WORDS.index(word) for word in words], 0.2, rate)


def save_tones(path: Path, hertz: Iterable[float], seconds: float, rate: int) -> None:
    """Write a recording of tones one after another."""
    time = np.arange(round(seconds * rate)) / rate
    tones = [np.sin(2 * np.pi * each * time) for each in hertz]
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", "not compressed"))
        file.writeframes((np.concatenate(tones) * 8000).astype("<i2").tobytes())


def librispeech(root: Path) -> Mapping[str, Path]:
    """Tones with a word for each; wav files, which are read where LibriSpeech has flac."""
    random = np.random.default_rng(2)
    for subset, count in (("train-clean-100", 8), ("train-clean-360", 4), ("train-other-500", 4), ("test-clean", 3)):
        folder = root / "librispeech" / subset / "19" / "198"
        folder.mkdir(parents=True)
        lines = []
        for index in range(count):
            words = random.choice(WORDS, 3).tolist()
            save_tone(folder / f"19-198-{index:04}.wav", words)
            lines.append(f"19-198-{index:04} {' '.join(words)}\n")
        write(folder / "19-198.trans.txt", "".join(lines))
    save_tokenizer(root / "whisper_weights/hf/tokenizer.json", [" ".join(WORDS).lower()], ["<end>"])
    return places(root, "librispeech")


def coco(root: Path) -> Mapping[str, Path]:
    """Bright rectangles of two categories, whose ids are not in a row, on dark images of two sizes."""
    random = np.random.default_rng(3)
    colours = {1: (250, 40, 40), 3: (40, 40, 250)}
    for split, count in (("train2017", 16), ("val2017", 3)):
        (root / "coco" / split).mkdir(parents=True)
        images: list[dict[str, object]] = []
        annotations: list[dict[str, object]] = []
        for index in range(count):
            width, height = ((60, 40), (40, 60))[index % 2]
            pixels = np.full((height, width, 3), 20, np.uint8)
            for category in random.choice([1, 3], 1 + index % 2, replace=False).tolist():
                left, top = int(random.integers(0, width - 24)), int(random.integers(0, height - 24))
                pixels[top : top + 20, left : left + 20] = colours[category]
                corners = [left, top, left + 20, top, left + 20, top + 20, left, top + 20]
                box = {"bbox": [left, top, 20, 20], "area": 400, "iscrowd": 0, "segmentation": [corners]}
                names = {"id": len(annotations) + 1, "image_id": index, "category_id": category}
                annotations.append(names | box)
            name = f"{index:012}.jpg"
            Image.fromarray(pixels).save(root / "coco" / split / name, quality=95)
            images.append({"id": index, "file_name": name, "width": width, "height": height})
        content = {"images": images, "annotations": annotations, "categories": [{"id": 1}, {"id": 3}]}
        write(root / "coco/annotations" / f"instances_{split}.json", json.dumps(content))
    return places(root, "coco")


def llava(root: Path) -> Mapping[str, Path]:
    """Questions for the colour of an image, and one conversation without an image."""
    random = np.random.default_rng(9)
    folder = root / "llava_instruct"
    (folder / "images/coco/train2017").mkdir(parents=True)
    samples: list[dict[str, object]] = []
    for index in range(24):
        name, kind = f"coco/train2017/{index:012}.jpg", int(random.integers(2))
        pixels = np.full((40, 60, 3), 20, np.uint8)
        pixels[..., kind] += 200
        Image.fromarray(pixels).save(folder / "images" / name, quality=95)
        turns = [("human", "<image>\nColour?"), ("gpt", ("red", "green")[kind]), ("human", "Sure?"), ("gpt", "yes")]
        samples.append({"id": str(index), "image": name, "conversations": [{"from": a, "value": b} for a, b in turns]})
    turns = [("human", "Colour?"), ("gpt", "none")]
    samples.append({"id": "text", "conversations": [{"from": a, "value": b} for a, b in turns]})
    write(folder / "conversations/mix.json", json.dumps(samples))
    texts = ["A chat between a curious user", "USER: Colour? ASSISTANT: red or green", "USER: Sure? ASSISTANT: yes"]
    save_tokenizer(root / "llava_parts/vicuna/tokenizer.json", texts, ["<unk>", "<s>", "</s>"])
    return places(root, "llava_instruct", "llava_parts")


def save_llava_parts(net: Any, directory: Path) -> None:
    """Write the parts of a model as Vicuna, CLIP and LLaVA's projector are published."""
    text = LlamaForCausalLM(net.config.text_config)
    text.model, text.lm_head = net.model.language_model, net.lm_head
    text.save_pretrained(directory / "vicuna")
    net.model.vision_tower.save_pretrained(directory / "clip")
    (directory / "projector").mkdir(exist_ok=True)
    numbers = {"linear_1": "0", "linear_2": "2"}
    state = {}
    for name, part in net.model.multi_modal_projector.state_dict().items():
        layer, _, kind = name.partition(".")
        state[f"model.mm_projector.{numbers[layer]}.{kind}"] = part.half()
    torch.save(state, directory / "projector" / "mm_projector.bin")


def ade20k(root: Path) -> Mapping[str, Path]:
    """Images of which the left and the right half are of different classes, with a border that is not counted."""
    random = np.random.default_rng(4)
    for split, count in (("training", 16), ("validation", 3)):
        for kind in ("images", "annotations"):
            (root / "ade20k" / kind / split).mkdir(parents=True)
        for index in range(count):
            width, height = ((90, 70), (70, 90))[index % 2]
            segments = np.where(np.arange(width) < width // 2, *random.permutation([1, 2]).tolist())
            segments = np.tile(segments.astype(np.uint8), (height, 1))
            segments[:3] = 0
            pixels = np.stack([np.where(segments == label, 200, 30) for label in (0, 1, 2)], 2).astype(np.uint8)
            name = f"ADE_{split}_{index:08}"
            Image.fromarray(pixels).save(root / "ade20k/images" / split / f"{name}.jpg", quality=95)
            Image.fromarray(segments).save(root / "ade20k/annotations" / split / f"{name}.png")
    return places(root, "ade20k")


def latents(root: Path) -> Mapping[str, Path]:
    """Latents of one of two captions, bright in one of two channels, in three shards."""
    random = np.random.default_rng(5)
    for name, count in (("train/00000", 8), ("train/00001", 8), ("val/00002", 4)):
        files: dict[str, bytes] = {}
        for index in range(count):
            kind = int(random.integers(2))
            moments = np.full((8, 16, 16), -10, np.float16)
            moments[:4] = random.normal(0, 0.3, (4, 16, 16))
            moments[kind] += 6
            files |= {f"{index:09}.npy": npy(moments), f"{index:09}.txt": WORDS[kind].encode()}
        tar(root / "laion_moments" / f"{name}.tar", files)
    save_tokenizer(root / "openclip_text_weights/hf/tokenizer.json", [" ".join(WORDS)], ["<end>"])
    return places(root, "laion_moments", "openclip_text_weights")


def captions(root: Path) -> Mapping[str, Path]:
    """Two captions of each of five images, and the tokenizer of the model that scores images."""
    rows = [
        {"id": 10 * number + index, "image_id": index % 5, "caption": f"{WORDS[index % 4]} OF {word}\n"}
        for number, word in enumerate(("FIRST", "SECOND"))
        for index in reversed(range(5))
    ]
    write(root / "coco_captions/annotations/captions_val2017.json", json.dumps({"annotations": rows}))
    save_tokenizer(root / "clip_vit_b32/hf/tokenizer.json", [str(row["caption"]) for row in rows], ["<end>"])
    return places(root, "coco_captions", "clip_vit_b32")


def flux_encodings(root: Path) -> Mapping[str, Path]:
    """Encoded images of one of two captions, bright in one of two channels; the evaluation's have times."""
    pa: Any = pytest.importorskip("pyarrow")
    random = np.random.default_rng(8)
    folder = root / "flux_encodings"
    for split, count in (("train", 24), ("val", 8)):
        (folder / split).mkdir(parents=True)
        rows = []
        for index in range(count):
            kind = int(random.integers(2))
            mean = random.normal(0, 0.3, (16, 8, 8))
            mean[kind] += 8
            words, caption = np.zeros((6, 24)), np.zeros(12)
            words[:, kind] = caption[kind] = 4
            arrays = {"t5_encodings": words, "clip_encodings": caption, "mean": mean}
            arrays["logvar"] = np.full(mean.shape, -10.0)
            time = {"timestep": index % 8} if split == "val" else {}
            encoded = {name: torch.from_numpy(part).bfloat16().view(torch.uint16) for name, part in arrays.items()}
            rows.append({"__key__": str(index), **{name: npy(part.numpy()) for name, part in encoded.items()}, **time})
        for part, some in enumerate((rows[: count // 2], rows[count // 2 :])):
            table = pa.Table.from_pylist(some)
            with pa.ipc.new_stream(str(folder / split / f"data-{part:05}-of-00002.arrow"), table.schema) as stream:
                stream.write_table(table)
    write(folder / "empty/t5_empty.npy", npy(np.zeros((1, 6, 24), np.float16)))
    write(folder / "empty/clip_empty.npy", npy(np.zeros((1, 12), np.float16)))
    return places(root, "flux_encodings")


def criteo(root: Path) -> Mapping[str, Path]:
    """Clicks that follow from the first id of the first table, on two days and one for evaluation."""
    random = np.random.default_rng(6)
    for split, day, count in (("train", 0, 60), ("train", 1, 36), ("val", 23, 40)):
        folder = root / "criteo" / split
        folder.mkdir(parents=True, exist_ok=True)
        sizes = ((50, 2), (3, 1), (20, 4))
        tables = [random.integers(0, rows, (count, ids)).astype(np.int32) for rows, ids in sizes]
        np.save(folder / f"day_{day}_labels.npy", (tables[0][:, :1] % 2).astype(np.int32))
        np.save(folder / f"day_{day}_dense.npy", random.random((count, 13), np.float32))
        arrays: dict[str, Any] = {str(number): table for number, table in enumerate(tables)}
        np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **arrays)
    return places(root, "criteo")


def save_edges(folder: Path, ends: NDArray[np.int64], num_targets: int) -> None:
    """Write edges, of shape (2, edges), by their targets as MLPerf's ``compress_graph.py`` does."""
    folder.mkdir(parents=True)
    starts = np.searchsorted(np.sort(ends[1]), np.arange(num_targets + 1))
    torch.save(torch.from_numpy(starts), folder / "indptr.pt")
    torch.save(torch.from_numpy(ends[0][np.argsort(ends[1], kind="stable")]), folder / "indices.pt")


def igbh(root: Path) -> Mapping[str, Path]:
    """Papers of two classes, of which only the authors' features say which one it is."""
    random = np.random.default_rng(7)
    folder = root / "igbh"
    counts = {"paper": 60, "author": 20, "institute": 4, "fos": 6, "journal": 3, "conference": 3}
    labels = random.integers(0, 2, counts["paper"])
    for kind, count in counts.items():
        (folder / kind).mkdir(parents=True)
        features = random.normal(0, 0.3, (count, 12))
        if kind == "author":
            features[:, 0] += 3 * (np.arange(count) % 2)
        torch.save(torch.from_numpy(features).half(), folder / kind / "node_feat_fp16.pt")
    labels.astype(np.float32).tofile(folder / "paper" / "node_label_2K.npy")
    papers = np.arange(counts["paper"])
    of: Mapping[str, NDArray[np.int64]] = {
        "paper__written_by__author": random.integers(0, 10, counts["paper"]) * 2 + labels,
        "paper__topic__fos": papers % counts["fos"],
        "paper__published__journal": papers % counts["journal"],
        "paper__venue__conference": papers % counts["conference"],
        "author__affiliated_to__institute": np.arange(counts["author"]) % counts["institute"],
    }
    for name, targets in of.items():
        source, verb, target = name.split("__")
        ends = np.stack([np.arange(counts[source]), targets])
        save_edges(folder / "CSC" / name, ends, counts[target])
        save_edges(folder / "CSC" / f"{target}__rev_{verb}__{source}", ends[::-1], counts[source])
    cited = np.stack([papers, random.permutation(papers)])
    save_edges(folder / "CSC" / "paper__cites__paper", np.concatenate([cited, cited[::-1]], 1), counts["paper"])
    order = torch.from_numpy(random.permutation(papers))
    torch.save(order[:48].clone(), folder / "train_idx.pt")
    torch.save(order[48:].clone(), folder / "val_idx.pt")
    return places(root, "igbh")


def with_weights(data: Mapping[str, Path], name: str, root: Path) -> Mapping[str, Path]:
    """Add empty directories for the data sets that the case ``name`` declares besides."""
    return {each: data.get(each, root / each) for each in load_case(name).data_names}
