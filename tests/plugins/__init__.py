"""Files that a user may write, each of which adds one part."""
