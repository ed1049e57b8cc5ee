"""Commands of the book, a module for each family."""
