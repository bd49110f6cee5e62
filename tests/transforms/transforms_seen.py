"""The faults of native EPLB support, seen in what runs: one look for each kind.

A served class is run under the stubs of the oracle; nothing here asks the tool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transforms_oracle as oracle
import transforms_real as real
import transforms_toy as toy
from transforms_real import LLAMA4_SERVED, QWEN3, Case


def _loads_wrong(kind: str, shape: tuple[int, int, int]) -> Callable[[oracle.Machine, Case], bool]:
    def look(fake: oracle.Machine, case: Case) -> bool:
        out = 1 if case == QWEN3 else 2
        return bool(real.run(fake, case, real.tensors_of(case, kind, out), [shape]))

    return look


def _indexes_physical(fake: oracle.Machine, case: Case) -> bool:
    try:
        real.run(fake, case, real.tensors_of(case, "fused"), [(4, 2, 2)])
    except IndexError:
        return True
    return False


def _built(fake: oracle.Machine, case: Case, world: oracle.World) -> Any:
    return fake.build(getattr(fake.load(case.module or case.family), case.cls), world)


def _raises_on_an_empty_stage(fake: oracle.Machine, case: Case) -> bool:
    try:
        _built(fake, case, toy.EMPTY).update_physical_experts_metadata(6, 3)
    except (RuntimeError, AssertionError):
        return True
    return False


def _reaches_other_stages(fake: oracle.Machine, case: Case) -> bool:
    try:
        _built(fake, case, toy.STAGE).update_physical_experts_metadata(6, 3)
    except (AttributeError, AssertionError):
        return True
    return False


def _doubles_weights(fake: oracle.Machine, case: Case) -> bool:
    model = _built(fake, case, oracle.World(4, 2, 2))
    return "set_eplb_state twice: expert_weights doubled" in toy.state_set_twice(fake, model)


def _keeps_old_counts(fake: oracle.Machine, case: Case) -> bool:
    model = _built(fake, case, oracle.World(4, 2, 2))
    return "the model's own numbers are the old ones" in toy.updated(fake, model)


SEEN: dict[str, Callable[[oracle.Machine, Case], bool]] = {
    "second-replica": _loads_wrong("per_expert", (4, 6, 2)),
    "fused-replicas": _loads_wrong("fused", (4, 2, 2)),
    "physical-index": _indexes_physical,
    "empty-stage": _raises_on_an_empty_stage,
    "other-stages": _reaches_other_stages,
    "doubled-weights": _doubles_weights,
    "stale-counts": _keeps_old_counts,
}


def faults_seen(fake: oracle.Machine, case: Case) -> set[str]:
    """The kinds of faults that show when a served class of a release is built and used."""
    found = set()
    for slug, look in SEEN.items():
        fused = slug in ("fused-replicas", "physical-index")
        if fused and (case == LLAMA4_SERVED) != (slug == "physical-index"):
            continue
        if fused and case == QWEN3 and not fake.layer_loads:
            continue  # its own loader never knew fused tensors
        with fake.installed():
            if look(fake, case):
                found.add(slug)
    return found
