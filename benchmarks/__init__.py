"""Measurements, one file a question. `make bench` writes the table and JSON under benchmarks/results/."""
