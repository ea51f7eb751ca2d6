"""Export to Hugging Face's transformers, and import from it."""
