"""Do GRPO steps with TRL, for benchmarks/real_model.py --trl.

    python trl_step.py OPTIONS

The environment must have TRL. OPTIONS is a JSON object, see `trl_seconds` in real_model.py. The last line of
the output is a JSON list with the seconds of every step.
"""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Callback that records the seconds from one optimizer step to the next."""

    def __init__(self):
        self.seconds = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.seconds.append(now - self.start)
        self.start = now


def digits(completions, **kwargs):
    """Return the share of digits in each completion, a reward that differs within a group."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in texts]


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    with open(options["prompts"], encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    chats = Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts])
    samples, optimizer, clock = options["groups"] * options["group_size"], options["optimizer"], Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=options["steps"],
            use_cpu=True,
            bf16=options["bf16"],
            per_device_train_batch_size=16,
            gradient_accumulation_steps=samples // 16,
            num_generations=options["group_size"],
            max_completion_length=options["length"],
            temperature=options["temperature"],
            generation_kwargs={"min_new_tokens": options["length"]},
            beta=0.0,
            learning_rate=optimizer["lr"],
            adam_beta1=optimizer["beta1"],
            adam_beta2=optimizer["beta2"],
            adam_epsilon=optimizer["eps"],
            max_grad_norm=optimizer["clip_grad"],
            weight_decay=0.0,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = GRPOTrainer(options["model"], digits, args=config, train_dataset=chats, callbacks=[clock])
        trainer.train()
    print(json.dumps(clock.seconds))


if __name__ == "__main__":
    main()
