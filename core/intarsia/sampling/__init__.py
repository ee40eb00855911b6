"""Choosing and verifying tokens."""

from intarsia.sampling.drawing import Draw, SampleRows, draw, draw_by
from intarsia.sampling.on_device import Picked, to_device
from intarsia.sampling.random import CHOOSE, philox, uniforms
from intarsia.sampling.sampler import Sampler, accept

__all__ = [
    "CHOOSE",
    "Draw",
    "Picked",
    "SampleRows",
    "Sampler",
    "accept",
    "draw",
    "draw_by",
    "philox",
    "to_device",
    "uniforms",
]
