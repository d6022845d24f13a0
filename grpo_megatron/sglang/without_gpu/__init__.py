"""SGLang without a GPU: a platform, an attention backend, operators, and fast starts, all on PyTorch."""
