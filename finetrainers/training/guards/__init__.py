"""Detect and answer what goes wrong in a step: memory, non-finite numbers, spikes, stragglers, reward hacking."""
