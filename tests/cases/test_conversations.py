"""Conversations about images in LLaVA's layout, and the model that answers them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from accelmark.spec.errors import DataError
from accelmark.tasks.conversation import pytorch as conversation
from accelmark.tasks.conversation.pytorch import IMAGE, Conversations, load_parts
from accelmark.tasks.metrics import IGNORED
from accelmark.tasks.text.pytorch import read_tokenizer
from tests.cases import tiny_data
from tests.cases.test_definitions import SMALL, case_of

SIZES = {**SMALL["llava1_5_7b"], "model.vocab_size": 400, "model.seq_length": 180, "model.eval_samples": 2}


def case_on(root: Path) -> Any:
    case: Any = case_of("llava1_5_7b", SIZES)
    case.data_dirs = tiny_data.llava(root)
    return case


def test_a_conversation_is_written_in_vicunas_format(tmp_path: Path) -> None:
    conversations = Conversations(tiny_data.llava(tmp_path)["llava_instruct"])
    text, answers, image = conversations.read(0, 30)
    assert text.startswith(
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives"
    )
    colour = "red" if "red" in text else "green"
    expected = f"user's questions. USER: <image>\nColour? ASSISTANT: {colour}</s>USER: Sure? ASSISTANT: yes</s>"
    assert text.endswith(expected)
    assert [text[start:end] for start, end in answers] == [f"{colour}</s>", "yes</s>"]
    assert image is not None
    assert image.shape == (3, 30, 30)
    assert image[:, 0, 15].tolist() == [122, 116, 104], "filled up to a square"
    assert image[:, 15, 0].max() > 200
    assert conversations.read(24, 8)[2] is None


def test_a_large_list_of_samples_is_read_in_parts_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "_CHUNK", 1000)
    turns = [
        {"from": "human", "value": "Wo ist das Café? 日本, [{,}]"},
        {"from": "gpt", "value": "\u00e4 ".join("abc") * 50},
    ]
    samples = [{"id": number, "conversations": turns[: 2 * (number % 2)]} for number in range(2000)]
    file = tmp_path / "conversations" / "a.json"
    file.parent.mkdir()
    file.write_text(json.dumps(samples, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    tracemalloc.start()
    conversations = Conversations(tmp_path)
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(conversations), size < 100 * 2000, peak < 200 * 2000) == (2000, True, True)
    expected = "USER: Wo ist das Café? 日本, [{,}] ASSISTANT: " + turns[1]["value"] + "</s>"
    assert all(conversations.read(index, 8)[0].endswith(expected) for index in range(1, 2000, 2))
    with pytest.raises(DataError, match=r"a.json: sample 0: expected 'human' and 'gpt' in turn"):
        conversations.read(0, 8)


@pytest.mark.parametrize("content", ["", "[]", "{}", '[{"a": 1}', '[{"a": 1} {"b": 2}]', '[{"a": 1}] 2', '[{"a": 1},'])
def test_what_is_no_list_of_samples_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "conversations").mkdir()
    (tmp_path / "conversations" / "a.json").write_text(content)
    with pytest.raises(DataError, match=r"a.json: is not a list of samples"):
        Conversations(tmp_path)


def test_only_answers_have_labels_and_the_image_has_its_places(tmp_path: Path) -> None:
    case = case_on(tmp_path)
    samples = case.dataset(train=True)
    held_out = case.dataset(train=False)
    assert (len(samples), len(held_out)) == (22, 3)
    found = samples.read(0, torch.Generator())
    tokenizer = read_tokenizer(tmp_path / "llava_parts/vicuna/tokenizer.json", 400)
    assert found["tokens"].shape == found["labels"].shape == (180,)
    assert int((found["tokens"] == IMAGE).sum()) == 4
    labels = found["labels"]
    learned = tokenizer.decode(labels[labels != IGNORED].tolist(), skip_special_tokens=False)
    assert learned.replace(" ", "") in ("red</s>yes</s>", "green</s>yes</s>")
    assert (found["tokens"][labels != IGNORED] == labels[labels != IGNORED]).all()
    text = held_out.read(2, torch.Generator())
    assert not (text["tokens"] == IMAGE).any()
    assert not text["image"].any()


def test_logits_after_the_image_depend_on_it_and_frozen_weights_get_no_gradient() -> None:
    case = case_of("llava1_5_7b", SMALL["llava1_5_7b"])
    model, batch = case.build_model(), case.synthetic_batch(2)
    changed = {**batch, "image": 255 - batch["image"]}
    with torch.no_grad():
        logits, others = (model(each["image"], each["tokens"]) for each in (batch, changed))
    assert torch.equal(logits[:, 0], others[:, 0])
    assert not torch.isclose(logits[:, 5:], others[:, 5:]).all(-1).any()
    torch.autograd.backward(case.loss(model, batch))
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {name for name, _ in model.named_parameters() if "vision_tower" in name}
    no_answer = {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}
    assert float(case.loss(model, no_answer).detach()) == 0


def test_the_model_is_transformers_own_with_the_same_parts(tmp_path: Path) -> None:
    case = case_on(tmp_path)
    case.data_dirs, data = {}, case.data_dirs
    model, batch = case.build_model().eval(), case.synthetic_batch(2)
    tiny_data.save_llava_parts(model.net, data["llava_parts"])
    case.data_dirs = data
    loaded = case.build_model().eval()
    net = loaded.net
    with torch.no_grad():
        expected = net(input_ids=batch["tokens"], pixel_values=loaded.normalised(batch["image"])).logits
        assert torch.allclose(loaded(batch["image"], batch["tokens"]), expected, atol=1e-5)
        assert torch.allclose(model(batch["image"], batch["tokens"]), expected, atol=1e-2), (
            "the projector is stored in fp16"
        )
    (data["llava_parts"] / "projector/mm_projector.bin").write_bytes(b"x")
    with pytest.raises(DataError, match=r"mm_projector.bin: is not the projector's weights"):
        load_parts(net, data["llava_parts"])
