"""One small module for each invariant or family of them."""
