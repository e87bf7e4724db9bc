"""Depth sweeps: a plan, a runner that trains many runs as lanes of one program, a store, statistics, a report."""
