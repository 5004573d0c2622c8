"""Files that also run in environments without pycomm: NumPy, and nothing of this package."""
