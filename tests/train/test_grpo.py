"""Group relative policy optimization against its formulas, and its batches and rollouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from accelmark.cases.grpo_mini.pytorch import END, SIGNS, additions
from accelmark.spec.errors import RequestError
from accelmark.tasks.reinforcement.pytorch import Grpo, advantages, divergence, objective
from tests.cases.test_definitions import case_of

UNTRAINED = {"model.pretrained": False, "model.num_layers": 1, "batch_size": 2, "model.steps_per_rollout": 3}


def grpo(**over: object) -> Grpo:
    case = case_of("grpo_mini", {**UNTRAINED, **{key.replace("__", "."): value for key, value in over.items()}})
    assert isinstance(case, Grpo)
    return case


class Written(nn.Module):
    """A policy that writes given answers with certainty, whatever the prompt."""

    def __init__(self, answers: list[str]) -> None:
        super().__init__()
        self.answers = answers

    def forward(self, tokens: Tensor) -> Tensor:
        position = tokens.shape[1] - len("37+48=")
        chosen = torch.tensor([SIGNS.index(answer[position]) for answer in self.answers])
        logits = torch.full((*tokens.shape, len(SIGNS)), -100.0)
        logits[torch.arange(len(tokens)), -1, chosen] = 100.0
        return logits


def test_additions_are_all_pairs_and_the_held_out_ones_are_in_no_other_set() -> None:
    train, held_out = additions(held_out=False), additions(held_out=True)
    texts = ["".join(SIGNS[token] for token in row) for row in held_out["prompt"].tolist()]
    answers = ["".join(SIGNS[token] for token in row).rstrip("$") for row in held_out["answer"].tolist()]
    assert all(sum(map(int, text[:-1].split("+"))) == int(answer) for text, answer in zip(texts, answers, strict=True))
    both = {tuple(row) for part in (train, held_out) for row in part["prompt"].tolist()}
    assert len(both) == len(train["prompt"]) + len(held_out["prompt"]) == 8100


def test_an_answer_counts_up_to_its_end_and_is_right_or_wrong() -> None:
    prompt = torch.tensor([[SIGNS.index(sign) for sign in "37+48="]])
    answer = torch.tensor([[SIGNS.index(sign) for sign in "85$$"]])
    batch = {"prompt": prompt, "answer": answer}
    found = grpo()._roll_out(Written(["85$$", "85$7", "8585", "$$$$", "84$$"]), batch, torch.full((1, 5, 4), 0.5))
    assert found.rewards.tolist() == [1, 1, 0, 0, 0]
    assert found.mask.sum(1).tolist() == [3, 3, 4, 1, 3]
    assert found.log_probabilities.exp().tolist() == [[1.0] * 4] * 5


def test_sampling_follows_the_probabilities_of_the_policy() -> None:
    class Fixed(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            share = torch.tensor([0.5, 0.25, 0.25] + [0.0] * (len(SIGNS) - 3))
            return share.log().clamp_min(-1e4).expand(*tokens.shape, -1)

    batch = {"prompt": torch.zeros(1, 6, dtype=torch.int64), "answer": torch.full((1, 4), END)}
    noise = torch.rand(1, 5000, 4, generator=torch.Generator().manual_seed(0))
    written = grpo()._roll_out(Fixed(), batch, noise).tokens[:, -4:]
    shares = torch.bincount(written.flatten(), minlength=3) / written.numel()
    assert shares.tolist()[:3] == pytest.approx([0.5, 0.25, 0.25], abs=0.01)


def test_advantages_are_relative_to_the_group() -> None:
    found = advantages(torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1]), 4)
    assert found.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0], rel=1e-3)


def test_a_ratio_beyond_the_clip_is_neither_rewarded_nor_followed() -> None:
    log = torch.tensor([[0.5, 0.1, -0.5]], requires_grad=True)
    gains = objective(log, torch.zeros(1, 3), torch.tensor([2.0]), 0.2)
    assert gains.tolist()[0] == pytest.approx([2.4, 2 * 1.1052, 2 * 0.6065], rel=1e-3)
    torch.autograd.backward(gains.sum())
    assert log.grad is not None
    assert log.grad[0, 0] == 0
    assert log.grad[0, 1] > 0
    worse = objective(log.detach(), torch.zeros(1, 3), torch.tensor([-2.0]), 0.2)
    assert worse.tolist()[0] == pytest.approx([-2 * 1.6487, -2 * 1.1052, -1.6], rel=1e-3), (
        "the minimum, also below zero"
    )


def test_the_divergence_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    log = torch.tensor([-1.0, -2.0])
    assert divergence(log, log).tolist() == [0, 0]
    assert divergence(log, log + torch.tensor([0.3, -0.3])).tolist() == pytest.approx([0.04986, 0.04082], rel=1e-3)


def test_a_rollout_serves_its_parts_and_only_the_first_is_on_policy() -> None:
    case = grpo()
    policy = case.build_model()
    calls: list[object] = []
    policy.register_forward_hook(lambda *call: calls.append(call))
    batches = case.train_batches().epoch(0)
    seen = []
    for _ in range(6):
        batch = next(batches)
        calls.clear()
        assert torch.isfinite(case.loss(policy, batch))
        seen.append((int(batch["part"][0]), len(batch["prompt"]), len(calls)))
    assert seen == [(0, 6, 5), (1, 6, 1), (2, 6, 1)] * 2, (
        "four forward passes for an answer of four tokens, and one to train"
    )


def test_a_checkpoint_between_the_parts_of_a_rollout_is_refused() -> None:
    with pytest.raises(RequestError, match="4 optimizer steps end between the 3 batches of a rollout"):
        grpo(checkpoint__every_steps=4).build_model()
    grpo(checkpoint__every_steps=6).build_model()
