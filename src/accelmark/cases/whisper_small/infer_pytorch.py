"""Inference of Whisper small on LibriSpeech: from log-mel spectra to greedy transcripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel, WhisperForConditionalGeneration

from accelmark.infer.case import InferBatch, InferBatches, InferCase, IterativeModel, LoaderBatches
from accelmark.infer.weights import load_given_weights
from accelmark.spec.backports import zip_strict
from accelmark.tasks.metrics import IGNORED
from accelmark.tasks.speech.pytorch import BANDS, END, FRAMES, Recordings, Spectra, SpeechToText, whisper
from accelmark.tasks.text.pytorch import EncoderDecoder, read_tokenizer

_COMPARED: Final = 8
"""Transcripts whose logits, of a whole vocabulary for each token, are in memory at the same time."""


class _LargestLogits(LogitsProcessor):
    """Keeps the largest logit of each step, which is that of the token that greedy decoding chooses."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return ``scores`` of shape (items, vocabulary) unchanged."""
        self.found.append(scores.amax(-1))
        return scores


class Transcriber(IterativeModel):
    """Whisper with transformers' greedy decoding; ``length`` is the largest number of tokens."""

    def __init__(self, net: PreTrainedModel, prompt: Sequence[int], length: int) -> None:
        super().__init__()
        self.pair = EncoderDecoder(net)
        self.prompt = tuple(prompt)
        self.length = length

    def parts(self) -> Sequence[nn.Module]:
        """Return the encoder; the decoder's cache grows, so that each of its steps has other shapes."""
        net: Any = self.pair.net
        return [net.model.encoder]

    def forward(
        self, spectra: Tensor, tokens: Tensor | None = None, logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen tokens with their logits, both of shape (items, ``length``); after the end -100 and 0.

        With ``tokens`` of an earlier call, the tokens are those with the largest logit after the earlier ones before
        them, and the logits are those of the earlier tokens. ``spectra`` are (items, 80, 3000); ``logits`` is unused.
        """
        if tokens is not None:
            pairs = zip_strict(torch.split(spectra, _COMPARED), torch.split(tokens, _COMPARED))
            answers, largest = (torch.cat(parts) for parts in zip_strict(*(self._followed(*pair) for pair in pairs)))
            return answers, largest
        steps = _LargestLogits()
        made = self.pair.generate(spectra, self.length, self.prompt, do_sample=False, logits_processor=[steps])
        rest = 0, self.length - made.shape[1]
        answers, largest = F.pad(made, rest, value=END), F.pad(torch.stack(steps.found[: made.shape[1]], 1), rest)
        ended = _ended(answers)
        return answers.masked_fill(ended, IGNORED), largest.masked_fill(ended, 0)

    def _followed(self, spectra: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        prompt = torch.tensor(self.prompt, device=tokens.device).expand(len(tokens), -1)
        logits = self.pair(spectra, torch.cat([prompt, tokens], 1))[:, len(self.prompt) :]
        chosen = logits.gather(2, tokens.clamp(0, logits.shape[2] - 1)[..., None])[..., 0].float()
        ended = _ended(tokens)
        return logits.argmax(2).masked_fill(ended, IGNORED), chosen.masked_fill(ended, 0)


def _ended(tokens: Tensor) -> Tensor:
    """Return for each token whether one before it ended its row."""
    ends = tokens == END
    return (ends.cumsum(1) - ends.long()) > 0


class Case(InferCase):
    """The recordings of LibriSpeech's ``test-clean``, with weights of openai/whisper-small."""

    input_names = ("spectra",)
    output_names = ("tokens", "logits")
    _recordings: Recordings

    def create_model(self) -> nn.Module:
        net = WhisperForConditionalGeneration(whisper(self.number))
        load_given_weights(self, net)
        return Transcriber(net, SpeechToText.prompt, self.number("target_length"))

    def build_dataloader(self) -> InferBatches:
        directory = self.data_dir("librispeech", "librispeech/test-clean")
        self._recordings = Recordings(directory, ("test-clean",))
        if "weights" in self.data_dirs:
            file = self.data_dirs["weights"].with_name("tokenizer.json")
            self._tokenizer = read_tokenizer(file, self.number("vocab_size"))
        return LoaderBatches(Spectra(self._recordings), self.settings)

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Count wrong words of the transcripts, as the training case does; labels are numbers of recordings."""
        rows = [[token for token in row if token != IGNORED] for row in outputs[0].tolist()]
        texts = self._tokenizer.decode_batch(rows, skip_special_tokens=True)
        return SpeechToText.score.sums(texts, [self._recordings.row(index)[0] for index in labels.tolist()])

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return SpeechToText.score.metrics(sums)

    def synthetic_batch(self, size: int) -> InferBatch:
        return InferBatch((torch.rand(size, BANDS, FRAMES) * 2 - 1,), None)
