"""Choosing and verifying tokens."""

from intarsia.sampling.drawing import Draw, draw, draw_by
from intarsia.sampling.random import CHOOSE, philox, uniforms
from intarsia.sampling.sampler import Sampler, accept

__all__ = ["CHOOSE", "Draw", "Sampler", "accept", "draw", "draw_by", "philox", "uniforms"]
