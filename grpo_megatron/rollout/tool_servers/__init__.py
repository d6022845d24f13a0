"""MCP servers whose tools the model may call (`rollout.tools=[mcp:...]`), by the official client."""
