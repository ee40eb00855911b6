"""The numbers of a request that its tokens are chosen with."""

from __future__ import annotations

from attrs import frozen

from intarsia.types import SamplingParams


@frozen(kw_only=True)
class Settings:
    """Plain numbers, none of them left open. `top_k` 0 and `top_p`, `typical_p` 1 and `min_p` 0 keep all."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float

    @classmethod
    def of(cls, params: SamplingParams) -> Settings:
        """Take them from parameters that were `filled`."""
        open_ones = (
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.typical_p,
            params.repetition_penalty,
        )
        assert None not in open_ones, "the parameters of a sequence that enters are filled"
        return cls(
            temperature=float(params.temperature or 0.0),
            top_k=int(params.top_k or 0),
            top_p=float(params.top_p or 0.0),
            min_p=float(params.min_p or 0.0),
            typical_p=float(params.typical_p or 0.0),
            repetition_penalty=float(params.repetition_penalty or 1.0),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_p == 0

    @property
    def penalises(self) -> bool:
        """Whether tokens that were there before count."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def filters(self) -> bool:
        """Whether fewer tokens than all may be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1
