"""Settings that the whole suite shares."""

import os

# Waiting threads give up their core: tests run beside other work, and spinning would take it from them. Read once, when
# the OpenMP library of torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
