"""Studies: many models trained, compared and reported."""
