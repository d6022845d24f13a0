"""Assumed shares of the data sheets' speeds, and latencies, from which the planner computes times."""

# Assumed shares of the speeds in the data sheet: products of dense layers, with norms and activations;
# products of experts, which are smaller, with the sorting of tokens; the attention kernel.
PRODUCTS, EXPERT_PRODUCTS, ATTENTION = 0.6, 0.35, 0.45
# Also assumed shares: bandwidth of the device's memory; links to other GPUs and to the host.
BANDWIDTH, LINKS = 0.75, 0.8
# Assumed seconds: overhead of a layer in a decoding step with CUDA graphs; latency of a message within a node
# and between nodes.
LAYER_SECONDS, FABRIC_SECONDS, NETWORK_SECONDS = 20e-6, 10e-6, 30e-6
