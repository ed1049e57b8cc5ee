"""The state: fingerprints, bundles, samplers and what a move carries."""
