"""Per-token arrays (columns) whose sums over each trajectory an advantage estimator may ask for."""

from collections.abc import Callable

# Columns of batch.train_batch.TrainBatch.
COLUMNS = ("rollout_logp", "old_logp", "ref_logp")


def needs_columns(*names: str) -> Callable[[Callable], Callable]:
    """Return a decorator for an advantage estimator that uses sums of per-token arrays (columns).

    The decorator stores the names in the estimator's attribute `columns`. The trainer's ranks then sum these
    columns over the trained tokens, and the estimator reads the sums with `AdvantageInputs.column`.

    names: some of COLUMNS. Raises ValueError for another name.
    """
    if unknown := set(names) - set(COLUMNS):
        raise ValueError(f"unknown columns {', '.join(sorted(unknown))}; known: {', '.join(COLUMNS)}")

    def mark(estimator: Callable) -> Callable:
        estimator.columns = names
        return estimator

    return mark
