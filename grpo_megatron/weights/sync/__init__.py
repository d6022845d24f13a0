"""Weight sync: copies the trainer's sharded weights into the engines and verifies the copies."""
