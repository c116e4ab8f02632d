"""wav2vec 2.0 fine-tuned on LibriSpeech."""
