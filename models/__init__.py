"""Denoisers, samplers and losses that the demo, the tests and the benchmarks share."""
