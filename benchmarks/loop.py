"""Measure samples per second of a whole GRPO step, against a plain loop of transformers and PyTorch.

    python benchmarks/loop.py [--steps N] [--tokenizer bytes|characters] [key=value ...]

Both sides train the same random Qwen3 of 2.5M parameters on the same prompts: 16 prompts x 8 samples of at
most 64 tokens, a reward for the last digit, KL (k3) to the reference, one optimizer step, float32, two cores.
Our side is the program as `grpo-megatron train` runs it (one SGLang engine, TP1 with a replica for each core,
reward processes, weight sync), in synchronous mode. The steps of the two sides alternate; the first ones warm
up. `key=value` changes our configuration.

The random model ends a response with the probability of one token in its vocabulary. With `characters` (31
tokens) a response has 1 to 64 tokens, 25 on average. With `bytes` (262 tokens) most responses reach the
limit, with 58 tokens on average. The plain loop's padding then costs little, and both sides do nearly the
same arithmetic.

Prints a table and, as its last line, one JSON object (medians over the steps):

    speedup_over_plain
    overhead_share                            share of our step that is neither generation, log-probs,
                                              training nor sync
    ours_samples_per_second, plain_samples_per_second
    ours_tokens_per_sample, plain_tokens_per_sample
    background_cores                          cores that our idle processes use while the plain loop runs
    generate, logprobs, train, sync, other    shares of our step
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

# Set these before torch loads OpenMP. Our ranks use the same settings. Threads that spin longer make either
# side slower by an order of magnitude as soon as anything else runs on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import psutil
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from make_tiny_model import make

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.config.schema import Config
from grpo_megatron.controller import Controller
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.data.sources import training_prompts
from grpo_megatron.logs import show_messages
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.preflight.check import load_config
from grpo_megatron.rewards import resolve_reward
from grpo_megatron.run.folder import METRICS

CORES = 2
WARM_UP = 3
PHASES = ("generate", "logprobs", "train", "sync")


def write_prompts(path: Path, count: int, seed: int = 0) -> None:
    """Write `count` sums of unequal length as prompts to a JSONL file.

    The answer is the last digit of the sum, which even a random model guesses now and then.
    """
    rng = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            a, b = (rng.randrange(10 ** rng.randint(1, 4)) for _ in range(2))
            file.write(json.dumps({"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)}) + "\n")


def our_config(folder: str, changes: list[str]) -> Config:
    return load_config(
        None,
        [
            f"run.root={folder}/runs",
            "run.resume=none",
            f"model.path={folder}/model",
            f"data.train={folder}/train.jsonl",
            "data.train_batch_size=16",
            "data.max_prompt_length=32",
            "rollout.n=8",
            "rollout.max_response_length=64",
            # A second thread gains nothing: the matrix products are small, and SGLang's scheduler between
            # them has one thread.
            "rollout.engine.cpu_threads=1",
            "rollout.engine.max_total_tokens=32768",
            # A prefix cache would find nothing: prompts are short, and a group's requests arrive together.
            "rollout.engine.prefix_cache=false",
            "reward.function=exact_match",
            r"reward.extract=\d",
            "reward.workers=1",
            "algorithm.use_kl_loss=true",
            "train.ppo_mini_batch_size=16",
            "train.max_tokens_per_micro_batch=4096",
            "train.old_logprobs=current",
            "megatron.precision=fp32",
            # One replica per core, because two threads of one rank wait for each other in every small
            # operator.
            f"megatron.data_parallel={CORES}",
            "megatron.cpu_threads=1",
            # A small rate, because the rewards of a random model mean little: at 1e-5, lengths drift by 15%
            # in 20 steps, differently on each side.
            "optimizer.lr=1e-6",
            *changes,
        ],
    )


class PlainLoop:
    """The same GRPO step as ours in plain transformers and PyTorch: one process, left-padded batches."""

    def __init__(self, config: Config):
        self.config = config
        self.tokenizer = PromptTokenizer(config.model.path, config.data)
        self.prompts = training_prompts(config, self.tokenizer)
        self.reward = resolve_reward(config.reward)
        self.policy = self._model().train()
        self.reference = self._model().eval().requires_grad_(False)
        self.pad = self.policy.config.pad_token_id
        self.end = self.policy.config.eos_token_id
        adam = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), adam.lr, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay
        )
        self.phases = Phases()

    def _model(self):
        return AutoModelForCausalLM.from_pretrained(
            self.config.model.path, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )

    def step(self) -> int:
        """Do one GRPO step and return the number of response tokens."""
        torch.set_num_threads(CORES)
        prompts = self.prompts.next(self.config.data.train_batch_size)
        with self.phases("generate"):
            tokens, mask, width = self.generate(prompts)
        with self.phases("other"):
            advantage = self.advantages(prompts, tokens[:, width:], mask[:, width:])
        with self.phases("logprobs"), torch.no_grad():
            reference = self.logprobs(self.reference, tokens, mask, width)
        with self.phases("train"):
            self.train(tokens, mask, width, advantage, reference)
        return int(mask[:, width:].sum())

    def generate(self, prompts: list[Prompt]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Generate rollout.n responses to each prompt. Return (tokens, mask, width).

        tokens, mask: both [samples, width + response]. The mask is True for tokens of prompts and responses,
            False for padding.
        width: number of columns of the left-padded prompts.
        """
        width = max(len(prompt.ids) for prompt in prompts)
        ids = torch.full((len(prompts), width), self.pad)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.ids) :] = torch.from_numpy(prompt.ids)
        tokens = self.policy.generate(
            input_ids=ids,
            attention_mask=ids != self.pad,
            do_sample=True,
            temperature=self.config.rollout.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.config.rollout.max_response_length,
            num_return_sequences=self.config.rollout.n,
            use_cache=True,
            pad_token_id=self.pad,
        )
        ended = (tokens[:, width:] == self.end).cumsum(dim=1) - (tokens[:, width:] == self.end).long()
        return tokens, torch.cat([tokens[:, :width] != self.pad, ended == 0], dim=1), width

    def advantages(self, prompts: list[Prompt], responses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the advantages: rewards normalised within each group, float32 [samples].

        responses, mask: tokens of the responses and their mask, both [samples, response].
        """
        n, rewards = self.config.rollout.n, []
        for row, (response, kept) in enumerate(zip(responses, mask, strict=True)):
            prompt = prompts[row // n]
            text = self.tokenizer.decode(response[kept].numpy())
            rewards.append(
                self.reward(prompt=prompt.text, response=text, answer=prompt.answer, record=prompt.fields)
            )
        grouped = torch.tensor(rewards).view(-1, n)
        return (
            (grouped - grouped.mean(dim=1, keepdim=True)) / (grouped.std(dim=1, keepdim=True) + 1e-6)
        ).flatten()

    def logprobs(self, model, tokens: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
        """Return the log-probs of the response tokens, float32 [samples, response]."""
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        keep = tokens.shape[1] - width + 1
        logits = model(
            tokens, attention_mask=mask.long(), position_ids=positions, logits_to_keep=keep, use_cache=False
        ).logits[:, :-1]
        return torch.log_softmax(logits, dim=-1).gather(2, tokens[:, width:, None])[..., 0]

    def train(self, tokens, mask, width, advantage, reference) -> None:
        algorithm = self.config.algorithm
        logp = self.logprobs(self.policy, tokens, mask, width)
        ratio = torch.exp(logp - logp.detach())
        clipped = ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
        policy = -torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
        difference = reference - logp
        kl = torch.exp(difference) - difference - 1
        trained = mask[:, width:]
        loss = ((policy + algorithm.kl_loss_coef * kl) * trained).sum() / trained.sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.optimizer.clip_grad)
        self.optimizer.step()


def our_step(controller: Controller) -> dict[str, float]:
    """Do one GRPO step of grpo-megatron. Return its logged scalars, with the wall time as `time/step`."""
    start = time.perf_counter()
    controller.train_step(controller.loop.begin_step())
    seconds = time.perf_counter() - start
    with open(f"{controller.monitor.directory}/{METRICS}", encoding="utf-8") as file:
        scalars = json.loads(file.readlines()[-1])
    return {**scalars, "time/step": seconds}


def plain_step(plain: PlainLoop) -> dict[str, float]:
    """Do one step of the plain loop. Return {name: value} of its phases, step time and mean response length.

    The names are those that `our_step` returns.
    """
    plain.phases.take()
    start = time.perf_counter()
    tokens = plain.step()
    seconds = time.perf_counter() - start
    samples = plain.config.data.train_batch_size * plain.config.rollout.n
    phases = {f"time/{name}": value for name, value in plain.phases.take().items()}
    return {**phases, "time/step": seconds, "response/length_mean": tokens / samples}


@contextmanager
def cpu_of_children(used: list[float]):
    """Measure the mean number of cores that this process's children keep busy within the context.

    used: list to which the number is appended at the end.
    """

    def seconds() -> float:
        times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
        return sum(t.user + t.system for t in times)

    before, start = seconds(), time.perf_counter()
    yield
    used.append((seconds() - before) / (time.perf_counter() - start))


def summary(rows: list[dict[str, float]], samples: int) -> dict[str, float]:
    """Return figures of one side: samples per second, seconds, tokens per sample, and shares of the phases.

    All are medians over the steps, except the mean of the tokens per sample.

    rows: scalars of each step.
    samples: number of samples of a step.
    """
    result = {
        "rate": statistics.median(samples / row["time/step"] for row in rows),
        "seconds": statistics.median(row["time/step"] for row in rows),
        "tokens": statistics.mean(row["response/length_mean"] for row in rows),
    }
    for name in PHASES:
        result[name] = statistics.median(row.get(f"time/{name}", 0.0) / row["time/step"] for row in rows)
    rest = [1 - sum(row.get(f"time/{name}", 0.0) for name in PHASES) / row["time/step"] for row in rows]
    return {**result, "other": statistics.median(rest)}


def measure(config: Config, steps: int) -> tuple[list[dict], list[dict], float]:
    """Run the steps of both sides in turn.

    Returns (scalars of each of our steps, scalars of each step of the plain loop, median number of cores that
    our processes used while the plain loop ran), all without the warm-up.
    """
    ours, plains, background = [], [], []
    with assembled_loop(config) as (controller, _):
        controller.rollouts.start()
        plain = PlainLoop(config)
        for _ in range(WARM_UP + steps):
            ours.append(our_step(controller))
            with cpu_of_children(background):
                plains.append(plain_step(plain))
    return ours[WARM_UP:], plains[WARM_UP:], statistics.median(background[WARM_UP:])


def main() -> None:
    show_messages()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each kind")
    parser.add_argument(
        "--tokenizer",
        choices=("characters", "bytes"),
        default="characters",
        help="tokenizer, which decides the lengths of responses",
    )
    parser.add_argument(
        "changes", nargs="*", metavar="key=value", help="values that override the configuration's"
    )
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        parameters = make(Path(folder, "model"), options.tokenizer, hidden=256, layers=4, heads=8, ffn=512)
        write_prompts(Path(folder, "train.jsonl"), 1024)
        config = our_config(folder, [f"run.total_steps={WARM_UP + options.steps}", *options.changes])
        rows = measure(config, options.steps)
    samples = config.data.train_batch_size * config.rollout.n
    ours, plain = (summary(part, samples) for part in rows[:2])
    columns = ("rate", "seconds", "tokens", *PHASES, "other")
    print(f"{parameters:,} parameters; {samples} samples a step; medians of {options.steps} steps")
    print(f"{'':<8}" + "".join(f"{name:>12}" for name in ("samples/s", "s/step", "tokens", *PHASES, "other")))
    for name, values in (("ours", ours), ("plain", plain)):
        print(f"{name:<8}" + "".join(f"{values[column]:>12.3f}" for column in columns))
    result = {
        "speedup_over_plain": ours["rate"] / plain["rate"],
        "overhead_share": ours["other"],
        "ours_samples_per_second": ours["rate"],
        "plain_samples_per_second": plain["rate"],
        "ours_tokens_per_sample": ours["tokens"],
        "plain_tokens_per_sample": plain["tokens"],
        "background_cores": rows[2],
        **{name: ours[name] for name in (*PHASES, "other")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
