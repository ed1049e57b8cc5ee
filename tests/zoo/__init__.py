"""The divergence zoo: faults put into a small real job, and whether the judge finds them."""
