r"""How a byte-level BPE cuts a text into words before merging, by `tokenizer.ggml.pre`.

The names are those of llama.cpp's `llama-vocab.cpp`; the patterns are the ones of the models' own tokenizer.json, of
which llama.cpp's are rewritings for a regex engine without `(?i:...)` and `\p{Lu}`. A rule is `Split`s one after
another, each cutting what the one before left.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

# The languages' words of GPT-2 (Radford et al. 2019); `ByteLevel` has the pattern built in.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(suffix: str, digits: str) -> str:
    """Words that are cut where lower case turns to upper case, as in `camelCase`."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}|{digits}|{_CASED_TAIL}"


_TEKKEN = _cased("", r"\p{N}")
_GPT4O = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@frozen(kw_only=True)
class PreTokenizer:
    """One way of cutting.

    Attributes:
        splits: patterns whose matches, and what lies between them, become words.
        digits: digits of any script stand alone; cut before `splits`.
        gpt2: cut with GPT-2's pattern last.
        nfc: texts are composed first (Unicode normalization form C).
        ignore_merges: a word that is a token stays whole even if no merges lead to it.
        add_bos: a prompt starts with the BOS token where the file does not say.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> dict[str, Any] | None:
        """Return `normalizer` of tokenizer.json."""
        return {"type": "NFC"} if self.nfc else None

    def pre_tokenizer(self, add_prefix_space: bool) -> dict[str, Any]:
        """Return `pre_tokenizer` of tokenizer.json."""
        steps: list[dict[str, Any]] = []
        if self.digits:
            steps.append({"type": "Digits", "individual_digits": True})
        steps += [
            {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
            for split in self.splits
        ]
        steps.append(byte_level(add_prefix_space, use_regex=self.gpt2))
        return {"type": "Sequence", "pretokenizers": steps}


def byte_level(add_prefix_space: bool, use_regex: bool) -> dict[str, Any]:
    """Return the step that spells bytes as characters."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


_PLAIN = PreTokenizer(gpt2=True)
_PLAIN_NFC = PreTokenizer(gpt2=True, nfc=True)
_DIGITS = PreTokenizer(digits=True, gpt2=True)
_LLAMA3_BOS = PreTokenizer(splits=(_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer(splits=(_QWEN2,))
_OPENAI = PreTokenizer(splits=(_GPT4O,))

#: `tokenizer.ggml.pre` -> how it cuts.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # What llama.cpp does where a file does not say.
    "default": PreTokenizer(splits=(_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "exaone4", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum"), _PLAIN
    ),
    # Built on GPT-NeoX's tokenizer, which composes.
    **dict.fromkeys(("olmo", "mpt"), _PLAIN_NFC),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "command-r": PreTokenizer(digits=True, gpt2=True, nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"), _LLAMA3_BOS
    ),
    # dbrx is what OLMo 2 and Phi-4 have, refact Granite 3.
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(splits=(_LLAMA3,))),
    "qwen2": PreTokenizer(splits=(_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2", "kormo", "f2llmv2"), _QWEN),
    "qwen35": PreTokenizer(splits=(_QWEN35,), nfc=True),
    "tekken": PreTokenizer(splits=(_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), _OPENAI),
    "seed-coder": PreTokenizer(splits=(_SEED_CODER,)),
    "falcon": PreTokenizer(splits=(_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": PreTokenizer(splits=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
}
