"""The algorithm as pure tensor functions; no distributed import below this package."""
