"""Which forms of Triton kernels a program compiles as it launches them, and whether they are listed."""

from contextlib import contextmanager

from attrs import frozen


@frozen
class Launched:
    """A form as Triton compiled it at a launch: arguments by name."""

    module: str
    kernel: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, str], ...]
    aligned: frozenset[str]
    num_warps: int
    num_stages: int


def launched(module, kernel, names, facts):
    """Read what Triton's hook tells of a compilation: constants and attributes are by the argument's place."""
    constants = {names[place[0]]: repr(value) for place, value in facts["constants"].items()}
    (attributes,) = facts["configs"]
    aligned = frozenset(names[place[0]] for place, found in attributes.items() if ["tt.divisibility", 16] in found)
    types = {name: kind for name, kind in facts["signature"].items() if name not in constants}
    return Launched(
        module,
        kernel,
        tuple(sorted(types.items())),
        tuple(sorted(constants.items())),
        aligned,
        facts["num_warps"],
        facts["num_stages"],
    )


def listed(form):
    """Return a `Specialisation` as a launch of it is seen."""
    constants = {name: repr(value) for name, value in form.constants.items()}
    function = form.kernel.fn
    return Launched(
        function.__module__,
        function.__qualname__,
        tuple(sorted(form.signature.items())),
        tuple(sorted(constants.items())),
        frozenset(form.aligned),
        form.num_warps,
        form.num_stages,
    )


@contextmanager
def watched():
    """Yield a list that grows with every form of ours that a launch compiles."""
    from triton import knobs

    found = []

    def hook(*, fn, compile, **_):  # noqa: A002 - Triton's name
        if fn.module.startswith("intarsia"):
            found.append(launched(fn.module, fn.name, fn.jit_function.arg_names, compile))

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = None
