"""Speech recognition: by connectionist temporal classification (Graves et al. 2006), and by Whisper."""

from __future__ import annotations

import sys
import wave
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from accelmark.frameworks.pytorch.batches import ReadSamples, TaskFamily, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.hugging_face import initial_net, with_padding
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import UNREADABLE, DataError, raising
from accelmark.tasks.metrics import IGNORED, ErrorRate, TextScore
from accelmark.tasks.text.pytorch import SequenceToSequence, of_both, read_tokenizer

RATE_HZ: Final = 16_000
"""Sampling rate of LibriSpeech."""
_SUFFIXES: Final = (".flac", ".wav")


class Recordings:
    """The utterances of some subsets: ``<subset>/<speaker>/<chapter>/*.trans.txt`` with a recording for each line.

    A subclass has others, or another sampling rate.
    """

    rate_hz: ClassVar[int] = RATE_HZ

    def __init__(self, directory: Path, subsets: Sequence[str]) -> None:
        self._utterances: list[tuple[Path, str]] = []
        for subset in subsets:
            transcripts = sorted((directory / subset).glob("*/*/*.trans.txt"))
            if not transcripts:
                raise DataError(f"{directory / subset}: expected <speaker>/<chapter>/*.trans.txt here, found none")
            for transcript in transcripts:
                self._utterances += _utterances(transcript)

    def __len__(self) -> int:
        return len(self._utterances)

    def row(self, index: int) -> tuple[str, ...]:
        """Return the transcript that utterance ``index`` is scored against."""
        return (self._utterances[index][1],)

    def where(self, index: int) -> Path:
        """Return the path of a recording."""
        return self._utterances[index][0]

    def audio(self, index: int, most_s: float | None = None) -> npt.NDArray[np.int16]:
        """Return the samples of utterance ``index``; raises DataError where it is longer than ``most_s`` seconds."""
        path = self.where(index)
        samples = read_audio(path)
        if most_s is not None and len(samples) > round(most_s * RATE_HZ):
            raise DataError(f"{path}: lasts {len(samples) / RATE_HZ:.1f} s; expected at most {most_s:g} s")
        return samples

    def utterance(self, index: int, most_s: float, seed: int) -> tuple[npt.NDArray[np.int16], str]:
        """Return samples and transcript; a subclass may change them in training by random numbers for ``seed``."""
        return self.audio(index, most_s), self._utterances[index][1]


def _utterances(transcript: Path) -> list[tuple[Path, str]]:
    present = {path.name for path in transcript.parent.iterdir()}
    utterances = []
    for number, line in enumerate(transcript.read_text(encoding="utf-8").splitlines(), 1):
        name, _, text = line.strip().partition(" ")
        file = next((name + suffix for suffix in _SUFFIXES if name + suffix in present), None)
        if file is None or not text.strip():
            lacks = "no text" if file else f"no recording {name}.flac or {name}.wav"
            raise DataError(f"{transcript}:{number}: utterance {name!r} has {lacks}")
        utterances.append((transcript.parent / file, text.strip()))
    return utterances


def read_audio(path: Path, rate_hz: int = RATE_HZ) -> npt.NDArray[np.int16]:
    """Return the samples of a recording; raises DataError where it is not one channel of 16 bits at ``rate_hz``."""
    with raising(DataError, f"{path}: is not a readable recording", *UNREADABLE, wave.Error):
        samples, channels, rate = _read_wav(path) if path.suffix == ".wav" else _read_flac(path)
    if (channels, rate) != (1, rate_hz):
        expected = f"expected 1 at {rate_hz:,} Hz: convert it"
        raise DataError(f"{path}: has {channels} channels at {rate:,} Hz; {expected}")
    return samples


def _read_wav(path: Path) -> tuple[npt.NDArray[np.int16], int, int]:
    with wave.open(str(path)) as file:
        count, width = file.getnframes(), file.getsampwidth()
        if width != 2:
            raise ValueError(f"has samples of {8 * width} bits; expected 16")
        data = file.readframes(count)
        if len(data) != count * width * file.getnchannels():
            raise ValueError("ends before its last sample")
        return np.frombuffer(data, "<i2"), file.getnchannels(), file.getframerate()


def _read_flac(path: Path) -> tuple[npt.NDArray[np.int16], int, int]:
    import soundfile

    sys.audit("open", str(path), "r", 0)  # the library opens it itself
    with soundfile.SoundFile(str(path)) as file:
        samples: npt.NDArray[np.int16] = file.read(dtype="int16")
        if len(samples) != file.frames:
            raise ValueError("ends before its last sample")
        return samples, int(file.channels), int(file.samplerate)


LETTERS: Final = "    |ETAOINHSRDLUMWCFGYPBVK'XJQZ"
"""Letters by number, as wav2vec2-base-960h has them: 0 is the blank, 1 to 3 are not used, 4 separates words."""
FULL_SCALE: Final = 32768
"""Divides samples of 16 bits, so that they are from -1 to 1."""
_TIME_SPAN: Final = 10
_CHANNEL_SPAN: Final = 64
"""Frames and channels of a masked span, as in fairseq's configurations."""


class Letters(nn.Module):
    """A wav2vec 2.0 of transformers with a CTC head: int16 recordings to logits of letters.

    In training, spans of the encoder's input are replaced by a learned vector, and spans of its channels by zeros
    (arXiv:2006.11477, section 3.1). transformers' own masking synchronizes, and fails on the meta device.
    """

    def __init__(self, net: Any, time_share: float, channel_share: float) -> None:
        super().__init__()
        self.net = net
        self._time_share, self._channel_share = time_share, channel_share
        net.wav2vec2.encoder.register_forward_pre_hook(self._mask)

    def _mask(self, encoder: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = inputs
        if not self.training:
            return inputs
        batch, frames, channels = hidden.shape
        times = spans((batch, frames), self._time_share, _TIME_SPAN, hidden.device)[..., None]
        hidden = torch.where(times, self.net.wav2vec2.masked_spec_embed.to(hidden.dtype), hidden)
        silent = spans((batch, channels), self._channel_share, _CHANNEL_SPAN, hidden.device)[:, None]
        return hidden.masked_fill(silent, 0.0), *rest

    def forward(self, audio: Tensor) -> Tensor:
        """Return logits of shape (batch, frames, letters)."""
        logits: Tensor = self.net(audio.float() / FULL_SCALE).logits
        return logits

    def frames(self, lengths: Tensor) -> Tensor:
        """Return the number of frames of recordings with these numbers of samples."""
        num_frames: Tensor = self.net._get_feat_extract_output_lengths(lengths)
        return num_frames


def spans(shape: tuple[int, int], share: float, length: int, device: torch.device) -> Tensor:
    """Return random spans of ``length`` in the last dimension, which may overlap and together have ``share`` of it."""
    starts = torch.rand(shape, device=device) < share / length
    return F.max_pool1d(F.pad(starts.float(), (length - 1, 0)), length, 1) > 0


class SpeechToLetters(TaskFamily):
    """Recordings to letters without an alignment; greedy transcripts are scored.

    The model, a wav2vec 2.0 or that of the case, turns ``audio`` of shape (batch, samples), int16, into logits of shape
    (batch, frames, letters), and its ``frames`` turns numbers of samples into numbers of frames.
    """

    weights: ClassVar[str]
    """Name of the data set with the weights of a wav2vec 2.0, in its folder ``hf``."""
    samples: ClassVar[str]
    subsets: ClassVar[Sequence[str]] = ()
    """Subsets that are trained on, in LibriSpeech's layout."""
    eval_subsets: ClassVar[Sequence[str]] = ()
    score: ClassVar[TextScore] = ErrorRate("word")
    rate_hz: ClassVar[int] = RATE_HZ
    _references: Recordings | None = None

    def build_model(self) -> nn.Module:
        """Build wav2vec 2.0 (Baevski et al. 2020, arXiv:2006.11477) with a new output layer and frozen convolutions."""
        config = transformers.Wav2Vec2Config(
            vocab_size=len(LETTERS),
            **self.dimensions(),
            conv_dim=[self.number("conv_width")] * 7,
            layerdrop=0.0,
            activation_dropout=0.1,
            apply_spec_augment=False,
        )
        new, directory = ("lm_head", "wav2vec2.masked_spec_embed"), self.data_dirs.get(self.weights)
        net: Any = initial_net(transformers.Wav2Vec2ForCTC, config, directory, new=new)
        net.freeze_feature_encoder()
        return Letters(net, self.real("masked_time"), self.real("masked_channels"))

    def recordings(self, *, train: bool) -> Recordings:
        """Return the recordings of the training or the evaluation subsets."""
        return Recordings(self.data_dirs[self.samples], self.subsets if train else self.eval_subsets)

    def dataset(self, *, train: bool) -> ReadSamples:
        """Return the recordings of a split, padded to ``train_seconds`` or ``eval_seconds``."""
        recordings = self.recordings(train=train)
        if not train:
            self._references = recordings
        seconds = self.real("train_seconds" if train else "eval_seconds")
        return ReadSamples(len(recordings), partial(self._lettered, recordings, seconds, self.number("most_letters")))

    def _lettered(
        self, recordings: Recordings, seconds: float, most_letters: int, index: int, random: torch.Generator
    ) -> Batch:
        """Return ``audio`` (int16) with its ``length``, ``letters`` with their ``count``, and ``index``."""
        samples, text = recordings.utterance(index, seconds, random.initial_seed())
        audio, text = torch.from_numpy(samples.copy()), "|".join(text.upper().split())
        if (strange := sorted(set(text) - set(LETTERS.strip()))) or len(text) > most_letters:
            has = f"{len(text)} letters, with {''.join(strange)!r} that are none"
            expected = f"expected at most {most_letters} letters, ' and spaces"
            raise DataError(f"{recordings.where(index)}: its transcript has {has}; {expected}")
        letters = [LETTERS.rindex(letter) for letter in text]
        return {
            "audio": F.pad(audio, (0, round(seconds * recordings.rate_hz) - len(audio))),
            "length": torch.tensor(len(audio)),
            "letters": torch.tensor(letters + [0] * (most_letters - len(letters))),
            "count": torch.tensor(len(letters)),
            "index": torch.tensor(index),
        }

    def synthetic_batch(self, size: int) -> Batch:
        """Return noise of ``train_seconds``, with half as many letters as there may be."""
        random = generator_for(self.place.seed)
        length = round(self.real("train_seconds") * self.rate_hz)
        most = self.number("most_letters")
        return {
            "audio": torch.randint(-3000, 3000, (size, length), generator=random, dtype=torch.int16),
            "length": torch.full((size,), length),
            "letters": torch.randint(4, len(LETTERS), (size, most), generator=random),
            "count": torch.full((size,), most // 2),
        }

    def _aligned(self, model: nn.Module, batch: Batch, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, logits, and numbers of frames."""
        logits: Tensor = model(batch["audio"])
        if logits.is_meta:  # where FLOPs are counted: PyTorch has no CTC loss there, and it has no products
            return logits.sum(), logits, batch["length"]
        plain = cast("Letters", getattr(model, "module", model))  # any model of a case has ``frames``
        frames = plain.frames(batch["length"])
        scores = logits.float().log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, batch["letters"], frames, batch["count"], reduction=reduction, zero_infinity=True)
        return loss, logits, frames

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean over samples of the CTC loss of a letter, in nats; an impossible alignment has none."""
        return self._aligned(model, batch, "mean")[0]

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Transcribe greedily, and return the score's statistics and the summed loss."""
        loss, logits, frames = self._aligned(model, batch, "sum")
        texts = []
        for row, count in zip_strict(logits.argmax(-1).tolist(), frames.tolist()):  # repetitions are one letter
            letters = zip_strict(row[:count], [0, *row[:count]][:count])
            texts.append(_text([letter for letter, before in letters if letter != before]))
        if self._references is None or "index" not in batch:
            pairs = zip_strict(batch["letters"].tolist(), batch["count"].tolist())
            references = [_text(row[:count]) for row, count in pairs]
        else:
            references = [self._references.row(index)[0].upper() for index in batch["index"].tolist()]
        scored = self.score.sums(texts, references)
        sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in scored.items()}
        return sums | {"loss": loss, "letters": batch["count"].sum()}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the score, and the mean loss of a letter."""
        return self.score.metrics(sums) | {"eval_loss": sums["loss"] / sums["letters"]}


def _text(letters: Sequence[int]) -> str:
    return " ".join("".join(LETTERS[letter] for letter in letters if letter).replace("|", " ").split())


END: Final = 50257
START: Final = 50258
"""Tokens of the multilingual models."""
BANDS: Final = 80
FRAMES: Final = 3000
"""Bands of a spectrum, and frames in 30 s."""


class Spectra(Dataset[tuple[Tensor, int]]):
    """Log-mel spectra of 30 s with their numbers; longer recordings are cut off."""

    def __init__(self, recordings: Recordings) -> None:
        self._recordings = recordings
        extractor: Any = WhisperFeatureExtractor
        self._spectrum = extractor(sampling_rate=RATE_HZ)

    def __len__(self) -> int:
        return len(self._recordings)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return the spectrum of a recording, (80, 3000)."""
        audio = self._recordings.audio(index) / FULL_SCALE
        return self._spectrum(audio, sampling_rate=RATE_HZ, return_tensors="pt")["input_features"][0], index


def whisper(number: Callable[[str], int]) -> WhisperConfig:
    """Return the configuration of Whisper (Radford et al. 2022, arXiv:2212.04356, table 1) from named numbers."""
    width = number("hidden_size")
    config = WhisperConfig(
        vocab_size=number("vocab_size"),
        d_model=width,
        **of_both(number("num_layers"), number("num_heads"), 4 * width),
        decoder_start_token_id=START,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
    )
    return with_padding(config)


class SpeechToText(SequenceToSequence):
    """English recordings to text with a multilingual Whisper; ``target_length`` under ``model`` is in tokens."""

    samples: ClassVar[str]
    """Name of the data set of recordings."""
    weights: ClassVar[str]
    """Name of the data set with the checkpoint and its tokenizer, in its folder ``hf``."""
    subsets: ClassVar[Sequence[str]]
    eval_subsets: ClassVar[Sequence[str]]
    score = ErrorRate("word", plain=True)
    prompt = (50259, 50359, 50363)
    """English, transcribe, no timestamps."""

    def network(self) -> PreTrainedModel:
        return initial_net(WhisperForConditionalGeneration, whisper(self.number), self.data_dirs.get(self.weights))

    def dataset(self, *, train: bool) -> ReadSamples:
        recordings = Recordings(self.data_dirs[self.samples], self.subsets if train else self.eval_subsets)
        path = self.data_dirs[self.weights] / "hf" / "tokenizer.json"
        tokenizer = read_tokenizer(path, self.number("vocab_size"))
        if not train:
            self._references, self._tokenizer = recordings, tokenizer
        spectra, length = Spectra(recordings), self.number("target_length")

        def read(index: int, random: torch.Generator) -> Batch:
            """Return ``source`` of shape (80, 3000), ``target`` (the transcript in lower case) and ``index``."""
            text = tokenizer.encode(recordings.row(index)[0].lower(), add_special_tokens=False).ids
            tokens = [*self.prompt, *text, END][:length]
            target = torch.tensor(tokens + [IGNORED] * (length - len(tokens)))
            return {"source": spectra[index][0], "target": target, "index": torch.tensor(index)}

        return ReadSamples(len(recordings), read)

    def synthetic_source(self, size: int, random: torch.Generator) -> Tensor:
        return torch.rand(size, BANDS, FRAMES, generator=random) * 2 - 1
