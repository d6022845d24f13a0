"""Memory of a rank: device memory that is freed for a while, and host memory that holds its contents."""
