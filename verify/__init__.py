"""The judge: invariants over a ledger, without Ray and without the job."""
