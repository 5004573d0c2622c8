"""What a person sees of a run: a line, files, metrics, and a page."""
