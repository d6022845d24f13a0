"""The rollout engines: SGLang in Ray actors, and SGLang's CPU support for machines without a GPU."""
