"""Fuzzing of configs and data files: `python -m experiments.fuzz`; see `experiments.fuzz.__main__`."""
