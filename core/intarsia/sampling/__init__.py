"""Choosing and verifying tokens."""

from intarsia.sampling.random import CHOOSE, philox, uniforms
from intarsia.sampling.sampler import Sampler, accept

__all__ = ["CHOOSE", "Sampler", "accept", "philox", "uniforms"]
