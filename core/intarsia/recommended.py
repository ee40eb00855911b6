"""What a model's files recommend for sampling, as the defaults of requests that do not say.

The names are those of Hugging Face's generation_config.json. What a file leaves out, or says is null, is our own plain
default and not transformers': there, without `top_k` it is 50. `do_sample` false is greedy, as there: it rules out
temperature and the filters beside it. Without it the answer is drawn: few files say it, and most mean sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from intarsia.errors import CheckpointError, InvalidRequestError
from intarsia.structuring import shown
from intarsia.types import Checkpoint, ModelChoice, SamplingDefaults, SamplingParams

#: What a model without sampling still says: it changes greedy answers too.
_OF_GREEDY = ("repetition_penalty",)


def recommended(model: ModelChoice, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the sampling defaults that the model's files give: name -> value; empty where the config leaves them out.

    Raises:
        CheckpointError: a value is out of the range that a request's may have; names the field and the value.
    """
    if not model.generation_config:
        return {}
    raw = checkpoint.sampling
    names = [field.name for field in attrs.fields(SamplingDefaults)]
    given = {name: raw[name] for name in names if raw.get(name) is not None}
    if not _samples(raw):
        given = {"temperature": 0.0} | {name: given[name] for name in _OF_GREEDY if name in given}
    try:
        params = SamplingParams(**given)
    except InvalidRequestError as error:
        raise _wrong(str(error).removeprefix("sampling."), (error.field or "").removeprefix("sampling.")) from None
    return {name: getattr(params, name) for name in given}


def _samples(raw: Mapping[str, Any]) -> bool:
    said = raw.get("do_sample")
    if said is not None and not isinstance(said, bool):
        raise _wrong(f"do_sample: {shown(said)} is not true or false", "do_sample")
    return said is not False


def _wrong(what: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"the sampling that the model's files recommend (generation_config.json): {what}; "
        "model.generation_config = false leaves it out",
        field=name,
    )
