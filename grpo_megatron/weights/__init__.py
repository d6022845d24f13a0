"""Weight files (HF, GGUF, torch_dist, PEFT), their reading and writing, and the weight sync into engines."""
