"""Parts of installed plugins, built for a GPU as composition builds them."""

from intarsia.plugins import Registry
from intarsia.protocols import PartContext
from intarsia.types import DecoderSpec, EngineOptions, Fit, LayerSpec, MlpSpec, NormSpec

DEVICE = "cuda"


def build(slot, key, attention, dtype, **options):
    """Build a part for a model of one layer; it must fit."""
    layer = LayerSpec(attention, MlpSpec(64, "silu"))
    spec = DecoderSpec("llama", 256, 64, 4096, NormSpec(), tied=False, layers=(layer,))
    provider = Registry.discover().find(slot, key).provider
    engine = EngineOptions(device=DEVICE, dtype=dtype, max_model_len=4096)
    context = PartContext(options=provider.options(**options), engine=engine, spec=spec, num_ids=256)
    fit = provider.fit(context)
    assert isinstance(fit, Fit), fit
    return provider.build(context)
