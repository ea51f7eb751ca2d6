"""Our encoders as models of Hugging Face's transformers, both ways."""
