"""Memory of a rank: freeing device memory for a while, and host memory that keeps the contents meanwhile."""
