"""The state: fingerprints, bundles, samplers, live snapshots and virtual ranks."""
