"""A weight source over a parameter tree in memory, which keeps a list of what was read."""

import threading

import numpy as np

from maxmoe.model.stacks import plan_stacks


class TreeSource:
    """Serves the weights of an unrolled model.

    Attributes:
      reads: Group, name and index of every read, in the order they were asked for.
      failing: Reads of these (group, name) raise OSError.
    """

    def __init__(self, params, config):
        self.reads, self.failing = [], set()
        self._lock = threading.Lock()
        self._groups = {"top": {name: leaf for name, leaf in params.items() if not name.startswith("stacks_")}}
        for number, plan in enumerate(plan_stacks(config)):
            stack = params[f"stacks_{number}"]
            for i in range(plan.count):
                for place in range(plan.size):
                    weights = dict(stack[f"superblocks_{i}"][f"layers_{place}"])
                    experts = stack.get(f"experts_{place}", {})
                    weights["experts"] = {name: leaf[i] for name, leaf in experts.items()}
                    self._groups[f"layer_{plan.first + i * plan.size + place:03d}"] = weights

    def read(self, group, name, index=()):
        with self._lock:
            self.reads.append((group, name, index))
        if (group, name) in self.failing:
            raise OSError(f"the disk gave up on {group} {name}")
        leaf = self._groups[group]
        for key in name.split("/"):
            leaf = leaf[key]
        return np.asarray(leaf)[index]

    def experts_read(self):
        """(group, expert) of each expert that was read, once per read of all its six arrays."""
        return [(group, index[0]) for group, name, index in self.reads if name == "experts/gate_packed"]
