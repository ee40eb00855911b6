"""`intarsia generate` and `chat`: what they print is what the model says, by transformers' own account."""

import io
import json
import sys

import pytest
import torch

from intarsia.cli import run
from models import END, tiny_llama, tiny_tokenizer

EXACT = ["-o", "engine.dtype=float32", "-o", "cache.memory=8MiB", "--temperature", "0"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), hidden=32, layers=2, ffn=32, seed=1)


@pytest.fixture
def cli(capsys, monkeypatch, tiny):
    """Run a command on the tiny model in this process; return what it printed."""

    def call(command, *args, stdin=b"", exit_code=0):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = run([command, "-m", str(tiny[0]), *EXACT, *map(str, args)])
        out, err = capsys.readouterr()
        assert code == exit_code, err
        return out, err

    return call


def greedy(model, ids, count):
    """Return what transformers goes on with, token by token, without end."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return out[0, len(ids) :].tolist()


def chat_ids(*messages):
    text = "".join(f"{role}: {content}{END}" for role, content in messages) + "assistant: "
    return tiny_tokenizer()(text).input_ids


def test_json_is_the_whole_answer(cli, tiny):
    out, err = cli("generate", "--json", "--max-tokens", 8, "--ignore-eos", "--seed", 5, "Hello")
    answer = json.loads(out)
    assert list(answer) == ["text", "token_ids", "prompt_token_ids", "finish_reason", "usage", "timings", "seed"]
    assert answer["prompt_token_ids"] == tiny_tokenizer()("Hello").input_ids
    assert answer["token_ids"] == greedy(tiny[1], answer["prompt_token_ids"], 8)
    assert answer["text"] == tiny_tokenizer().decode(answer["token_ids"], skip_special_tokens=True)
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "cached_tokens": 0}
    assert 0 < answer["timings"]["first_token_s"] <= answer["timings"]["total_s"]
    assert answer["seed"] == 5
    assert err == ""
    assert out.count("\n") == 1


def test_text_is_the_same_answer_and_ends_its_line(cli):
    args = ["--max-tokens", 24, "--ignore-eos", "Hello"]
    text = json.loads(cli("generate", "--json", *args)[0])["text"]
    assert cli("generate", *args) == (text if text.endswith("\n") else text + "\n", "")


def test_a_prompt_on_stdin_loses_the_lines_end_and_no_more(cli):
    for stdin, prompt in (
        (b"Hello\n", "Hello"),
        (b"a\r\n", "a"),
        (b"two\nlines\n\n", "two\nlines\n"),
        ("é".encode(), "é"),
    ):
        answer = json.loads(cli("generate", "--json", "--max-tokens", 1, stdin=stdin)[0])
        assert answer["prompt_token_ids"] == tiny_tokenizer()(prompt).input_ids


def test_chat_takes_the_prompt_as_a_users_message(cli):
    answer = json.loads(cli("generate", "--json", "--chat", "--max-tokens", 1, "Hi")[0])
    assert answer["prompt_token_ids"] == chat_ids(("user", "Hi"))


def test_token_ids_are_the_prompt(cli, tiny):
    answer = json.loads(cli("generate", "--json", "--token-ids", "72, 5,0", "--max-tokens", 6, "--ignore-eos")[0])
    assert answer["prompt_token_ids"] == [72, 5, 0]
    assert answer["token_ids"] == greedy(tiny[1], [72, 5, 0], 6)


def test_logprobs_are_the_raw_distributions(cli, tiny):
    answer = json.loads(cli("generate", "--json", "--max-tokens", 4, "--ignore-eos", "--logprobs", 3, "Hello")[0])
    ids = answer["prompt_token_ids"] + answer["token_ids"]
    with torch.inference_mode():
        rows = tiny[1](torch.tensor([ids])).logits[0, len(answer["prompt_token_ids"]) - 1 : -1].log_softmax(-1)
    for row, token, entry in zip(rows, answer["token_ids"], answer["logprobs"], strict=True):
        assert entry["token_id"] == token
        assert entry["logprob"] == pytest.approx(row[token].item(), abs=1e-4)
        assert [t for t, _ in entry["top"]] == row.topk(3).indices.tolist()
        assert [logprob for _, logprob in entry["top"]] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_several_choices_are_printed_one_after_the_other(cli):
    args = ["--temperature", 1, "--seed", 3, "-n", 3, "--max-tokens", 6, "--ignore-eos", "Hello"]
    answer = json.loads(cli("generate", "--json", *args)[0])
    assert len(answer["choices"]) == 3
    assert answer["choices"][0]["token_ids"] == answer["token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    shown = ""
    for number, choice in enumerate(answer["choices"]):
        shown += f"--- choice {number}\n{choice['text']}"
        shown += "" if choice["text"].endswith("\n") else "\n"
    assert cli("generate", *args)[0] == shown


def test_a_stop_text_ends_the_answer_and_is_cut(cli):
    whole = json.loads(cli("generate", "--json", "--ignore-eos", "--max-tokens", 12, "Hello")[0])["text"]
    stop = next(letter for letter in whole[3:] if letter.isprintable() and letter != "�" and letter not in whole[:3])
    args = ["--ignore-eos", "--max-tokens", 12, "--stop", "never to be said", "--stop", stop, "Hello"]
    answer = json.loads(cli("generate", "--json", *args)[0])
    assert (answer["text"], answer["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_the_model_option_overrides_the_configs(cli, tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text('model = "./no/such/model"\n[scheduler]\nuse = "static"\n')
    _, err = cli("generate", "-c", file, "--max-tokens", 2, "--report", "Hello")
    assert "scheduler=static" in err


def test_report_closes_with_figures_and_parts_and_leaves_stdout_alone(cli):
    args = ["--max-tokens", 8, "--ignore-eos", "Hello"]
    plain, _ = cli("generate", *args)
    out, err = cli("generate", "--report", *args)
    assert out == plain
    figures, parts = err.splitlines()
    assert figures.startswith("8 tokens after a prompt of 5, first token in 0.")
    assert figures.endswith(" tokens/s")
    for part in ("loader=safetensors", "family=llama", "scheduler=", "executor=local", "cpu float32"):
        assert part in parts
    json.loads(cli("generate", "--report", "--json", *args)[0])


def test_a_model_without_a_tokenizer_prints_ids(capsys, tmp_path):
    path, model = tiny_llama(tmp_path, hidden=32, layers=2, ffn=32, vocab=64)
    assert run(["generate", "-m", str(path), *EXACT, "--token-ids", "1,2", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == ",".join(map(str, greedy(model, [1, 2], 5))) + "\n"
    assert run(["generate", "-m", str(path), *EXACT, "text"]) == 2
    assert "no tokenizer" in capsys.readouterr().err


# --- chat through a pipe ----------------------------------------------------------------------------------------------


def answers(tiny, *messages, count):
    """Return what transformers answers to each message in turn, remembering all."""
    history, said = [], []
    for message in messages:
        ids = greedy(tiny[1], chat_ids(*history, ("user", message)), count)
        ids = ids[: ids.index(256)] if 256 in ids else ids
        text = tiny_tokenizer().decode(ids, skip_special_tokens=True)
        said.append(text)
        history += [("user", message), ("assistant", text)]
    return said


def test_chat_remembers_what_was_said(cli, tiny):
    first, second = answers(tiny, "Hi", "And you?", count=6)
    assert second != answers(tiny, "And you?", count=6)[0], "or the test proves nothing"
    out, err = cli("chat", "--max-tokens", 6, stdin=b"Hi\n\nAnd you?\n")
    assert out == f"{first}\n{second}\n"
    assert "error" not in err


def test_reset_forgets_and_exit_ends(cli, tiny):
    (first,) = answers(tiny, "Hi", count=6)
    out, _ = cli("chat", "--max-tokens", 6, stdin=b"Hi\n/reset\nHi\n/exit\nHi\n")
    assert out == f"{first}\n{first}\n"


def test_a_word_with_a_slash_is_a_command_and_a_wrong_one_is_told(cli):
    out, err = cli("chat", "--max-tokens", 6, stdin=b"/rest\n", exit_code=2)
    assert out == ""
    assert "'/rest'" in err
    assert "'/reset'" in err


def test_a_conversation_that_outgrows_the_context_is_told_and_goes_on(cli, tiny):
    first, second = answers(tiny, "Hi", "Bye", count=6)
    too_long = b"x" * 600
    out, err = cli("chat", "--max-tokens", 6, stdin=b"Hi\n" + too_long + b"\nBye\n", exit_code=2)
    assert out == f"{first}\n{second}\n", "the message that failed is no part of the history"
    (message,) = [line for line in err.splitlines() if "error" in line]
    assert "engine.max_model_len = 512" in message
    assert "/reset" in message
