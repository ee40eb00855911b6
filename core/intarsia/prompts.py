"""Reading requests: prompts become token ids, limits and stops are settled, and what cannot run is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from attrs import frozen

from intarsia.errors import InvalidRequestError
from intarsia.text import Tokenizer
from intarsia.types import Chat, Prompt, Request, SamplingParams
from intarsia.types.chat import shown


@frozen
class Prompts:
    """What a request's prompt may be: the tokenizer, how many ids there are, and how long a sequence may get."""

    tokenizer: Tokenizer | None
    num_ids: int
    max_model_len: int

    def split(self, prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        """Return a list of prompts: a text, a chat, a bare list of ints and one of messages are one prompt each."""
        if isinstance(prompts, str | Chat):
            return [prompts]
        listed: list[Any] = _listed(prompts)
        if listed and all(_is_id(item) or isinstance(item, Mapping) for item in listed):
            return [listed]
        return listed

    def read(self, request: Request) -> tuple[list[int], int, frozenset[int]]:
        """Return (prompt ids, the most tokens that the sequence may hold, the ids that end it).

        Raises:
            InvalidRequestError: names the field, the value and what would be right.
        """
        most = self._most(request.params)
        ids = self.ids(request.prompt, most)
        if not ids:
            raise InvalidRequestError("prompt: it has no tokens; give at least one", field="prompt")
        if len(ids) > most:
            what = "are beyond" if request.params.max_tokens == 0 else "leave no room for an answer within"
            raise InvalidRequestError(
                f"prompt: {len(ids)} tokens {what} engine.max_model_len = {self.max_model_len}; give at most {most}",
                field="prompt",
            )
        self._check_params(request.params)
        limit = request.params.max_tokens
        max_total = self.max_model_len if limit is None else min(self.max_model_len, len(ids) + limit)
        eos = () if request.params.ignore_eos or self.tokenizer is None else self.tokenizer.eos_ids
        return ids, max_total, frozenset((*eos, *request.params.stop_token_ids))

    def _most(self, params: SamplingParams) -> int:
        """Return how long a prompt may be: it leaves room for one token, unless it is only to be scored."""
        return self.max_model_len if params.max_tokens == 0 else self.max_model_len - 1

    def _check_params(self, params: SamplingParams) -> None:
        """Check what depends on the model: which ids there are, and whether answers have text."""
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("banned_token_ids", params.banned_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            for token in ids:
                self._check_id(token, f"sampling.{name}")
        if self.tokenizer is not None:
            return
        for name, texts, instead in (
            ("stop", params.stop, "stop_token_ids"),
            ("banned_words", params.banned_words, "banned_token_ids"),
        ):
            if texts:
                raise InvalidRequestError(
                    f"sampling.{name}: this model has no tokenizer, so its answers have no text; give {instead}",
                    field=f"sampling.{name}",
                )

    def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids; raise InvalidRequestError where one is none, or the model has no tokenizer."""
        if not hasattr(token_ids, "__iter__"):
            raise InvalidRequestError(f"token_ids: {shown(token_ids)} is not a list of token ids", field="token_ids")
        for token in token_ids:
            if not _is_id(token):
                raise InvalidRequestError(f"token_ids: {shown(token)} is no token id", field="token_ids")
            self._check_id(token, "token_ids")
        if self.tokenizer is None:
            raise InvalidRequestError("token_ids: this model has no tokenizer, so its ids have no text")
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def ids(self, prompt: Prompt, most: int | None = None) -> list[int]:
        """Return a prompt's ids; raise InvalidRequestError where it is none, or a text of far more than `most`."""
        if isinstance(prompt, str):
            return self._tokenizer("text").encode(prompt, most=most)
        if isinstance(prompt, Chat):
            return self._tokenizer("a chat").encode_chat(prompt, most=most)
        listed: list[Any] = _listed(prompt)
        if listed and all(isinstance(item, Mapping) for item in listed):
            return self._tokenizer("messages").encode_chat(listed, most=most)
        for item in listed:
            if not _is_id(item):
                raise InvalidRequestError(
                    f"prompt: {shown(item)} is neither a token id nor a message; a prompt is text, token ids or "
                    "messages",
                    field="prompt",
                )
            self._check_id(item, "prompt")
        return [int(item) for item in listed]

    def _tokenizer(self, kind: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"prompt: it is {kind}, and this model has no tokenizer; give token ids", field="prompt"
            )
        return self.tokenizer

    def _check_id(self, token: int, name: str) -> None:
        if not 0 <= token < self.num_ids:
            raise InvalidRequestError(
                f"{name}: {shown(token)} is outside the vocabulary of {self.num_ids} ids", field=name
            )


def _is_id(item: object) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)


def _listed(prompts: Any) -> list[Any]:
    """Take lists, tuples, arrays and tensors alike."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, Mapping | bytes | bytearray) or not hasattr(prompts, "__iter__"):
        raise InvalidRequestError(
            f"prompt: {shown(prompts)} is not a prompt; a prompt is text, token ids or a list of messages",
            field="prompt",
        )
    return list(prompts)
