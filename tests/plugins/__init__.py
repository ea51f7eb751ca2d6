"""Plugins as a user may write them; each file adds one part."""
