"""The JSON requests of the Tinker API, as far as the server reads them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo_megatron.errors import UserError


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateModel(_Body):
    """The body of create_model."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None


class LoadWeights(_Body):
    """The body of load_weights. Either model_id and seq_id are set, or session_id and model_seq_id."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None


class ModelRequest(_Body):
    """The common fields of requests that a model executes in their order."""

    model_id: str
    seq_id: int


class AdamParams(_Body):
    """Options of Adam for one optimizer step."""

    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)


class OptimStep(ModelRequest):
    """The body of optim_step."""

    adam_params: AdamParams | None = None


class SaveWeights(ModelRequest):
    """The body of save_weights."""

    path: str
    overwrite: bool = False


class SaveForSampler(ModelRequest):
    """The body of save_weights_for_sampler. Without a path, sampling_session_seq_id is set."""

    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class CreateSampler(_Body):
    """The body of create_sampling_session."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class TokenChunk(_Body):
    """Tokens of a prompt."""

    tokens: list[int]


class ModelInput(_Body):
    """A prompt."""

    chunks: list[TokenChunk]


class SamplingParams(_Body):
    """Settings of sampling."""

    max_tokens: int | None = Field(None, gt=0)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)

    def settings(self) -> dict[str, Any]:
        """Return the arguments of Session.sample, without the prompts and the number of samples.

        Raises UserError for settings that have no counterpart.
        """
        if self.seed is not None:
            raise UserError("SamplingParams.seed is not supported; leave it out")
        if self.stop == []:
            raise UserError("SamplingParams.stop=[] is not supported: the model's end token ends a response")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        kind = "stop_token_ids" if stop and isinstance(stop[0], int) else "stop"
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,
            **({kind: stop} if stop else {}),
        }


class SampleRequest(_Body):
    """The body of asample."""

    sampling_session_id: str
    seq_id: int
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = Field(1, gt=0)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]

    def check(self) -> None:
        """Raise UserError if the request asks for something that the server does not have."""
        for name in (
            "topk_prompt_logprobs",
            "topk_sample_logprobs",
            "target_prompt_logprobs",
            "prompt_alt_tokens_k",
            "prompt_logprobs_last_n",
        ):
            if getattr(self, name):
                raise UserError(f"{name} is not supported")
        if self.record_stability_info:
            raise UserError(
                "record_stability_info is for the loss stable_reinforce, which is not supported; choose "
                "another loss, such as importance_sampling"
            )
        if not self.ids:
            raise UserError("the prompt has no tokens")
        self.sampling_params.settings()


class Retrieve(_Body):
    """The body of retrieve_future."""

    request_id: str
