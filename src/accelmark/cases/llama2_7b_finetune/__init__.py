"""Fine-tuning of Llama 2 7B on summaries of dialogues."""
