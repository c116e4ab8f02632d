"""GPT-2 medium, evaluated on LAMBADA."""
