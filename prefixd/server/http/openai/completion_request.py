"""A request for completions of prompts."""

from __future__ import annotations

from typing import ClassVar

from msgspec import UNSET, Raw, UnsetType

from prefixd.server.http.openai.sampling_fields import FieldError, SamplingFields
from prefixd.server.http.openai.token_lists import read_prompts
from prefixd.serving.generation import GenerateParams


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Raw
    max_tokens: int | None = None
    best_of: int | None = None
    logprobs: int | None = None

    suffix: Raw | UnsetType = UNSET
    prompt_embeds: Raw | UnsetType = UNSET
    add_special_tokens: Raw | UnsetType = UNSET

    refused: ClassVar[dict[str, tuple[object, ...]]] = SamplingFields.refused | {
        "suffix": (None, ""),
        "prompt_embeds": (None,),
        "add_special_tokens": (None, True),
    }

    def params(self) -> list[GenerateParams]:
        """What `Generation.run` takes, for each prompt. Raises FieldError."""
        self.check()
        if self.best_of is not None and self.best_of < 1:
            raise FieldError("best_of", f"best_of is {self.best_of}; compute at least as many sequences as n")
        sampling = self.sampling(self.max_tokens, self.logprobs)
        return [
            GenerateParams(
                prompt=prompt,
                sampling=sampling,
                n=self.answers,
                best_of=self.best_of or 0,
                priority=self.priority or 0,
                salt=self.salt,
                model=self.model or "",
            )
            for prompt in read_prompts(bytes(self.prompt))
        ]
