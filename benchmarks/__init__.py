"""What is measured again after a change; `python -m benchmarks` lists it."""
