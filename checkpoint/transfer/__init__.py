"""Versions of weights on their way: ranks that serve them, receivers that pull their own slices."""
