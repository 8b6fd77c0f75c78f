"""The engine itself behind the two calls of `ckpt_memory`: files, planner, exchange and all."""

import torch.distributed as dist

from planish.checkpoint.adapters.base import apply, collect
from planish.checkpoint.loading.agree import LoadOptions
from planish.checkpoint.loading.load import load_state, open_on_all
from planish.checkpoint.ranks.control import control_of
from planish.checkpoint.saving.agree import SaveOptions
from planish.checkpoint.saving.engine import default_engine


def groups():
    """Return the groups of the first n ranks of the job, by n; a collective of all ranks."""
    size = dist.get_world_size()
    return {n: dist.new_group(list(range(n))) for n in range(1, size + 1)}


def save(place, state, framework, *, group=None, role="main", step=1):
    """Save the state of the ranks of a group and wait until it is committed."""

    def gathered():
        return {role: collect(role, state, framework, for_load=False)}

    options = SaveOptions(place, step=step, is_async=False)
    return default_engine(group).save(gathered, options).result(300)


def load(place, state, framework, *, group=None, role="main", strict=True):
    """Fill a state in place; returns the adapter's report and what the engine says."""
    control = control_of(group)
    opened = open_on_all(place, control)
    found = collect(role, state, framework, for_load=True, metadata=opened.metadata)
    info, small = load_state(opened, {role: found}, control, LoadOptions(strict=strict))
    report = apply(state, found, small.values.get(role, {}), small.loader.get(role))
    return report, info.facts
