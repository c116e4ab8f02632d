"""DistilBERT fine-tuned on SST-2 in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from accelmark.frameworks.pytorch.model.causal_attention import with_padding
from accelmark.frameworks.pytorch.model.pretrained import initial_net
from accelmark.tasks.text.pytorch import LabelledText, Table, TextClassification, TextClassifier, read_tokenizer


class Case(TextClassification):
    """Sentences of film reviews, positive or negative, from the published checkpoint."""

    samples = "sst2"
    weights = "distilbert"
    accuracies: ClassVar = {"accuracy": 1}
    num_classes = 2
    block_class = "TransformerBlock"

    def build_model(self) -> nn.Module:
        """Build DistilBERT (Sanh et al. 2019, arXiv:1910.01108) with its weights, and a new classifier."""
        names = {
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
            "num_layers": "n_layers",
            "num_heads": "n_heads",
        }
        config = with_padding(DistilBertConfig(**self.dimensions(**names)))
        directory, new = self.data_dirs.get(self.weights), ("pre_classifier", "classifier")
        return TextClassifier(initial_net(DistilBertForSequenceClassification, config, directory, new=new))

    def dataset(self, *, train: bool) -> LabelledText:
        """Return the sentences of ``train.tsv`` or of ``dev.tsv``."""
        split = self.data_dirs[self.samples] / "SST-2" / ("train.tsv" if train else "dev.tsv")
        tokenizer = read_tokenizer(self.data_dirs[self.weights] / "hf" / "tokenizer.json", self.number("vocab_size"))
        return LabelledText(Table(split, ["sentence", "label"]), tokenizer, self.number("seq_length"), self.num_classes)
