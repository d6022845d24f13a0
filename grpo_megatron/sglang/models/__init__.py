"""Model classes that replace SGLang's classes of the same names.

If the environment variable SGLANG_EXTERNAL_MODEL_PACKAGE names this package, SGLang imports all its modules.
"""
