from __future__ import annotations

import math
import struct
import wave
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional

from accelmark.cases.llama_mini._plays import HELD_OUT, read_plays, read_windows
from accelmark.cases.lora_mini.pytorch import in_capitals
from accelmark.cases.minilm_finetune.pytorch import KINDS, read_passages, split_passages
from accelmark.cases.resnet_mini._fashion import MEAN, STD, read_split
from accelmark.cases.speech_mini.pytorch import RATE_HZ, TRANSCRIPTS, Prompts, read_transcripts, spoken
from accelmark.cases.translation_mini.pytorch import CATALOGUE, characters, read_names, split_names
from accelmark.spec.errors import DataError
from accelmark.tasks.text.pytorch import Encoder, EncoderConfig
from tests.cases import tiny_data
from tests.cases.flops import published_flops
from tests.cases.job_of import trained
from tests.cases.test_definitions import case_of

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


@pytest.fixture
def minilm(tmp_path: Path) -> Path:
    """A tiny encoder with random weights, and a tokenizer that knows the plays' words."""
    folder = tmp_path / "minilm"
    folder.mkdir()
    config = EncoderConfig(
        hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, vocab_size=16, max_positions=64
    )
    torch.manual_seed(0)
    state = Encoder(config).state_dict() | {"pooler.dense.weight": torch.zeros(32, 32)}
    save_file(state, folder / "model.safetensors")
    words = ["[PAD]", "[UNK]", *" ".join(WORDS.values()).split()]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_minilm_finetune_learns(tmp_path: Path, plays: Path, minilm: Path) -> None:
    over = {**DECODER, "model.num_layers": 1, "model.num_heads": 4, "model.vocab_size": 16, "model.max_positions": 64}
    over |= {"model.passage_chars": 100, "end.max_steps": 30, "precision": "fp32", "optimizer.lr": 1e-3}
    finished, _ = trained("minilm_finetune", tmp_path, {"shakespeare": plays, "minilm": minilm}, over)
    assert finished["final_metrics"]["accuracy"] > 0.9, "one word tells the kind"


LETTERS = dict(zip("abcdefgh", "абцдефгх", strict=True))


def write_catalogue(path: Path, texts: Mapping[str, str]) -> None:
    """Write a catalogue of GNU gettext in its binary format."""
    pairs = sorted({"": "Content-Type: text/plain; charset=UTF-8\n", **texts}.items())
    tables, content = [b"", b""], b""
    start = 28 + 16 * len(pairs)
    for column in (0, 1):
        for pair in pairs:
            text = pair[column].encode()
            tables[column] += struct.pack("<2I", len(text), start + len(content))
            content += text + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + b"".join(tables) + content)


@pytest.fixture
def names(tmp_path: Path) -> Path:
    """Words of four letters, each of which has one letter of the other alphabet."""
    words = [f"{a}{b}{c}a" for a in LETTERS for b in LETTERS for c in "abcd"]
    texts = {word: "".join(LETTERS[letter] for letter in word) for word in words}
    more = {"Old Abba, Cab": "абба", "Cab (old)": "цаб", "A name of too many letters": "абцдефгх"}
    write_catalogue(tmp_path / "iso_codes" / CATALOGUE, {**texts, **more})
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
    assert finished["final_metrics"]["cer"] < 0.7, "words of which a few letters are guessed have about 0.85"


LETTER_S = 0.12


def write_prompt(path: Path, text: str, rate_hz: int = RATE_HZ) -> None:
    """Write a recording in which each letter is a tone of its own."""
    times = np.arange(round(LETTER_S * RATE_HZ)) / RATE_HZ
    tones = [np.sin(2 * np.pi * 300 * (1 + "abcd ".index(letter)) * times) for letter in text]
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes((8000 * np.concatenate(tones)).astype("<i2").tobytes())


@pytest.fixture
def data(tmp_path: Path) -> Mapping[str, Path]:
    """Prompts of three and four letters, and transcripts with one more that was not recorded."""
    texts = [*map("".join, product("abcd", repeat=3)), *map("".join, product("abc", "cd", "ad", "bd"))]
    lines = ["; a comment", "missing: Nobody said this."]
    for number, text in enumerate(texts):
        name = f"digits/{number}" if number % 2 else f"prompt-{number}"
        write_prompt(tmp_path / "prompts" / f"{name}.wav", text)
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
