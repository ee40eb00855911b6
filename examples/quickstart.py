"""The Python API: whole answers, a stream, and the loop by hand. Run it: `python examples/quickstart.py`."""

from intarsia import Engine, Request, SamplingParams


def main() -> None:
    """Ask SmolLM2 in three ways."""
    config = {"model": "smollm2", "scheduler": {"use": "static", "max_batch": 8}}
    with Engine.from_config(config) as engine:
        whole_answers(engine)
        stream(engine)
        loop_by_hand(engine)


def whole_answers(engine: Engine) -> None:
    """Answer three prompts at once: a text, token ids, and the messages of a chat."""
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(max_tokens=8, temperature=0)
    for completion in engine.generate(["Once upon", [19556, 28], chat], params):
        print(f"{completion.text!r} ended by {completion.finish_reason}, {completion.usage}")


def stream(engine: Engine) -> None:
    """Print an answer as it comes. The same seed gives the same answer."""
    for delta in engine.stream("Once upon a time", SamplingParams(max_tokens=16, seed=1)):
        print(delta.text, end="", flush=True)
    print()


def loop_by_hand(engine: Engine) -> None:
    """Drive the steps: add requests whenever they come, cancel one, look at the figures."""
    for name in ("first", "second"):
        engine.add(Request(request_id=name, prompt="The sun", params=SamplingParams(max_tokens=8, temperature=0)))
    engine.step()
    engine.cancel("second")
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                print(output.request_id, "ended by", output.finish_reason, "after", output.timings)
    print(engine.stats())


if __name__ == "__main__":
    main()
