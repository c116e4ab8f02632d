"""Whisper small fine-tuned on LibriSpeech."""
