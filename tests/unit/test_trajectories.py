"""The sequences of an episode have the tokens, masks, log-probs and routing of its requests."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithm.filters import mask_truncated
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, WeightSpan
from grpo_megatron.batch.sequence_weights import LOSS_AGG_MODES
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.data import DataConfig
from grpo_megatron.config.reward import OverlongBufferConfig, RewardConfig
from grpo_megatron.config.rollout import HistoryKind, RolloutConfig
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.errors import UserError
from grpo_megatron.monitoring.samples import TrainedOn, distributions, group_text
from grpo_megatron.rewards.control import shuffle_rewards
from grpo_megatron.rewards.shaping import shape_overlong
from grpo_megatron.rollout.environments import StepResult
from grpo_megatron.rollout.episodes import MultiTurn
from grpo_megatron.rollout.recording.replay import Replay
from grpo_megatron.rollout.statistics import group_statistics
from grpo_megatron.rollout.trajectory import Episode
from grpo_megatron.sglang.request import Completion
from tests.coefficients import token_weights
from tests.rollouts import recorder_of

# Drops what earlier turns thought, as Qwen3's does.
FORGETFUL = (
    "{% for tool in tools or [] %}({{ tool.name }}){% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}<eos>"
    "{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from make_tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer("bytes").save_pretrained(folder)
    (folder / "forgetful.jinja").write_text(FORGETFUL)
    return PromptTokenizer(str(folder), DataConfig(chat_template=str(folder / "forgetful.jinja")))


class Answers:
    """An environment in the test's process that gives its observations one after the other, then is done."""

    def __init__(self, first, observations):
        self.first, self.observations, self.closed = first, list(observations), 0

    def episode(self, prompt):
        return self

    async def reset(self, seed):
        return self.first

    async def step(self, response_ids):
        done = not self.observations
        return self.decode(response_ids), StepResult(
            "" if done else self.observations.pop(0), 0.5, done, {"steps": 1}
        )

    async def text(self, ids):
        return self.decode(ids)

    async def close(self):
        self.closed += 1


class Writer:
    """A model that writes the given ids and records each request.

    Routing is a function of request and position.
    """

    def __init__(self, turns):
        self.turns, self.requests = list(turns), []

    async def __call__(self, ids, most, routed=0):
        number, context = len(self.requests), list(ids)
        written = self.turns.pop(0)
        reason = "stop" if len(written) <= most else "length"
        written = written[:most]
        logprobs = -(1000.0 * (number + 1) + np.arange(len(written), dtype=np.float32))
        rows = np.arange(routed, len(context) + len(written) - 1)
        routing = np.stack([np.full_like(rows, number), rows], axis=1).astype(np.int16)[
            :, None
        ]  # 1 layer, top 2
        self.requests.append((context, written, logprobs))
        spans = (WeightSpan(number, 0, len(written)),)
        return Completion((0, 0), np.array(written, dtype=np.int32), logprobs, reason, spans, routing)


def play(tokenizer, prompt, writer, world, history, limit=400, trajectory=0, max_turns=8):
    episode, world.decode = Episode(prompt, 3, trajectory, limit, (0, 0)), tokenizer.decode
    rollout = RolloutConfig(max_turns=max_turns, history=history)
    return asyncio.run(MultiTurn(world, tokenizer, rollout, RewardConfig(), 0).play(episode, writer))


def prompt_of(tokenizer, text="ask"):
    rendered, ids = tokenizer.prompt(text, "f:1")
    return Prompt(7, ids, rendered, "x", messages=tokenizer.messages(text))


def message(text, role="user"):
    return [{"role": role, "content": text}]


def ids_of(tokenizer, text):
    return tokenizer.encode(text).tolist()


words = st.text("ab<>é/ ", max_size=6)
observations = st.one_of(
    words, words.map(message), words.map(lambda text: message(text, "tool") + message("!", "tool"))
)
# Any tokens at all: those that spell no text, and those that the tokenizer would write otherwise, too.
written = st.lists(st.integers(3, 261), min_size=1, max_size=8)
thought = st.tuples(words, words).map(lambda two: f"<think>{two[0]}</think>{two[1]}")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.one_of(written, thought), st.booleans(), observations), min_size=1, max_size=5),
    st.one_of(st.just(""), observations),
    st.sampled_from(list(HistoryKind)),
    st.integers(40, 150),  # the longest first observation leaves room in it
)
def test_every_token_is_trained_after_what_the_model_read(tokenizer, transcript, first, history, limit):
    end = ids_of(tokenizer, "<eos>")
    turns = [
        (ids if isinstance(ids, list) else ids_of(tokenizer, ids)) + end * ended
        for ids, ended, _ in transcript
    ]
    writer = Writer(turns)
    world = Answers(first, [observation for _, _, observation in transcript[:-1]])
    prompt = prompt_of(tokenizer)
    samples = play(tokenizer, prompt, writer, world, history, limit)
    assert world.closed == 1
    contexts = [context for context, _, _ in writer.requests]
    assert contexts == expected_contexts(
        tokenizer, writer.requests, [first, *(o for _, _, o in transcript)], history
    )
    wanted = [
        (context + own[:place], token, logprob, number)
        for number, (context, own, logprobs) in enumerate(writer.requests)
        for place, (token, logprob) in enumerate(zip(own, logprobs, strict=True))
    ]
    found = []
    for sample in samples:
        ids = [*sample.arrays.prompt_ids.tolist(), *sample.arrays.response_ids.tolist()]
        version = {
            place: span.version for span in sample.weight_spans for place in range(span.start, span.end)
        }
        assert sorted(version) == np.flatnonzero(sample.arrays.loss_mask).tolist()
        for place in np.flatnonzero(sample.arrays.loss_mask).tolist():
            at = len(sample.arrays.prompt_ids) + place
            found.append((ids[:at], ids[at], sample.arrays.rollout_logprobs[place], version[place]))
        assert not sample.arrays.rollout_logprobs[~sample.arrays.loss_mask].any()
        assert sample.arrays.loss_mask[-1]
        check_routing(sample, writer.requests)
        assert len(ids) <= len(prompt.ids) + limit
        assert (sample.reward, sample.trajectory_id, sample.group_id) == (0.5 * len(writer.requests), 0, 3)
        assert sample.reward_components == {"steps": len(writer.requests)}
    assert found == wanted
    breaks = sum(
        after[: len(before) + len(own)] != before + own
        for (before, own, _), (after, _, _) in zip(writer.requests, writer.requests[1:], strict=False)
    )
    assert len(samples) == 1 + breaks
    assert history == HistoryKind.template or len(samples) == 1
    assert sum(sample.turns for sample in samples) == len(writer.requests)
    batch = TrainBatch.from_samples(list(samples))
    assert batch.target[batch.loss_mask].tolist() == [token for _, token, _, _ in wanted]
    assert batch.rollout_logp[batch.loss_mask].tolist() == [logprob for _, _, logprob, _ in wanted]


@pytest.mark.parametrize(("component", "collides"), [("right", False), ("steps", True)])
def test_a_component_of_the_environment_and_one_of_the_reward_are_both_kept(tokenizer, component, collides):
    class Reward:
        async def score(self, prompt, sample):
            return sample.scored(1.0, {component: 0.25})

    world = Answers("", [])
    world.decode = tokenizer.decode
    turns = MultiTurn(world, tokenizer, RolloutConfig(), RewardConfig(), 0, Reward())
    playing = turns.play(
        Episode(prompt_of(tokenizer), 3, 0, 400, (0, 0)), Writer([ids_of(tokenizer, "5<eos>")])
    )
    if collides:
        with pytest.raises(
            UserError, match=r"the environment and the reward functions both return a component named steps"
        ):
            asyncio.run(playing)
    else:
        assert asyncio.run(playing)[0].reward_components == {"steps": 1, component: 0.25}


def expected_contexts(tokenizer, requests, observed, history):
    """Return what the model must have read before each turn, from what it wrote before and the
    observations.
    """
    messages = joined([*message("ask")], observed[0])
    contexts = [ids_of(tokenizer, spelled(messages))]
    if history == HistoryKind.append and isinstance(observed[0], str):
        contexts = [ids_of(tokenizer, f"<user>ask<assistant>{observed[0]}")]
    for (_, own, _), observation in zip(requests[:-1], observed[1:], strict=False):
        if history == HistoryKind.template:
            said = tokenizer.decode(np.array(own, dtype=np.int32))
            messages = [*messages, *message(said, "assistant"), *as_messages(observation)]
            contexts.append(ids_of(tokenizer, spelled(messages)))
        elif isinstance(observation, str):
            contexts.append(contexts[-1] + own + ids_of(tokenizer, observation))
        else:
            end = [] if own[-1:] == ids_of(tokenizer, "<eos>") else ids_of(tokenizer, "<eos>")
            contexts.append(contexts[-1] + own + end + ids_of(tokenizer, spelled(observation)))
    return contexts


def as_messages(observation):
    return (message(observation) if observation else []) if isinstance(observation, str) else observation


def joined(messages, observation):
    head, *others = [*as_messages(observation), None]
    if head is None or head["role"] != "user":
        return messages + [one for one in (head, *others) if one]
    return [*message(f"{messages[-1]['content']}\n{head['content']}"), *others[:-1]]


def spelled(messages):
    """Return the messages as FORGETFUL writes them."""
    parts = [f"<{m['role']}>{m['content']}" for m in messages]
    for place, m in enumerate(messages):
        if m["role"] == "assistant":
            parts[place] = f"<assistant>{m['content'].split('</think>')[-1]}<eos>"
    return "".join(parts) + "<assistant>"


def check_routing(sample, requests):
    """Check that each row comes from the first request of the path that computed its token.

    The last token was never computed.
    """
    ids = [*sample.arrays.prompt_ids.tolist(), *sample.arrays.response_ids.tolist()]
    sequences = [context + own for context, own, _ in requests]
    requested = [number for number, own in enumerate(sequences) if ids[: len(own)] == own]
    wanted, known = [], 0
    for number in requested:
        context, own, _ = requests[number]
        computed = len(context) + len(own) - 1
        wanted += [[number, place] for place in range(known, computed)]
        known = computed
    assert sample.arrays.routing[:-1, 0].tolist() == wanted
    assert sample.arrays.routing[-1, 0].tolist() == [0, 1]  # whatever is legal


@pytest.fixture
def group(tokenizer):
    """One trajectory of two sequences, beside one of one."""
    prompt, thinking = prompt_of(tokenizer), "<think>hm</think>"
    samples = ()
    for number, turns in enumerate(([f"{thinking}a<eos>", f"{thinking}bc<eos>"], ["d<eos>", "e<eos>"])):
        writer = Writer([ids_of(tokenizer, turn) for turn in turns])
        samples += play(
            tokenizer, prompt, writer, Answers("", [message("next")]), HistoryKind.template, trajectory=number
        )
    return Group(3, prompt, samples)


def test_the_template_drops_what_was_thought(tokenizer, group):
    (first, second), (other,) = group.trajectories
    assert tokenizer.decode_all(first.arrays.prompt_ids) == "<user>ask<assistant>"
    assert tokenizer.decode_all(first.arrays.response_ids) == "<think>hm</think>a<eos>"
    assert tokenizer.decode_all(second.arrays.prompt_ids) == "<user>ask<assistant>a<eos><user>next<assistant>"
    assert tokenizer.decode_all(second.arrays.response_ids) == "<think>hm</think>bc<eos>"
    assert tokenizer.decode_all(other.arrays.response_ids) == "d<eos><user>next<assistant>e<eos>"
    assert [sample.trajectory_id for sample in group.samples] == [0, 0, 1]


def test_a_trajectory_of_several_sequences_counts_once(group):
    (first, second), (other,) = group.trajectories
    samples = [first.scored(1.0, {"x": 4}), second.scored(1.0, {"x": 4}), other.scored(0.0, {"x": 0})]
    group = Group(3, group.prompt, tuple(samples))
    assert group.rewards == [1.0, 0.0]
    scalars = group_statistics([group], pass_reward=1.0)
    assert (scalars["reward/mean"], scalars["reward/component/x"], scalars["reward/pass@2"]) == (0.5, 2, 1)
    assert (scalars["response/turns_mean"], scalars["response/sequences_mean"]) == (2, 1.5)
    lengths = [
        len(first.arrays.response_ids) + len(second.arrays.response_ids),
        len("de") + 2,
    ]  # and two end tokens; the answer is not the model's
    assert scalars["response/length_mean"] == np.mean(lengths)
    assert distributions(TrainedOn(np.array(lengths), groups=[group]))["response/lengths"].tolist() == lengths
    text = group_text(group, 1000)
    assert "response 1 of 2: reward 1, x 4" in text
    assert "<think>hm</think>a\n<think>hm</think>bc" in text


def test_the_length_of_a_response_is_that_of_what_the_model_wrote_in_every_history(tokenizer):
    """Observations are in the response of one long sequence, and in the prompts of the sequences that the
    template makes of it.
    """
    prompt, turns = prompt_of(tokenizer), ["<think>hm</think>a<eos>", "<think>hm</think>bc<eos>"]
    written = sum(len(ids_of(tokenizer, turn)) for turn in turns)
    found = {}
    for history in HistoryKind:
        writer = Writer([ids_of(tokenizer, turn) for turn in turns])
        samples = play(tokenizer, prompt, writer, Answers("", [message("next")]), history)
        # Also where the overlong filter leaves nothing of it to be trained.
        (group,) = mask_truncated(
            [Group(3, prompt, tuple(replace(s, finish_reason="length") for s in samples))]
        )
        found[len(samples)] = group_statistics([group], pass_reward=1.0)["response/length_mean"]
    assert found == {1: written, 2: written}


def test_rewards_are_shaped_by_trajectories(group):
    (shuffled,) = shuffle_rewards(
        [Group(3, group.prompt, tuple(s.scored(float(s.trajectory_id), {}) for s in group.samples))],
        np.random.default_rng(0),
    )
    assert sorted(shuffled.rewards) == [0.0, 1.0]
    assert shuffled.samples[0].reward == shuffled.samples[1].reward
    longest = max(sample.num_tokens for sample in group.samples) - len(group.prompt.ids)
    (shaped,) = shape_overlong([group], longest, OverlongBufferConfig(length=longest, penalty=1.0))
    # The second sequence ends farther from the prompt than the first, and counts for both.
    assert shaped.samples[0].reward_components == shaped.samples[1].reward_components
    assert shaped.rewards[0] == group.rewards[0] - 1


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_weights_do_not_depend_on_how_a_trajectory_is_cut(group, mode):
    batch = TrainBatch.from_samples(list(group.samples))
    weights = token_weights(batch, mode, 100)
    own = [weights[np.isin(batch.sequence_id, which)].sum() for which in ([0, 1], [2])]
    trained = [batch.loss_mask[np.isin(batch.sequence_id, which)].sum() for which in ([0, 1], [2])]
    total = sum(trained)
    wanted = {
        "token-mean": [count / total for count in trained],
        "seq-mean-token-sum": [count / 2 for count in trained],
        "seq-mean-token-mean": [0.5, 0.5],
        "seq-mean-token-sum-norm": [count / 200 for count in trained],
        "group-sum": [1, 1],
    }
    assert own == pytest.approx(wanted[mode])


def test_a_recording_has_all_sequences(tmp_path, group):
    recorder_of(tmp_path / "r").write(1, [group])
    (read,) = Replay(str(tmp_path / "r")).read(1)
    assert read.prompt.messages == group.prompt.messages
    for sample, other in zip(read.samples, group.samples, strict=True):
        assert replace(sample, handle=None, texts=None) == replace(other, handle=None, texts=None)
        assert all(np.array_equal(getattr(sample.arrays, k), v) for k, v in vars(other.arrays).items())


def test_template_history_needs_a_chat(tokenizer):
    prompt = Prompt(7, np.array([8, 9], dtype=np.int32), "..", "x")
    with pytest.raises(
        UserError,
        match=r"record 7: rollout.history=template needs a chat template, "
        "so the prompt must not be token ids",
    ):
        play(tokenizer, prompt, Writer([]), Answers("", []), HistoryKind.template)


def test_messages_without_a_template_are_put_as_they_are(tokenizer):
    prompt = Prompt(7, tokenizer.encode("ab"), "ab", "x")
    writer = Writer([ids_of(tokenizer, "c"), ids_of(tokenizer, "d")])
    (sample,) = play(tokenizer, prompt, writer, Answers(message("?"), [message("!")]), HistoryKind.append)
    assert tokenizer.decode_all(sample.arrays.response_ids) == "?c!d"
    assert sample.arrays.loss_mask.tolist() == [False, True, False, True]


def test_a_template_that_hides_turns_can_put_nothing_behind_them(tokenizer, tmp_path):
    (tmp_path / "deaf.jinja").write_text(
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    deaf = PromptTokenizer(
        tokenizer.tokenizer.name_or_path, DataConfig(chat_template=str(tmp_path / "deaf.jinja"))
    )
    with pytest.raises(UserError, match="changes the model's turns"):
        deaf.turn_format.after_turn(message("x"))


def test_tools_are_given_to_the_template(tokenizer):
    data = DataConfig(chat_template=tokenizer.tokenizer.name_or_path + "/forgetful.jinja")
    offering = PromptTokenizer(tokenizer.tokenizer.name_or_path, data, [{"name": "abacus"}])
    assert offering.prompt("1", "f:1")[0] == "(abacus)<user>1<assistant>"
    after = np.array(offering.turn_format.after_turn(message("2")))
    assert offering.decode_all(after) == "<eos><user>2<assistant>"
