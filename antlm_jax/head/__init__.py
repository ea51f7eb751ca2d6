"""The output layer's loss."""
