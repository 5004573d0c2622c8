"""How ranks share a run: degrees, the device mesh, and torch's parts put onto a model."""
