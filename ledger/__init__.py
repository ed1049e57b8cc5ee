"""The book: events, storage, the gate, analytics and the root of the command line."""
