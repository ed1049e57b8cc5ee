"""Placeholder until the faults of this family are written."""
