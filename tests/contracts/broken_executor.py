"""What broken executors are made of: the local one, a few lines of which are another's."""

from typing import ClassVar

from attrs import evolve

from contracts.planted import offering, planting
from intarsia.defaults import provide_executors
from intarsia.executor import LocalExecutor
from intarsia.testing.executors import ExecutorContract

FAULTS = []
plant = planting(FAULTS)


class Local(LocalExecutor):
    """A base of broken ones: `meets` sees a plan before it is launched, `brings` a step's rows and results."""

    deep: ClassVar = False

    def meets(self, plan):
        return plan

    def brings(self, rows, results):
        return results

    def submit(self, plan):
        super().submit(self.meets(plan))

    def collect(self):
        rows = self._steps[0].plan.rows
        result = super().collect()
        return evolve(result, rows=tuple(self.brings(rows, result.rows)))


def contract(part):
    """Return the contract for a broken executor."""

    class Broken(ExecutorContract):
        options: ClassVar = {"depth": 2} if part.deep else {}
        patience_s = 0.3
        lives = 12

        def provider(self):
            return offering(provide_executors()[0], part)

    return Broken
