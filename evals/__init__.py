"""Evaluation: zero-shot minimal pairs, fine-tuning, reports."""
