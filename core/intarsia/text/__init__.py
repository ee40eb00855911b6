"""Text in and out: the tokenizer, chat templates, and the text of a running sequence.

An engine needs two names: `Tokenizer` turns prompts and chats into ids, `TextStream` turns the ids of one sequence into
text as they come, stop strings included.
"""

from intarsia.text.chat import ChatTemplate
from intarsia.text.detokenizer import Detokenizer
from intarsia.text.stop import StopStrings
from intarsia.text.stream import TextStream
from intarsia.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "TextStream", "Tokenizer"]
