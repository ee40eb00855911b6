"""Bodies of `generate`, and the requests that they are."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import evolve, frozen

from intarsia.errors import InvalidRequestError, did_you_mean
from intarsia.types import Chat, Prompt, Request, SamplingParams
from intarsia_zmq.limits import ServerLimits
from intarsia_zmq.logprobs import write_ids
from intarsia_zmq.verbs import checked, wrong
from intarsia_zmq.wire import Message

_SAMPLING = {field.name: field for field in attrs.fields(SamplingParams)}
_CHAT = {field.name: field for field in attrs.fields(Chat)}


@frozen(kw_only=True)
class Generate:
    """What a client asks for with `generate`.

    Attributes:
        request: what to generate; its id is the client's own.
        stream: send deltas; otherwise the answer comes whole in `done`.
        deadline_s: seconds from arrival after which the request ends with what it has.
        credit: deltas that may come before more is granted; None is the server's default.
    """

    request: Request
    stream: bool = True
    deadline_s: float | None = None
    credit: int | None = None

    @property
    def tokens(self) -> int:
        """About how many tokens it may take, for admission: those of the prompt and of all answers."""
        prompt, params = self.request.prompt, self.request.params
        # A text has a token for about four characters.
        said = len(str(prompt)) // 4 if isinstance(prompt, str | Chat) else len(prompt)
        return said + params.n * (params.max_tokens or 0)


def read_generate(message: Message, limits: ServerLimits) -> Generate:
    """Return what a message of kind `generate` asks for.

    Raises:
        InvalidRequestError: names the field by its path in the body, the value and what would be right.
    """
    body = checked("generate", message.body)
    if not message.id:
        raise InvalidRequestError("id: missing; give 1 to 256 printable characters of your own", field="id")
    credit, deadline = body.get("credit"), body.get("deadline_s")
    if credit is not None and credit > limits.credit:
        raise wrong("credit", credit, f"a number of deltas up to {limits.credit}")
    if deadline is not None and not 0 < deadline < math.inf:
        raise wrong("deadline_s", deadline, "a finite number of seconds above 0")
    request = Request(
        request_id=message.id,
        prompt=_read_prompt(body["prompt"], limits),
        params=_bounded(read_sampling(body.get("sampling", {})), limits),
        priority=body.get("priority", 0),
        cache_salt=body.get("cache_salt", ""),
    )
    return Generate(request=request, stream=body.get("stream", True), deadline_s=deadline, credit=credit)


def write_generate(asked: Generate) -> Message:
    """Return the message that asks for this; what has its default is left out."""
    request = asked.request
    said = {
        "prompt": _write_prompt(request.prompt),
        "sampling": write_sampling(request.params),
        "stream": None if asked.stream else False,
        "priority": request.priority or None,
        "cache_salt": request.cache_salt or None,
        "deadline_s": asked.deadline_s,
        "credit": asked.credit,
    }
    body = {key: value for key, value in said.items() if value is not None and value != {}}
    return Message("generate", request.request_id, 0, body)


def read_sampling(said: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters from a map of them.

    Raises:
        InvalidRequestError: a key is unknown, which a typing mistake would be, or a value is out of range.
    """
    for key, value in said.items():
        if key not in _SAMPLING:
            path = f"sampling.{key:.64}"
            raise InvalidRequestError(f"{path}: unknown.{did_you_mean(key[:64], _SAMPLING)}", field=path)
        _check_plain(value, f"sampling.{key}")
    try:
        return SamplingParams(**said)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"sampling: {error}", field="sampling") from error


def write_sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the map of those parameters that do not have their defaults."""
    default = SamplingParams()
    said = {name: getattr(params, name) for name in _SAMPLING}
    changed = {name: value for name, value in said.items() if value != getattr(default, name)}
    if "logit_bias" in changed:
        # Keys of maps are texts.
        changed["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return changed


def read_chat(said: Mapping[str, Any]) -> Chat:
    """Return the chat that a map as a prompt is.

    Raises:
        InvalidRequestError: names the field under `prompt`.
    """
    for key, value in said.items():
        path = f"prompt.{key:.64}"
        if key not in _CHAT:
            hint = did_you_mean(key[:64], _CHAT)
            raise InvalidRequestError(
                f"{path}: unknown; what else a template reads goes into variables.{hint}", field=path
            )
        _check_plain(value, path)
    if "messages" not in said:
        raise InvalidRequestError("prompt.messages: missing; a map as a prompt is a chat", field="prompt.messages")
    try:
        return Chat(**said)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"prompt.{error}", field=f"prompt.{error.field}") from error


def _read_prompt(said: Any, limits: ServerLimits) -> Prompt:
    if isinstance(said, dict):
        return read_chat(said)
    if isinstance(said, str):
        return said
    if len(said) > limits.prompt_tokens:
        raise InvalidRequestError(
            f"prompt: {len(said)} tokens; this server takes at most {limits.prompt_tokens}", field="prompt"
        )
    return said.tolist() if isinstance(said, array) else said


def _write_prompt(prompt: Prompt) -> Any:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Chat):
        plain = Chat(prompt.messages, continue_final_message=prompt.continue_final_message)
        said = attrs.asdict(prompt, recurse=False)
        unsaid = {name for name in said if said[name] == getattr(plain, name)} - {"messages", "continue_final_message"}
        return {name: value for name, value in said.items() if name not in unsaid}
    items: list[Any] = list(prompt)
    if items and isinstance(items[0], Mapping):
        return {"messages": items}
    return write_ids([int(token) for token in items])


def _bounded(params: SamplingParams, limits: ServerLimits) -> SamplingParams:
    """Hold the answer to what the server gives; one that asks for more is refused."""
    most, right = limits.output_tokens, f"at most {limits.output_tokens}, this server's limit"
    if params.min_tokens > most:
        raise wrong("sampling.min_tokens", params.min_tokens, right)
    if params.max_tokens is None:
        return evolve(params, max_tokens=most)
    if params.max_tokens > most:
        raise wrong("sampling.max_tokens", params.max_tokens, right)
    return params


def _check_plain(value: Any, path: str) -> None:
    """Check that there are no bytes within: what reads it knows what JSON can say. Nesting is bounded by the wire."""
    if isinstance(value, bytes):
        raise wrong(path, value, "text, a number, true, false, nil, an array or a map")
    if isinstance(value, dict):
        for key, each in value.items():
            _check_plain(each, f"{path}.{key:.64}")
    elif isinstance(value, list) and not set(map(type, value)) <= {int, float, str, bool, type(None)}:
        for index, each in enumerate(value):
            _check_plain(each, f"{path}[{index}]")
