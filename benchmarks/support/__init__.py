"""What the benchmarks have in common."""
