"""Differences between the releases of megatron-core that this project is tested with, 0.16.1 and 0.19.2.

No other module checks which release is installed.
"""

from functools import partial

from megatron.core.ssm import gated_delta_net

# 0.19.2 has a package where 0.16.1 has one module. Its classes read names of the package's inner modules.
_delta_net = getattr(gated_delta_net, "common", gated_delta_net)
# Megatron's constructor demands the package flash-linear-attention, which only Megatron's own forward uses.
_delta_net.HAVE_FLA = True
if _delta_net is not gated_delta_net:
    # The constructor also demands the package's delta rule, so it gets another that is never called.
    gated_delta_net.gdn.chunk_gated_delta_rule = gated_delta_net.torch_chunk_gated_delta_rule

# Class of gated delta networks, class of their parts' specs, and the function that describes how a tensor in
# checkpoints is divided into sections.
GatedDeltaNet = gated_delta_net.GatedDeltaNet
GatedDeltaNetSubmodules = gated_delta_net.GatedDeltaNetSubmodules
split_tensor_factory = _delta_net._split_tensor_factory


def submodules_of(spec):
    """Return the specs of a module's submodules. The caller may change them in place.

    spec: the module's spec, a ModuleSpec; in 0.19.2 also a functools.partial of the module's class.
    """
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
