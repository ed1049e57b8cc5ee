"""Projections of the ledger as SQL: one file makes one table and says what it holds."""
