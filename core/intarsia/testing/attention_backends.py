"""The contract of attention backends, as tests to inherit.

::

    from intarsia.testing.attention_backends import AttentionContract

    class TestMine(AttentionContract):
        def provider(self):
            return my_plugin.provide_attention_backends()[0]

pytest runs the inherited tests. No model runs: the suite lays out steps as an engine makes them, over a cache whose
unused slots hold NaN, and compares each row with numpy in float64. What a backend is held to, its `fit` says: layers
and dtypes that it refuses are not tried, and a claim that it refuses altogether is skipped, in sight. So are the levels
of invariance that it does not promise.
"""

from __future__ import annotations

from intarsia.testing.attention_bits import BitClaims
from intarsia.testing.attention_life import LifeClaims
from intarsia.testing.attention_numerics import NumericClaims
from intarsia.testing.attention_visibility import VisibilityClaims

__all__ = ["AttentionContract"]


class AttentionContract(BitClaims, LifeClaims, VisibilityClaims, NumericClaims):
    """What every attention backend keeps. Subclass it, name the class `Test...`, and say whose provider it is.

    What can be said besides, such as `device`, is in `AttentionCase`.
    """
