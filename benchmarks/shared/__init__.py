"""What the benchmarks share: options, rows, turns, memory and data."""
