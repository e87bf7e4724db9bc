"""Training: config, data, optimizer, step, loop, checkpoints, figures. Import its modules by name."""
