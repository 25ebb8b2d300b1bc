"""The neutral file `rlk-align/logprobs/1`: each line is a sequence with both sides' log-probs.

Index t of every list belongs to token t of `token_ids`. A list may instead be as long as the
response; its index 0 then belongs to the first response token. A value that was not recorded is
null and never 0.0; NaN is a value.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

SCHEMA: Literal["rlk-align/logprobs/1"] = "rlk-align/logprobs/1"
Number = Annotated[float, Strict()]
LogProbs = list[Number | None]
Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)]
Flags = list[Annotated[bool, Strict()]] | list[Annotated[int, Field(ge=0, le=1, strict=True)]]
"""true and false, or 1 and 0."""


class Sampling(BaseModel):
    """How the rollout engine sampled; null where the dump does not say."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**63, strict=True)] | None = None
    """-1 or 0: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    """Whether the rollout's log-probs are of the model's distribution or of the sampled one."""


class SequenceRecord(BaseModel):
    """One sequence of a training step: a prompt, a response, and what both sides say of it."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=True)

    schema_id: Literal["rlk-align/logprobs/1"] = Field(SCHEMA, alias="schema")
    id: str | int
    group: str | int | None = None
    """What the samples of one prompt share."""
    step: Count | None = None
    """The training step that consumed it."""
    token_ids: list[Count]
    prompt_length: Count
    mask: Flags | None = None
    """Which tokens the loss counts; null for every response token."""
    rollout_logprobs: LogProbs | None = None
    train_logprobs: LogProbs | None = None
    position_ids: list[Count] | None = None
    pack_index: Count | None = None
    """The sequence's place in its pack, from 0."""
    rollout_version: Count | list[Count | None] | None = None
    """Version of the weights that sampled it: one, or one for each token."""
    train_version: Count | None = None
    sampling: Sampling = Sampling()
    sampler: str | None = None
    """What drew the response: `rlk` for the sampler of rlk-kernels, whose tokens can be drawn
    again."""
    seeds: Seed | list[Seed | None] | None = None
    """The seed of the request that sampled each token of the response, whose index in `token_ids`
    is its position in the request: one seed, or one for each token."""
    rollout_dtype: str | None = None
    train_dtype: str | None = None
    entropy: LogProbs | None = None
    """The entropy of the trainer's distribution at each token, in nats."""
    kept_mass: LogProbs | None = None
    """The share of probability that truncation kept at each token."""
    cached_tokens: Count | None = None
    """Prompt tokens that came from the rollout's prefix cache."""
    mask_rewritten: bool | None = None
    """Whether `mask` was changed after sampling, by rejection for one."""
    reward: Number | None = None

    @model_validator(mode="before")
    @classmethod
    def _dtype_of_each_side(cls, data: Any) -> Any:
        """Takes `dtype: {"rollout", "train"}` for the two fields."""
        if isinstance(data, dict) and isinstance(data.get("dtype"), dict):
            sides = {f"{side}_dtype": name for side, name in data["dtype"].items()}
            return sides | data
        return data

    @model_validator(mode="after")
    def _lengths_agree(self) -> "SequenceRecord":
        total = len(self.token_ids)
        if self.prompt_length > total:
            raise ValueError(f"prompt_length is {self.prompt_length}, of {total} token_ids")
        if self.rollout_logprobs is None and self.train_logprobs is None:
            raise ValueError("neither rollout_logprobs nor train_logprobs is there")
        for name in PER_TOKEN:
            values = getattr(self, name)
            if isinstance(values, list) and len(values) not in (total, total - self.prompt_length):
                raise ValueError(
                    f"{name} has {len(values)} entries; {total} (all token_ids) or "
                    f"{total - self.prompt_length} (the response) are expected"
                )
        return self


PER_TOKEN = (
    *("mask", "rollout_logprobs", "train_logprobs", "position_ids", "rollout_version"),
    *("entropy", "kept_mass", "seeds"),
)
"""Fields with a value for each token."""
