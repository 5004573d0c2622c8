"""`python -m pycomm` is the `pycomm` command."""

from pycomm.cli import main

main()
