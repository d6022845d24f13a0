"""The JSON requests of the Tinker API, as far as the server reads them."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_megatron.errors import UserError


def explained(errors: Sequence[Any]) -> str:
    """Return pydantic's errors about a request as one text, without the request's values."""
    return "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors)


class AdamParams(BaseModel):
    """Options of Adam for one optimizer step."""

    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)


class ModelRequest(BaseModel):
    """The body of a request about the model. Which fields are set depends on the request."""

    model_config = ConfigDict(protected_namespaces=())

    session_id: str | None = None
    model_id: str = ""
    model_seq_id: int = 0
    seq_id: int = 0
    base_model: str | None = None
    optimizer_config: dict[str, Any] = {}
    path: str | None = None
    optimizer: bool = True
    overwrite: bool = False
    sampling_session_seq_id: int = 0
    kind: Literal["snapshot", "inflight"] = "snapshot"
    model_path: str | None = None
    lora_config: dict[str, Any] = {}
    age_encryption_recipients: list[str] | None = None
    adam_params: dict[str, Any] | None = None

    def check_model(self, name: str) -> None:
        """Raise UserError if the request asks for another model or optimizer, or for another kind of LoRA.

        name: name of the server's model.
        """
        if self.base_model not in (None, name):
            raise UserError(f"this server has the model {name}, not {self.base_model}")
        if self.optimizer_config.get("type", "adamw") != "adamw":
            raise UserError("the optimizer of this server is AdamW")
        if off := [key for key, value in self.lora_config.items() if value is False]:
            raise UserError(f"the server's configuration says what is trained; {off[0]}=False is impossible")

    def adam(self) -> AdamParams:
        """Return the options of Adam. Raises UserError if they are missing or wrong."""
        if self.adam_params is None:
            raise UserError("the optimizer is AdamW: call optim_step with AdamParams")
        try:
            return AdamParams(**self.adam_params)
        except ValidationError as error:
            raise UserError(explained(error.errors())) from error


class TokenChunk(BaseModel):
    """Tokens of a prompt. Other chunks, such as images, are refused."""

    type: Literal["encoded_text"]
    tokens: list[int]


class ModelInput(BaseModel):
    """A prompt."""

    chunks: list[TokenChunk]


class SamplingParams(BaseModel):
    """Settings of sampling."""

    max_tokens: int | None = Field(None, gt=0)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)

    def settings(self) -> dict[str, Any]:
        """Return the arguments of Session.sample, without the prompts and the number of samples."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        kind = "stop_token_ids" if stop and isinstance(stop[0], int) else "stop"
        settings = {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p}
        return settings | {"top_k": self.top_k or -1} | ({kind: stop} if stop else {})


class SampleRequest(BaseModel):
    """The body of asample."""

    model_config = ConfigDict(extra="allow")

    type: str = "sample"
    sampling_session_id: str
    seq_id: int
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = Field(1, gt=0)
    prompt_logprobs: bool | None = None

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]

    def check(self) -> None:
        """Raise UserError if the request asks for something that the server does not have."""
        wrong = [name for name, value in (self.model_extra or {}).items() if value]
        wrong += ["SamplingParams.seed"] if self.sampling_params.seed is not None else []
        wrong += ["SamplingParams.stop=[]"] if self.sampling_params.stop == [] else []
        if wrong:
            hint = "; choose another loss than stable_reinforce" if "record_stability_info" in wrong else ""
            raise UserError(f"this server does not support {', '.join(wrong)}{hint}")
        if not self.ids:
            raise UserError("the prompt has no tokens; it needs at least one")
