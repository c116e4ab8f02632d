"""Language models of transformers as inference cases."""
