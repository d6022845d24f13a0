"""Published environments: verifiers' environment server, which plays episodes through the gateway."""
