"""Tables of the results pages, each made from stored JSON."""
