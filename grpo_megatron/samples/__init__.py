"""The ledger of a run: what became of every sample."""
