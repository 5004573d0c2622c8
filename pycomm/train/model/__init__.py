"""The decoder that `pycomm train` trains, its routed experts, and its weights in other formats."""
