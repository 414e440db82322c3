"""Benchmarks against what others do with the same bytes; `python -m tools.bench --help`."""
