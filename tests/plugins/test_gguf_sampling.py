"""What a GGUF file's metadata recommend for sampling, in Hugging Face's spelling."""

import pytest

from intarsia.errors import CheckpointError
from intarsia_gguf.checkpoint import GgufLoader
from tools import gguf_bytes as gb


def sampling(tmp_path, **values):
    path = tmp_path / "model.gguf"
    more = {f"general.sampling.{name}": value for name, value in values.items()}
    path.write_bytes(gb.tiny_file(more))
    return dict(GgufLoader(path).open().sampling)


def test_a_file_without_recommendations_gives_none(tmp_path):
    assert sampling(tmp_path) == {}


def test_recommendations_have_hugging_faces_names_and_the_numbers_that_were_written(tmp_path):
    floats = {"temp": 0.6, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.05, "xtc_probability": 0.5}
    values = {name: (gb.F32, value) for name, value in floats.items()}
    values |= {"top_k": (gb.I32, 20), "sequence": (gb.STRING, "top_k;temp"), "mirostat": (gb.I32, 0)}
    expected = {"temperature": 0.6, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05, "top_k": 20}
    assert sampling(tmp_path, **values) == expected


def test_what_switches_a_sampler_off_in_llama_cpp_does_here(tmp_path):
    found = sampling(
        tmp_path, temp=(gb.F32, -1.0), top_k=(gb.I32, -1), penalty_repeat=(gb.F32, 1.3), penalty_last_n=(gb.I32, 0)
    )
    assert found == {"temperature": 0.0, "top_k": 0}


@pytest.mark.parametrize("name", ["temp", "top_k"])
def test_a_recommendation_of_the_wrong_type_is_refused_by_key(tmp_path, name):
    with pytest.raises(CheckpointError, match=rf"general\.sampling\.{name}' is .*not a"):
        sampling(tmp_path, **{name: (gb.STRING, "hot")})
