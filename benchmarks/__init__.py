"""One question a file, exact beside jagg_fx in one run. Run as `python -m benchmarks.NAME`; results lie in `results/`."""
