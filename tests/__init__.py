"""Tests of the installed package; what they share is imported as ``tests.<package>.<module>``."""
