"""Train states: saved and loaded under any number of ranks, exported for rollout engines.

A state is a folder: `<part>-<rank>.safetensors`, `tensors.json` (which region of which tensor lies
where), `extra.json` (counters, data position) and a manifest, written last. Nothing is pickled.
"""
