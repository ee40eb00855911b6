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
    """

    _detokenizer: Detokenizer
    _stops: StopStrings
    _stopped: bool = field(default=False, init=False)

    @classmethod
    def open(cls, tokenizer: Tokenizer, params: SamplingParams) -> TextStream:
        """Begin the text of a sequence, by its request's `stop`, `include_stop` and `skip_special_tokens`."""
        detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        return cls(detokenizer, StopStrings(params.stop, params.include_stop))

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
            texts.append(self._take(self._detokenizer.push((token_id,))))
            if not self._stopped and self._stops.completed_by(self._whole_pending()):
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

    def _take(self, text: str) -> str:
        text, self._stopped = self._stops.push(text)
        return text

    def _whole_pending(self) -> str:
        """Return text that would be settled if the sequence ended now.

        A newline that is a byte token is held back, as the next byte could spoil it. As a stop string it ends the
        sequence, so nothing comes that could; asking for another token would only waste it.
        """
        pending = self._detokenizer.peek()
        return "" if REPLACEMENT in pending else pending
