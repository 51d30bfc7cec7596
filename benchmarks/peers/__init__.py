"""Accuracy in the same seconds of one core, beside lightly: docs/results/peers.jsonl."""

from benchmarks.peers.pairs import OPTIONS as OPTIONS
from benchmarks.peers.pairs import run as run
