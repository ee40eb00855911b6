"""Prompts to ids and ids to text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import field, frozen
from tokenizers import Tokenizer as Backend

from intarsia.errors import CheckpointError, InvalidRequestError
from intarsia.text.chat import ChatTemplate
from intarsia.text.decoding import Decoding
from intarsia.text.detokenizer import Detokenizer
from intarsia.types import Chat, Message, TokenizerSpec

#: A text of more characters than this for each token that it may have is tried by its beginning.
_PLENTY = 16


@frozen(eq=False)
class Tokenizer:
    """A tokenizer.json with its BOS rule and chat template.

    BOS is put here and never by the file's own post-processor, so that there is one rule for every file: where
    `add_bos` is set, ids begin with exactly one BOS, whether the text or the template already had it or not.

    Attributes:
        spec: what it was made from.
        vocab_size: the largest id + 1.
        bos_id: put before prompts where `add_bos` is set.
        eos_ids: ids that end a generation.
        chat_template: None where the model has none.
    """

    _backend: Backend = field(repr=False)
    _decoding: Decoding = field(repr=False)
    _special: frozenset[str] = field(repr=False)
    spec: TokenizerSpec = field(repr=False)
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    chat_template: ChatTemplate | None = field(repr=False)

    @classmethod
    def from_spec(cls, spec: TokenizerSpec) -> Tokenizer:
        """Make the tokenizer of a checkpoint.

        A chat template that does not compile is no error yet: plain prompts work without it.

        Raises:
            CheckpointError: the definition is malformed or has a decoder that is not known, or BOS is to be added and
                there is none.
        """
        backend = _read(spec.definition)
        # A file may say to cut or pad what it encodes; a prompt is never changed in silence.
        backend.no_truncation()
        backend.no_padding()
        if spec.add_bos and spec.bos_id is None:
            raise CheckpointError("tokenizer: add_bos is set and bos_id is None; it must be an id", field="tokenizer")
        added = backend.get_added_tokens_decoder().values()
        return cls(
            backend=backend,
            decoding=Decoding(_decoder(backend)),
            special=frozenset(token.content for token in added if token.special),
            spec=spec,
            vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
            bos_id=spec.bos_id,
            eos_ids=spec.eos_ids,
            add_bos=spec.add_bos,
            chat_template=None if spec.chat_template is None else ChatTemplate(spec.chat_template, spec.special_tokens),
        )

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        """Return the ids of a plain prompt. Special tokens that the text spells out are parsed as such.

        Args:
            text: the prompt.
            most: how many ids are of use; a text of far more is refused once its beginning shows it, as reading all
                of it could take seconds. None reads any text.

        Raises:
            InvalidRequestError: the text is no valid Unicode, the tokenizer has no tokens for it, or they are far more
                than `most`.
        """
        return self._with_bos(self._encode(text, "prompt", most))

    def encode_chat(self, chat: Chat | Sequence[Message], *, most: int | None = None) -> list[int]:
        """Return the ids of a chat; of messages alone, up to where the assistant's turn begins.

        Args:
            chat: the chat.
            most: as of `encode`.

        Raises:
            InvalidRequestError: the model has no chat template, the chat is malformed or refused by it, or its ids are
                far more than `most`.
            CheckpointError: the template is malformed.
        """
        if self.chat_template is None:
            raise InvalidRequestError(
                "messages: this model has no chat template, so it takes no chat; plain prompts work", field="messages"
            )
        return self._with_bos(self._encode(self.chat_template.render(chat), "messages", most))

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; those outside the vocabulary, such as a padded vocabulary's last ones, have none."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def id_text(self, token_id: int) -> str:
        """Return the text that one token has inside a text: with its spaces, special tokens spelled out.

        A token that is a part of a character gives U+FFFD, an id outside the vocabulary nothing.
        """
        pieces = self._pieces((token_id,))
        return self._decoding.inside(pieces[0]) if pieces else ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds inside a text; empty for special tokens and ids without one.

        Of any ids, these bytes one after another are what `decode` returns, as UTF-8, but for spaces that a tokenizer
        leaves out where a text begins or ends (SentencePiece's first, a word's end at the last token), and for the mark
        that a text keeps which begins with WordPiece's continuation of a word. Where they
        are no valid UTF-8, byte-level tokenizers decode them with U+FFFD for what is invalid, as Python's "replace"
        does, and tokenizers with byte tokens with U+FFFD for each byte of a run that is not valid as a whole.
        """
        pieces = self._plain_pieces((token_id,))
        if not pieces:
            return b""
        raw = self._decoding.raw_bytes(pieces[0])
        return self._decoding.inside(pieces[0]).encode() if raw is None else raw

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a detokenizer for one sequence."""
        return Detokenizer(self._decoding, self._plain_pieces if skip_special_tokens else self._pieces)

    def _with_bos(self, ids: list[int]) -> list[int]:
        if not self.add_bos or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def _encode(self, text: str, field_name: str, most: int | None) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequestError(f"{field_name}: {type(text).__name__} is not a text", field=field_name)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{field_name}: character {error.start} is {text[error.start]!r}, half of a surrogate pair, and not "
                "valid Unicode",
                field=field_name,
            ) from None
        if most is not None and len(text) > (size := _PLENTY * (most + 1)):
            # A beginning has as many ids as it has in the whole, but for those at its end: half as many is far beyond.
            num_ids = len(self._backend_ids(text[:size], field_name))
            if num_ids > 2 * (most + 1):
                raise InvalidRequestError(
                    f"{field_name}: the first {size} of {len(text)} characters alone are {num_ids} tokens, too many "
                    f"for engine.max_model_len; give at most {most} tokens",
                    field=field_name,
                )
        return self._backend_ids(text, field_name)

    def _backend_ids(self, text: str, field_name: str) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            if not _is_the_librarys(error):
                raise
            raise InvalidRequestError(
                f"{field_name}: this model's tokenizer cannot encode the text: {error}", field=field_name
            ) from None
        return ids

    def _pieces(self, ids: Iterable[int]) -> list[str]:
        tokens = (self._backend.id_to_token(one) for one in ids if 0 <= one < self.vocab_size)
        return [token for token in tokens if token is not None]

    def _plain_pieces(self, ids: Iterable[int]) -> list[str]:
        return [piece for piece in self._pieces(ids) if piece not in self._special]


def _read(definition: str) -> Any:
    try:
        return Backend.from_str(definition)
    except BaseException as error:
        if not _is_the_librarys(error):
            raise
        raise CheckpointError(f"tokenizer: the tokenizer.json is malformed: {error}", field="tokenizer") from None


def _is_the_librarys(error: BaseException) -> bool:
    """Whether the library failed. Its Rust code may panic on a malformed file, and a panic is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _decoder(backend: Any) -> dict[str, Any] | None:
    """Return the file's decoder in the library's present spelling, whatever version wrote it."""
    if backend.decoder is None:
        return None
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return state
