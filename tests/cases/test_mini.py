from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional
from transformers import BertConfig

from accelmark.cases.detection_mini.pytorch import BACKGROUND, Canvases, point_loss
from accelmark.cases.lora_mini.pytorch import in_capitals
from accelmark.cases.minilm_finetune.pytorch import KINDS, read_passages, split_passages
from accelmark.cases.multimodal_mini.pytorch import ITEMS, caption, captioned, words
from accelmark.cases.resnet_mini._fashion import MEAN, STD, read_split
from accelmark.cases.segmentation_mini.pytorch import mirrored
from accelmark.cases.speech_mini.pytorch import RATE_HZ, TRANSCRIPTS, Prompts, read_transcripts, spoken
from accelmark.cases.translation_mini.pytorch import CATALOGUE, characters, read_names, split_names
from accelmark.spec.errors import DataError
from accelmark.tasks.conversation.pytorch import IMAGE, PLACEHOLDER
from accelmark.tasks.detection.pytorch import Scene, overlaps
from accelmark.tasks.language.data import HELD_OUT, read_plays, read_windows
from accelmark.tasks.metrics import IGNORED
from accelmark.tasks.text.pytorch import Encoder
from tests.cases import tiny_data
from tests.cases.flops import published_flops
from tests.cases.job_of import trained
from tests.cases.test_definitions import SMALL, case_of
from tests.cases.tiny_data import write_idx

WORDS = {"comedies": "love merry jest", "histories": "king crown war", "tragedies": "death blood grief"}


@pytest.fixture(params=[False, True], ids=["plain", "gzip"])
def fashion(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Ten classes that differ in which rows are bright."""
    folder = tmp_path / "fashion"
    folder.mkdir()
    random = np.random.default_rng(0)
    for prefix, count in (("train", 200), ("t10k", 50)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = random.integers(0, 40, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 3] += 200
        tiny_data.write_idx(folder, prefix, images, labels, packed=request.param)
    return folder


def test_idx_files_are_read_compressed_or_not(fashion: Path) -> None:
    images, labels = read_split(fashion, "test")
    assert images.shape == (50, 1, 28, 28)
    assert images.dtype == np.uint8
    assert labels.tolist()[:11] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert all(image[0, 2 * label].mean() > 190 for image, label in zip(images, labels, strict=True))


@pytest.mark.parametrize("fashion", [False], indirect=True)
def test_resnet_mini_learns(tmp_path: Path, fashion: Path) -> None:
    over = {"batch_size": 20, "end.max_epochs": 6, "optimizer.lr": 0.05, "threads": 1, "precision": "fp32"}
    finished, _ = trained("resnet_mini", tmp_path, {"fashion_mnist": fashion}, over)
    assert finished["end_reason"] == "max_epochs"
    assert finished["final_metrics"]["top1"] > 0.5
    assert finished["flops_per_sample"] == published_flops("resnet_mini", case_of("resnet_mini", over).settings.model)


@pytest.mark.parametrize("fashion", [False], indirect=True)
def test_flow_mini_evaluates_with_the_same_noise_and_drops_a_tenth_of_the_classes(fashion: Path) -> None:
    over = {"batch_size": 200, "eval_batch_size": 50, "model.eval_images": 40, "loader.synthetic": False}
    case = case_of("flow_mini", over)
    case.data_dirs = {"fashion_mnist": fashion}
    (held_out,), (again,) = (list(case.eval_batches().epoch(epoch)) for epoch in (0, 1))
    assert all(torch.equal(held_out[name], again[name]) for name in held_out)
    assert held_out["latent"].shape == (40, 16, 8, 8)
    assert held_out["time"].tolist() == [index % 8 / 8 for index in range(40)]
    assert held_out["caption"].argmax(1).tolist() == [index % 10 for index in range(40)]
    pixels = functional.pixel_shuffle(held_out["latent"], 4)
    image, _ = read_split(fashion, "test")
    assert torch.allclose(pixels[0, 0, 2:30, 2:30] * STD + MEAN, torch.from_numpy(image[0, 0]).float(), atol=1e-3)
    assert torch.allclose(pixels[:, 0, :2] * STD + MEAN, torch.tensor(0.0), atol=1e-3), "the border is background"
    (batch,), (later,) = (list(case.train_batches().epoch(epoch)) for epoch in (0, 1))
    assert 5 <= int((batch["caption"].sum(1) == 0).sum()) <= 40
    assert torch.equal(batch["words"][:, 0], batch["caption"])
    assert not torch.equal(batch["noise"], later["noise"])
    assert 0 <= float(batch["time"].min()) < 0.1 < 0.9 < float(batch["time"].max()) < 1


@pytest.fixture
def plays(tmp_path: Path) -> Path:
    """Plays of a few lines, in words that tell their kind."""
    folder = tmp_path / "plays"
    random = np.random.default_rng(0)
    titles = {"comedies": ["twelfth-night", "x"], "histories": ["richard-ii", "y"], "tragedies": ["macbeth", "z"]}
    for kind, names in titles.items():
        (folder / kind).mkdir(parents=True)
        for name in names:
            lines = [f"# {name}"]
            for act in ("I", "II", "III", "IV", "V"):
                lines += [f"## ACT {act}", "### Scene 1", "_Enter all._", "**ALL**"]
                lines += [" ".join(random.choice(WORDS[kind].split(), 6)) for _ in range(20)]
            (folder / kind / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_held_out_plays_are_whole_and_only_in_the_evaluation(plays: Path) -> None:
    parts = [read_plays(plays, held_out=held).tobytes().decode() for held in (False, True)]
    for name in HELD_OUT:
        assert f"# {name}" in parts[1]
        assert f"# {name}" not in parts[0]
    (plays / "tragedies" / "macbeth.md").unlink()
    with pytest.raises(DataError, match="macbeth not found"):
        read_plays(plays, held_out=False)


DECODER: Mapping[str, Any] = {
    **{"model.hidden_size": 32, "model.intermediate_size": 48, "model.num_layers": 2, "model.seq_length": 32},
    **{"end.max_steps": 60, "threads": 1, "optimizer.lr": 1e-2},
}


def test_llama_mini_learns(tmp_path: Path, plays: Path) -> None:
    over = {**DECODER, "model.eval_windows": 32, "precision": "fp32", "batch_size": 16, "evaluate.every_steps": None}
    finished, losses = trained("llama_mini", tmp_path, {"shakespeare": plays}, over)
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert finished["final_metrics"]["eval_loss"] < 3.0
    assert finished["final_metrics"]["bits_per_byte"] == pytest.approx(
        finished["final_metrics"]["eval_loss"] / math.log(2)
    )


def test_lora_mini_learns_and_changes_only_its_low_rank_matrices(tmp_path: Path, plays: Path) -> None:
    over: dict[str, Any] = {"model.eval_windows": 8, "model.seq_length": 32, "batch_size": 4, "threads": 1}
    over |= {"end.max_steps": 12, "checkpoint.every_steps": 12, "optimizer.lr": 1e-2}
    _, losses = trained("lora_mini", tmp_path, {"shakespeare": plays}, over)
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.3, losses
    case = case_of("lora_mini", over)
    before = case.build_model().state_dict()
    after = torch.load(tmp_path / "run/checkpoints/step000000012/weights.pt", weights_only=True)["model"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith((".up.weight", ".down.weight"))}
    assert sum(before[name].numel() for name in changed) == 98_304


def test_moe_mini_learns_and_spreads_tokens_over_its_experts(tmp_path: Path, plays: Path) -> None:
    over = {**DECODER, "model.eval_samples": 32, "checkpoint.every_steps": 60}
    finished, _ = trained("moe_mini", tmp_path, {"shakespeare": plays}, over)
    assert finished["final_metrics"]["eval_loss"] < 3.0
    model = case_of("moe_mini", over).build_model()
    weights = torch.load(tmp_path / "run/checkpoints/step000000060/weights.pt", weights_only=True)["model"]
    model.load_state_dict(weights)
    tokens = torch.from_numpy(read_windows(plays, 32, 32)).long()
    with torch.no_grad():
        scores = model.get_submodule("net")(tokens, output_router_logits=True).router_logits
    for layer in scores:
        chosen = layer.topk(2).indices.flatten().bincount(minlength=8) / layer.shape[0]
        assert 0 < chosen.min() < chosen.max() < 0.9, chosen.tolist()  # collapsed, two experts would have 1.0 each


def test_capitals_replace_letters_and_nothing_else() -> None:
    text = torch.tensor(list(b"Enter MACBETH, {a} z`\xc3\xa4"), dtype=torch.uint8)
    assert bytes(in_capitals(text).tolist()) == b"ENTER MACBETH, {A} Z`\xc3\xa4"


def test_passages_hold_what_is_spoken_and_nothing_else(plays: Path) -> None:
    passages = read_passages(plays, 100)
    assert {passage.act for passage in passages} == {"I", "II", "III", "IV", "V"}
    for passage in passages:
        assert set(passage.text.split()) <= set(WORDS[KINDS[passage.kind]].split())
        assert 50 <= len(passage.text) < 150
    held_out = split_passages(passages, held_out=True)
    assert {passage.act for passage in held_out} == {"IV"}
    assert not {passage.act for passage in split_passages(passages, held_out=False)} & {"IV"}
    some = split_passages(passages, held_out=True, limit=5)
    assert len(some) == 5
    assert split_passages(list(reversed(passages)), held_out=True, limit=5) == some


def test_minilm_finetune_learns(tmp_path: Path, plays: Path) -> None:
    """From a tiny encoder with random weights, and a tokenizer of the plays' words."""
    folder = tmp_path / "minilm"
    folder.mkdir()
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = BertConfig(**sizes, num_attention_heads=4, vocab_size=100, max_position_embeddings=64)
    torch.manual_seed(0)
    state = Encoder(config).state_dict() | {"pooler.dense.weight": torch.zeros(32, 32)}
    save_file(state, folder / "model.safetensors")
    tiny_data.save_tokenizer(folder / "tokenizer.json", list(WORDS.values()), ["[PAD]"])
    over = {**DECODER, "model.num_layers": 1, "model.num_heads": 4, "model.vocab_size": 100, "model.max_positions": 64}
    over |= {"model.passage_chars": 100, "end.max_steps": 30, "precision": "fp32", "optimizer.lr": 1e-3}
    finished, _ = trained("minilm_finetune", tmp_path, {"shakespeare": plays, "minilm": folder}, over)
    assert finished["final_metrics"]["accuracy"] > 0.9, "one word tells the kind"


LETTERS = dict(zip("abcdefgh", "абцдефгх", strict=True))


@pytest.fixture
def names(tmp_path: Path) -> Path:
    """Words of four letters, each for one letter of the other alphabet, in the binary format of GNU gettext."""
    words = [f"{a}{b}{c}a" for a in LETTERS for b in LETTERS for c in "abcd"]
    texts = {word: "".join(LETTERS[letter] for letter in word) for word in words}
    more = {"Old Abba, Cab": "абба", "Cab (old)": "цаб", "A name of too many letters": "абцдефгх"}
    pairs = sorted({"": "Content-Type: text/plain; charset=UTF-8\n", **texts, **more}.items())
    tables, content = [b"", b""], b""
    start = 28 + 16 * len(pairs)
    for column in (0, 1):
        for pair in pairs:
            text = pair[column].encode()
            tables[column] += struct.pack("<2I", len(text), start + len(content))
            content += text + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    tiny_data.write(tmp_path / "iso_codes" / CATALOGUE, head + b"".join(tables) + content)
    return tmp_path / "iso_codes"


def test_names_are_read_without_those_that_repeat_others(names: Path) -> None:
    found = read_names(names, 16)
    assert len(found) == 256
    assert found[1] == ("aaba", "ааба")
    held_out, others = (split_names(found, held_out=held) for held in (True, False))
    assert 16 <= len(held_out) <= 56
    assert len(held_out) + len(others) == 256
    tokenizer = characters(found)
    tokens = tokenizer.encode("cafe-").ids
    assert len(tokens) == 5
    assert tokens[-1] == 2, "an unknown letter"
    assert tokenizer.decode([*tokens[:4], 1, 0], skip_special_tokens=True) == "cafe"


@pytest.mark.heavy
def test_translation_mini_learns(tmp_path: Path, names: Path) -> None:
    over: dict[str, Any] = {"model.hidden_size": 32, "model.intermediate_size": 64, "model.num_layers": 1}
    over |= {"model.source_length": 6, "model.target_length": 6, "end.max_steps": 120}
    over |= {"threads": 1, "precision": "fp32", "optimizer.lr": 1e-2, "batch_size": 32}
    finished, losses = trained("translation_mini", tmp_path, {"iso_codes": names}, over)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5]), losses
    assert finished["final_metrics"]["cer"] < 0.7, "guessing a few letters gives about 0.85"


LETTER_S = 0.12


@pytest.fixture
def data(tmp_path: Path) -> Mapping[str, Path]:
    """Prompts of three and four letters, and transcripts with one more that was not recorded."""
    texts = [*map("".join, product("abcd", repeat=3)), *map("".join, product("abc", "cd", "ad", "bd"))]
    lines = ["; a comment", "missing: Nobody said this."]
    for number, text in enumerate(texts):
        name = f"digits/{number}" if number % 2 else f"prompt-{number}"
        hertz = [300 * (1 + "abcd ".index(letter)) for letter in text]
        tiny_data.save_tones(tmp_path / "prompts" / f"{name}.wav", hertz, LETTER_S, RATE_HZ)
        lines.append(f"{name}: {text.capitalize()}.")
    (tmp_path / "transcripts").mkdir()
    (tmp_path / "transcripts" / TRANSCRIPTS).write_text("\n".join(lines), encoding="utf-8")
    return {"asterisk_prompts": tmp_path / "prompts", "asterisk_transcripts": tmp_path / "transcripts"}


def prompts_of(data: Mapping[str, Path], *, train: bool) -> Prompts:
    return Prompts(data["asterisk_prompts"], read_transcripts(data["asterisk_transcripts"]), train=train)


@pytest.mark.parametrize(
    ("transcript", "words"),
    [
        ("Press 1, or 2 to reject it", "press one or two to reject it"),
        ("followed by # or just *.", "followed by pound or just star"),
        ('IAX (note: does not say "2")', "iax"),
        ("dash [-]", "dash"),
        ("You've got the 8500 extension.", None),
        ("3D audio enabled", None),
        ("<beep ascending>", None),
    ],
)
def test_a_transcript_becomes_the_words_that_are_said(transcript: str, words: str | None) -> None:
    assert spoken(transcript) == words


def test_no_text_is_trained_on_and_held_out(data: Mapping[str, Path]) -> None:
    splits = [prompts_of(data, train=train) for train in (True, False)]
    texts = [{split.row(index)[0] for index in range(len(split))} for split in splits]
    assert len(texts[0] | texts[1]) == 88
    assert not texts[0] & texts[1]
    assert 4 <= len(texts[1]) <= 25
    assert not any("nobody" in text for split in texts for text in split)


def test_training_joins_prompts_at_speeds_of_their_own_and_evaluation_does_not(data: Mapping[str, Path]) -> None:
    train, held_out = (prompts_of(data, train=train) for train in (True, False))
    audio, text = train.utterance(3, 2.0, seed=1)
    again: tuple[npt.NDArray[np.int16], str] = train.utterance(3, 2.0, seed=1)
    other, _ = train.utterance(3, 2.0, seed=2)
    assert text.startswith(train.row(3)[0] + " ")
    assert 1.0 * RATE_HZ < len(audio) <= 2.0 * RATE_HZ
    assert (audio.shape, text) == (again[0].shape, again[1])
    assert (audio == again[0]).all()
    assert len(other) != len(audio)
    letters = len(text.replace(" ", ""))
    assert 0.9 * letters * LETTER_S * RATE_HZ < len(audio) < 1.12 * letters * LETTER_S * RATE_HZ
    alone, said = held_out.utterance(0, 2.0, seed=1)
    assert (len(alone), said) == (round(LETTER_S * RATE_HZ) * len(said), held_out.row(0)[0])


def test_frames_are_as_many_as_logits() -> None:
    case = case_of("speech_mini", {"model.hidden_size": 16, "model.num_layers": 1})
    model: Any = case.build_model()
    for length in (8000, 8001, 8319, 8320, 12345):
        logits = model(torch.zeros(1, length, dtype=torch.int16))
        assert logits.shape == (1, int(model.frames(torch.tensor(length))), 32)


@pytest.mark.heavy
def test_speech_mini_learns(tmp_path: Path, data: Mapping[str, Path]) -> None:
    over: dict[str, Any] = {"model.hidden_size": 48, "model.num_layers": 1, "model.train_seconds": 2.0}
    over |= {"model.eval_seconds": 2.0, "end.max_steps": 120, "threads": 1, "precision": "fp32", "optimizer.lr": 1e-2}
    finished, losses = trained("speech_mini", tmp_path, data, over)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert finished["final_metrics"]["cer"] < 0.5, "letters that are guessed have about 0.75"


def items() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Rectangles of two shapes and levels of brightness: class 0 is wide and dark, class 1 is high and bright."""
    images = np.zeros((20, 1, 28, 28), np.uint8)
    images[::2, 0, 9:19, 2:26], images[1::2, 0, 2:26, 9:19] = 110, 250
    return images, np.arange(20) % 2


def test_boxes_surround_their_items_exactly() -> None:
    canvases = Canvases(*items(), 40, side=80, most=4)
    counts = []
    for index in range(len(canvases)):
        scene = canvases.scene(index)
        pixels = np.asarray(scene.image)[..., 0] >= 16
        inside = np.zeros_like(pixels)
        for box, label in zip(scene.boxes.astype(int), scene.labels, strict=True):
            left, top, right, bottom = box
            part = pixels[top:bottom, left:right]
            assert part[0].any() and part[-1].any() and part[:, 0].any() and part[:, -1].any()  # noqa: PT018
            assert ((right - left) > (bottom - top)) == (label == 0)
            inside[top:bottom, left:right] = True
        assert not (pixels & ~inside).any(), "nothing is outside of the boxes"
        for number, box in enumerate(scene.boxes):
            assert overlaps(scene.boxes[:number], box).max(initial=0) <= 0.05
        counts.append(len(scene.boxes))
    assert set(counts) == {1, 2, 3, 4}
    again = canvases.scene(7)
    assert (np.asarray(again.image) == np.asarray(canvases.scene(7).image)).all()
    assert not (np.asarray(again.image) == np.asarray(canvases.scene(8).image)).all()


def test_each_pixel_has_the_class_of_its_item() -> None:
    canvases = Canvases(*items(), 40, side=80, most=4)
    for index in range(len(canvases)):
        scene = canvases.scene(index)
        image, segments = canvases.pair(index)
        pixels = np.asarray(image)[..., 0]
        assert (np.asarray(scene.image)[..., 0] == pixels).all()
        assert ((pixels < 16) == (segments == BACKGROUND)).all()
        assert (segments[pixels > 110] == 2).all(), "only the second class is brighter"
        for label in (0, 1):
            inside = np.zeros_like(pixels, bool)
            for left, top, right, bottom in scene.boxes[scene.labels == label].astype(int):
                inside[top:bottom, left:right] = True
            assert not (inside < (segments == label + 1)).any(), "pixels of a class are in its boxes"
        assert set(np.unique(segments)) == {*(scene.labels + 1), BACKGROUND}


def test_half_of_the_canvases_are_mirrored_with_their_classes() -> None:
    image, segments = Canvases(*items(), 1, side=80, most=4).pair(0)
    same, mirror = mirrored(image, segments, lambda: 0.4), mirrored(image, segments, lambda: 0.6)
    assert (np.asarray(same[0]) == np.asarray(image)).all()
    assert (same[1] == segments).all()
    assert (np.asarray(mirror[0]) == np.asarray(image)[:, ::-1]).all()
    assert (mirror[1] == segments[:, ::-1]).all()


def test_a_peak_is_one_detection_of_its_class() -> None:
    case = case_of("detection_mini", {"model.hidden_size": 8})
    logits = torch.full((1, 20 * 20, 10), -9.0)
    logits[0, 5 * 20 + 7, 3], logits[0, 5 * 20 + 8, 3], logits[0, 5 * 20 + 8, 4] = 2.0, 1.0, 0.0
    score, label, place = case.scored(logits)  # type: ignore[attr-defined]
    assert list(zip(label[0, :2].tolist(), place[0, :2].tolist(), strict=True)) == [(3, 107), (4, 108)]
    assert score[0, :2].tolist() == pytest.approx([1 / (1 + math.exp(-2)), 0.5])
    assert float(score[0, 2]) < 0.001, "the lower logit next to the peak of its class is left out"


def test_the_loss_is_that_of_the_centres_and_of_the_boxes() -> None:
    labels = [
        {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.30, 0.60, 0.2, 0.4]])},
        {"class_labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)},
    ]
    size, boxes = torch.Size((10, 10)), torch.full((2, 100, 4), 0.5)
    boxes[0, 63] = labels[0]["boxes"][0]
    logits = torch.full((2, 100, 2), -20.0)
    logits[0, 63, 1] = 20.0
    assert float(point_loss(logits, boxes, labels, size)) == pytest.approx(0, abs=1e-4)
    boxes[0, 63, 2] = 0.1
    assert float(point_loss(logits, boxes, labels, size)) == pytest.approx(0.5, abs=1e-4)
    near, far = logits.clone(), logits.clone()
    near[0, 73, 1], far[0, 9, 1] = 4.0, 4.0
    losses = [float(point_loss(each, boxes, labels, size)) for each in (near, far)]
    assert 0.5 < losses[0] < losses[1] - 1, losses
    assert losses[1] == pytest.approx(0.5 + 0.982**2 * 4.018, rel=1e-3)
    logits[0, 63, 1] = 0.0
    assert float(point_loss(logits, boxes, labels, size)) == pytest.approx(0.5 + 0.25 * math.log(2), abs=1e-4)


@pytest.fixture
def rectangles(tmp_path: Path) -> Path:
    images, labels = items()
    for prefix in ("train", "t10k"):
        write_idx(tmp_path, prefix, images[:, 0], labels.astype(np.uint8))
    return tmp_path


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "library", "metric", "least"),
    [("detection_mini", "pycocotools", "map50", 0.3), ("segmentation_mini", "transformers", "miou", 0.7)],
)
def test_the_case_learns(tmp_path: Path, rectangles: Path, name: str, library: str, metric: str, least: float) -> None:
    pytest.importorskip(library)
    over: dict[str, Any] = {"model.hidden_size": 16, "model.train_images": 1600, "model.eval_images": 50, "threads": 1}
    finished, losses = trained(name, tmp_path, {"fashion_mnist": rectangles}, over)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert finished["final_metrics"][metric] > least


NAME = "multimodal_mini"


def scene_of(boxes: list[tuple[int, int, int, int]], labels: list[int]) -> Scene:
    none = np.zeros(len(labels), np.int64)
    return Scene(Image.new("RGB", (64, 64)), np.array(boxes, np.float64), np.array(labels), none)


def test_a_caption_says_number_places_and_items() -> None:
    assert caption(scene_of([(0, 0, 20, 20)], [8])) == "one item: upper left bag"
    boxes = [(40, 40, 60, 60), (0, 40, 20, 60), (30, 2, 50, 22), (32, 0, 60, 20)]
    assert caption(scene_of(boxes, [0, 9, 6, 4])) == (
        "four items: upper right coat, upper right shirt, lower left boot, lower right t-shirt"
    )
    assert caption(scene_of([(21, 21, 42, 43)], [1])) == "one item: lower left trouser"


def test_every_caption_is_made_of_the_tokenizers_words() -> None:
    tokenizer = words()
    assert tokenizer.get_vocab_size() == int(case_of(NAME, {}).settings.model["vocab_size"] or 0)
    canvases = Canvases(*items(), 40, side=64, most=3)
    longest = 0
    for index in range(len(canvases)):
        text, [(start, end)], _ = captioned(canvases, index, 64)
        encoded = tokenizer.encode(text[start:end])
        assert IMAGE not in encoded.ids
        assert text == PLACEHOLDER + text[start:end]
        assert "".join(encoded.tokens) == text[start:end].replace(" ", "")
        longest = max(longest, len(encoded.ids))
    assert longest == 15
    most = "three items: " + ", ".join(f"lower right {name}" for name in ITEMS[:3])
    assert len(tokenizer.encode(f"{most}</s>")) == 15 <= 32 - 16


def test_the_caption_is_learned_after_the_places_of_the_image() -> None:
    case: Any = case_of(NAME, {})
    canvases = Canvases(*items(), 4, side=64, most=3)
    sample = case.samples_of(4, partial(captioned, canvases), words()).read(2, torch.Generator())
    tokens, labels = sample["tokens"], sample["labels"]
    assert tokens.shape == labels.shape == (32,)
    assert (tokens[:16] == IMAGE).all()
    learned = labels[labels != IGNORED]
    said = words().decode(learned.tolist(), skip_special_tokens=True)
    assert said.replace(" ", "") == caption(canvases.scene(2)).replace(" ", "")
    assert int(learned[-1]) == 1
    assert (tokens[16 : 16 + len(learned)] == learned).all()
    assert sample["image"].shape == (3, 64, 64)


def test_features_are_those_of_the_packaged_network_and_do_not_change() -> None:
    case: Any = case_of(NAME, {})
    model: Any = case.build_model().train()
    tower, image = model.net.model.vision_tower, case.synthetic_batch(3)["image"]
    before = {name: value.clone() for name, value in tower.state_dict().items()}
    features = tower(model.normalised(image)).last_hidden_state
    assert features.shape == (3, 16, 258)
    maps = tower.network.eval().features(model.normalised(image)[:, :1])
    assert torch.equal(features[:, 6, :256].view(3, 64, 2, 2), maps[:, :, 2:4, 4:6]), "four places are one"
    assert features[0, [0, 3, 15], 256:].tolist() == [[-1, -1], [-1, 1], [1, 1]]
    torch.autograd.backward(case.loss(model, case.synthetic_batch(2)))
    assert all(torch.equal(before[name], value) for name, value in tower.state_dict().items())
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {name for name, _ in model.named_parameters() if "vision_tower" in name}


def test_a_caption_is_exact_where_each_of_its_tokens_is_the_likeliest() -> None:
    case: Any = case_of(NAME, SMALL[NAME])
    batch = case.synthetic_batch(4)
    labels = batch["labels"]
    labels[3] = IGNORED
    logits = torch.zeros(4, labels.shape[1], 24)
    logits[:, :-1].scatter_(2, labels[:, 1:].clamp(min=0)[..., None], 5.0)
    logits[1, labels.shape[1] - 2] = 0.0  # the last token of the second caption
    logits[1, labels.shape[1] - 2, 0] = 9.0

    class Fixed(torch.nn.Module):
        def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return logits

    metrics = case.metrics({name: float(value) for name, value in case.eval_sums(Fixed(), batch).items()})
    assert metrics["exact_match"] == 0.5, "the second is wrong, the fourth has no answer"


@pytest.mark.heavy
def test_multimodal_mini_learns(tmp_path: Path, rectangles: Path) -> None:
    over: dict[str, Any] = {"model.train_images": 4800, "model.eval_images": 100, "model.num_layers": 2, "threads": 1}
    over |= {"model.most_items": 1, "model.hidden_size": 64}
    finished, losses = trained(NAME, tmp_path, {"fashion_mnist": rectangles}, over)
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5]), losses
    assert finished["final_metrics"]["exact_match"] > 0.4, "guesses have 1 in 8"
