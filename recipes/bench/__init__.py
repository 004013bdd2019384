"""redraft's own regression benchmarks."""
