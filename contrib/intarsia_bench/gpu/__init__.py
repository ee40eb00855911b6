"""What a GPU does with our kernels and engines, beside its own limits; and its checks, on a machine without a network.

`python -m intarsia_bench.gpu` runs the tests of `tests/gpu` and every part of the benchmark within a time, and writes
one JSON and one table. `bundle` packs all that such a machine lacks; `bootstrap` installs it there.
"""
