"""From the trainer's shards into the engines: versions, transports, and what is checked about them."""
