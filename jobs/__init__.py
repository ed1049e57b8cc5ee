"""Small real reinforcement-learning jobs that the demo, the tests and CI checks run."""
