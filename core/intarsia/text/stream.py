"""The text of one running sequence: detokenizing and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from intarsia.text.decoding import REPLACEMENT
from intarsia.text.detokenizer import Detokenizer
from intarsia.text.stop import StopStrings
from intarsia.text.tokenizer import Tokenizer
from intarsia.types import SamplingParams


@define
class TextStream:
    """Turns the generated ids of one sequence into text that is safe to show, and finds its stop strings.

    The engine pushes the ids that it accepts, never those of the prompt, and a stop token only where its text is to
    stay (`include_stop`). However a sequence ends, `finish` gives what was held back: by a stop token or by length it
    belongs to the text; of an aborted sequence it may be dropped::

        text, kept = stream.push(ids)      # kept: how many of the ids count, if a stop string ended the text
        if kept is None and finished:      # by a stop token, by length
            text += stream.finish()
        if stream.stopped:                 # finish may meet a stop string as well
            reason = "stop"

    A stop string that one of the first `min_tokens` ids completes is let pass and stays in the text.
    """

    _detokenizer: Detokenizer
    _stops: StopStrings
    _min_tokens: int = 0
    _num_ids: int = field(default=0, init=False)
    #: characters still to come that are of the first `min_tokens` ids: held back, as a next byte could spoil them
    _free: int = field(default=0, init=False)
    _stopped: bool = field(default=False, init=False)

    @classmethod
    def open(cls, tokenizer: Tokenizer, params: SamplingParams) -> TextStream:
        """Begin the text of a sequence, as its request's parameters say: stop strings, and what stays in the text."""
        detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        return cls(detokenizer, StopStrings(params.stop, params.include_stop), params.min_tokens)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text. Nothing may be pushed after it."""
        return self._stopped

    def push(self, ids: Sequence[int]) -> tuple[str, int | None]:
        """Take accepted ids in order.

        Returns:
            The new text, and None, or, where a stop string ended it, how many of these ids count: the last of them
            completed the stop string. The result does not depend on how ids are split over calls.
        """
        assert not self._stopped, "the text has ended"
        if not self._stops:
            return self._detokenizer.push(ids), None
        texts = []
        for count, token_id in enumerate(ids, start=1):
            self._num_ids += 1
            texts.append(self._take(self._detokenizer.push((token_id,))))
            if self._is_free:
                self._free = len(self._detokenizer.peek().partition(REPLACEMENT)[0])
            elif not self._stopped and self._stops.completed_by(self._whole_pending(), self._free):
                texts.append(self._take(self._detokenizer.finish()))
            if self._stopped:
                return "".join(texts), count
        return "".join(texts), None

    def finish(self) -> str:
        """Return the rest of the text; empty once a stop string has ended it."""
        if self._stopped:
            return ""
        text = self._take(self._detokenizer.finish())
        return text + self._stops.finish()

    @property
    def _is_free(self) -> bool:
        """Whether a stop string that the last id completes is let pass."""
        return self._num_ids <= self._min_tokens

    def _take(self, text: str) -> str:
        """Take settled text; return what of it can be shown."""
        free = len(text) if self._is_free else self._free
        self._free = max(0, self._free - len(text))
        text, self._stopped = self._stops.push(text, free)
        return text

    def _whole_pending(self) -> str:
        """Return text that would be settled if the sequence ended now.

        A newline that is a byte token is held back, as the next byte could spoil it. As a stop string it ends the
        sequence, so nothing comes that could; asking for another token would only waste it.
        """
        pending = self._detokenizer.peek()
        return "" if REPLACEMENT in pending else pending
