"""Replay: runs a small job again and names the first thing that came out otherwise."""
