"""A run's page: its settings, results, curves and advice."""
