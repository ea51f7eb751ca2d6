"""Text to documents to packed rows, and rows to batches."""
