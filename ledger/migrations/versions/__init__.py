"""One module for each revision, in the order in which their names sort."""
