"""Group relative policy optimization with verifiable rewards (Shao et al. 2024, arXiv:2402.03300, section 4.1).

For each problem, the policy writes a group of answers (rollouts). An answer's advantage is its reward relative to its
group; the policy is updated by a clipped objective with a penalty for its distance from the initial policy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from accelmark.frameworks.pytorch.batches import TaskFamily, TensorBatches, generator_for
from accelmark.frameworks.pytorch.case import Batch, Batches
from accelmark.frameworks.pytorch.model.identity import meta_copy
from accelmark.spec.errors import RequestError

_EPSILON: Final = 1e-4
"""Added to the standard deviation of a group's rewards; a group of equal rewards has advantages of 0."""


class Rollouts(NamedTuple):
    """Answers of the policy, group after group; tensors have the shape (answers, answer length) unless stated."""

    tokens: Tensor
    """Prompts and answers, shape (answers, prompt length + answer length)."""
    mask: Tensor
    """1 up to each answer's first end token, and for it; 0 after it."""
    log_probabilities: Tensor
    """Of each token of the answers, by the policy that wrote them."""
    rewards: Tensor
    """Shape (answers)."""


class Grpo(TaskFamily):
    """Problems as tensors: ``prompt`` (problems, prompt length) and ``answer`` (problems, answer length).

    Answers are verified by comparison, and filled with ``end_token``. The rollouts of a batch are trained on in
    ``steps_per_rollout`` parts of ``batch_size`` problems: the later ones are off-policy, which the clipping is for.
    Random numbers come with the batches, so that a step can be repeated on any device.

    Settings under ``model``: ``group_size``, ``steps_per_rollout``, ``clip`` and ``kl_coefficient`` (epsilon and beta
    of the paper's equation 3).
    """

    ratios: ClassVar = {
        "pass_rate": ("passed", "count"),
        "pass_rate_of_group": ("passed_once", "count"),
        "reward": ("rewards", "count"),
        "rollout_tokens": ("tokens", "count"),
    }
    """Pass rate of the most probable answers; pass rate, reward and tokens of sampled rollouts."""
    end_token: ClassVar[int]

    @abstractmethod
    def build_policy(self) -> nn.Module:
        """Return the initial policy, a model from tokens (batch, length) to logits (batch, length, vocabulary)."""

    @abstractmethod
    def problems(self, *, train: bool) -> Mapping[str, Tensor]:
        """Return ``prompt`` and ``answer`` of the training or of the held-out problems."""

    def build_model(self) -> nn.Module:
        """Build the policy, and a copy that remains as it is: the reference of the penalty."""
        every, parts = self.settings.checkpoint.every_steps, self.number("steps_per_rollout")
        if every is not None and every * self.settings.gradient_accumulation_steps % parts:
            raise RequestError(
                f"checkpoint.every_steps: {every} optimizer steps end between the {parts} batches of a rollout, from "
                "where training cannot be resumed exactly; give a multiple of model.steps_per_rollout"
            )
        self._rollouts: Rollouts | None = None
        self._reference = self.build_policy().eval().requires_grad_(False)
        return self.build_policy()

    def train_batches(self) -> Batches:
        """Return batches of ``steps_per_rollout x batch_size`` problems, each repeated for its parts."""
        return _Parts(self, self.problems(train=True))

    def dataset(self, *, train: bool) -> Mapping[str, Tensor]:
        """Return the held-out problems with the random numbers of their rollouts."""
        problems = self.problems(train=train)
        return {**problems, "noise": self.noise(problems["answer"], generator_for(self.place.shared_seed, 0))}

    def synthetic_batch(self, size: int) -> Batch:
        """Return the first training problems, with random numbers of this rank."""
        problems = self.problems(train=True)
        batch = {name: tensor[torch.arange(size) % len(tensor)] for name, tensor in problems.items()}
        noise = self.noise(batch["answer"], generator_for(self.place.seed))
        return {**batch, "noise": noise, "part": torch.zeros(size, dtype=torch.int64)}

    def noise(self, answers: Tensor, random: torch.Generator) -> Tensor:
        """Return uniform random numbers for a group of rollouts of each answer."""
        return torch.rand(len(answers), self.number("group_size"), answers.shape[1], generator=random)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the negative objective (equation 3) of this part of the batch; the first part writes the rollouts.

        The mean is over answers, each the mean over its tokens.
        """
        part = 0 if batch["part"].is_meta else int(batch["part"][0])
        if part == 0 or self._rollouts is None:
            with torch.no_grad():
                self._rollouts = self._roll_out(model, batch, batch["noise"])
        group, rollouts = self.number("group_size"), self._rollouts
        rows = slice(part * self.settings.batch_size * group, (part + 1) * self.settings.batch_size * group)
        tokens, mask = rollouts.tokens[rows], rollouts.mask[rows]
        log = self._log_probabilities(model, tokens, mask.shape[1])
        gains = objective(
            log, rollouts.log_probabilities[rows], advantages(rollouts.rewards, group)[rows], self.real("clip")
        )
        beta = self.real("kl_coefficient")
        if beta:
            reference = meta_copy(self._reference) if tokens.is_meta else self._reference.to(tokens.device)
            with torch.no_grad():
                initial = self._log_probabilities(reference, tokens, mask.shape[1])
            gains = gains - beta * divergence(log, initial)
        return -((gains * mask).sum(1) / mask.sum(1)).mean()

    def _roll_out(self, model: nn.Module, batch: Batch, noise: Tensor | None) -> Rollouts:
        """Let the policy write an answer per row of ``noise`` and problem; None: one, of the most probable tokens."""
        group = 1 if noise is None else noise.shape[1]
        tokens = batch["prompt"].long().repeat_interleave(group, 0)
        expected = batch["answer"].long().repeat_interleave(group, 0)
        logs = []
        for position in range(expected.shape[1]):
            log = model(tokens)[:, -1].float().log_softmax(-1)
            if noise is None:
                token = log.argmax(-1, keepdim=True)
            else:
                below = log.exp().cumsum(-1) < noise[:, :, position].reshape(-1, 1)
                token = below.sum(-1, keepdim=True).clamp_max(log.shape[-1] - 1)
            logs.append(log.gather(1, token))
            tokens = torch.cat((tokens, token), 1)
        written = tokens[:, -expected.shape[1] :]
        ended = (written == self.end_token).long()
        mask = (ended.cumsum(1) - ended == 0).float()
        # After the end, whatever was written does not count.
        right = torch.where(mask > 0, written, self.end_token) == expected
        return Rollouts(tokens, mask, torch.cat(logs, 1), right.all(1).float())

    @staticmethod
    def _log_probabilities(model: nn.Module, tokens: Tensor, length: int) -> Tensor:
        logits = model(tokens[:, :-1])[:, -length:].float()
        return -F.cross_entropy(logits.flatten(0, 1), tokens[:, -length:].flatten(), reduction="none").view(-1, length)

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Count problems solved by the most probable answer, and add up rewards and tokens of sampled rollouts."""
        greedy, sampled = self._roll_out(model, batch, None), self._roll_out(model, batch, batch["noise"])
        groups = sampled.rewards.view(-1, self.number("group_size"))
        return {
            "passed": greedy.rewards.sum(),
            "passed_once": groups.amax(1).sum(),
            "rewards": groups.mean(1).sum(),
            "tokens": sampled.mask.sum(1).view_as(groups).mean(1).sum(),
            "count": torch.ones_like(batch["prompt"][:, 0]).sum(),
        }


def advantages(rewards: Tensor, group: int) -> Tensor:
    """Return each answer's reward minus its group's mean, over the group's standard deviation (section 4.1.2).

    ``rewards`` has the shape (answers), group after group.
    """
    groups = rewards.view(-1, group)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + _EPSILON)).flatten()


def objective(log: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Return the clipped objective of each token, shape (answers, length), without penalty (equation 3).

    ``log`` and ``old`` are log-probabilities by the policy and by the one that wrote the answers, of the same shape.
    """
    ratio = (log - old).exp()
    return torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - clip, 1 + clip) * advantage[:, None])


def divergence(log: Tensor, reference: Tensor) -> Tensor:
    """Return the unbiased estimate of the Kullback-Leibler divergence from the reference, per token (equation 4)."""
    gap = reference - log
    return gap.exp() - gap - 1


class _Parts:
    """Batches of whole rollouts, each repeated once per part with the part's number."""

    def __init__(self, case: Grpo, problems: Mapping[str, Tensor]) -> None:
        self._parts = case.number("steps_per_rollout")
        size = case.settings.batch_size * self._parts

        def with_noise(batch: dict[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
            return {**batch, "noise": case.noise(batch["answer"], random)}

        self._batches = TensorBatches(problems, size, case.place, train=True, augment=with_noise)
        self.num_samples = self._batches.num_samples

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        num_rollouts, first_part = divmod(skip, self._parts)
        for batch in self._batches.epoch(number, num_rollouts):
            for part in range(first_part, self._parts):
                yield {**batch, "part": torch.full((len(batch["prompt"]),), part)}
            first_part = 0
