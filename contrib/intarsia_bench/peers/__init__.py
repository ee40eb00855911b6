"""Other engines: the scripts that run them, each in a venv of its own, and the workloads that all engines run."""
