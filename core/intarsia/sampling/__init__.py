"""Choosing and verifying tokens."""

from intarsia.sampling.random import CHOOSE, philox, uniforms
from intarsia.sampling.sampler import Sampler, accept, draw, target_probabilities

__all__ = ["CHOOSE", "Sampler", "accept", "draw", "philox", "target_probabilities", "uniforms"]
