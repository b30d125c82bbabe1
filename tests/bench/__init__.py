"""Figures, not tests: ``make bench`` prints them and writes build/bench.json. Ratios are of one run on one machine."""
