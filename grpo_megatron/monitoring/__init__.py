"""What a run shows of itself while it runs: scalars, texts, its timeline, its status, its terminal."""
