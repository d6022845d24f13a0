"""Model classes that take the place of SGLang's own, in the form of an external package of SGLang.

SGLang imports every module here if the environment variable SGLANG_EXTERNAL_MODEL_PACKAGE names this package.
"""
