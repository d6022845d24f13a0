"""Everything that a run shows of itself: scalars, texts, its timeline, its status, its terminal."""
