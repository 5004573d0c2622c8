"""The demonstration behind `pycomm demo`: real text, real processes, a loss that falls."""
