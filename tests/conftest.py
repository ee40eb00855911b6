"""Settings that the whole suite shares."""

import os

# Waiting threads give up their core: tests run beside other work, and spinning would take it from them. Read once, when
# the OpenMP library of torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Triton's kernels run in its interpreter, on CPU tensors. Read when a kernel is decorated, and by Triton's own library
# when that is imported: before any test is. Tests on a GPU set it to 0 (`make gpu-check`).
os.environ.setdefault("TRITON_INTERPRET", "1")
