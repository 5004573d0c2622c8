"""The microbenchmark behind `pycomm bench`."""
