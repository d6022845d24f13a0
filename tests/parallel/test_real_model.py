"""SmolLM2-135M-Instruct, a real pretrained model, in Megatron: log-probs and export, in every layout."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import OptimizerConfig
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.models import transformers_logprobs
from tests.parallel import actors
from tests.parallel.test_weights import assert_identical, read_all

pytestmark = pytest.mark.slow

# The model has 9 heads and 3 key-value heads: TP 3 is the only way to split them.
LAYOUTS = {
    "tp1": ParallelSizes(),
    "tp3": ParallelSizes(tp=3),
    "tp3sp": ParallelSizes(tp=3, sequence_parallel=True),
    "pp2": ParallelSizes(pp=2),
    "dp2": ParallelSizes(dp=2),
}
# float32; the model's logits reach 30, and 30 layers add up their rounding. Tiny models stay below 1e-5.
TOLERANCE = 1e-4
CHATS = (
    ("How many legs do two cats have?", "Two cats have 8 legs in total, because each cat has 4 legs."),
    ("Name a colour.", "Blue."),
    (
        "Write one sentence about the sea.",
        "The sea was calm that morning, and gulls circled above the harbour without a sound.",
    ),
    ("What is 7 times 8?", "7 * 8 = 56"),
    ("Übersetze: good morning", "Guten Morgen! 😀"),
    ("What is the capital of France?", "The capital of France is Paris."),
)


@pytest.fixture(scope="module")
def batch(smollm2):
    """Chats of different lengths in the model's template."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    samples = []
    for i, (question, answer) in enumerate(CHATS):
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        response = tokenizer(answer + "<|im_end|>")["input_ids"]
        samples.append(
            Sample.of(
                group_id=i,
                trajectory_id=i,
                prompt_ids=np.array(prompt, np.int32),
                response_ids=np.array(response, np.int32),
                loss_mask=np.ones(len(response), np.bool_),
                rollout_logprobs=np.zeros(len(response), np.float32),
                finish_reason="stop",
            )
        )
    return TrainBatch.from_samples(samples)


@pytest.fixture(scope="module")
def expected(smollm2, batch):
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    return transformers_logprobs(model, batch)


def test_the_model_knows_what_it_was_trained_on(batch, expected):
    """The other tests would also pass with random weights. These must be the pretrained ones."""
    assert expected[batch.loss_mask].mean() > -4.0  # random weights: -10.8


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_transformers(ranks, smollm2, batch, expected, layout, packing):
    sizes = LAYOUTS[layout]
    config = actor_config(str(smollm2), sizes, OptimizerConfig())
    found = [
        values for values in ranks.run(actors.logprobs, sizes, config, batch, packing) if values is not None
    ]
    difference = np.abs(sum(found) - expected).max()  # replicas hold disjoint sequences, zero elsewhere
    print(f"{layout}: {difference:.1e}")
    assert difference <= TOLERANCE


@pytest.mark.parametrize("layout", ["tp3", "pp2"])
def test_export_is_bit_identical(ranks, smollm2, tmp_path, layout):
    sizes = LAYOUTS[layout]
    ranks.run(
        actors.round_trip,
        sizes,
        actor_config(str(smollm2), sizes, OptimizerConfig()),
        str(tmp_path / "hf"),
        None,
    )
    assert_identical(read_all(tmp_path / "hf"), read_all(smollm2))
