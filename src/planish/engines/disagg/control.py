"""JSON forms of what the coordinator and one rank say to each other: requests and outputs.

They travel with settings and plans of iterations over a `base.child.Channel`. Rows of tokens take
another way.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from planish.base.child import Message
from planish.engines.requests import Output, Request, Sampling
from planish.records.rollouts import FinishReason


def encode_request(request: Request) -> Message:
    """Return a request in JSON form."""
    return {**vars(request), "sampling": vars(request.sampling)}


def decode_requests(plain: Collection[Mapping[str, Any]]) -> list[Request]:
    """Return the requests from the results of `encode_request`."""
    requests = []
    for one in plain:
        ids = {name: tuple(one[name]) for name in ("prompt_ids", "response_prefix")}
        requests.append(Request(**{**one, **ids, "sampling": Sampling(**one["sampling"])}))
    return requests


def encode_outputs(outputs: Collection[Output]) -> list[Message]:
    """Return outputs in JSON form."""
    plain = []
    for output in outputs:
        one = {**vars(output), "finish_reason": int(output.finish_reason)}
        if output.routing is not None:
            data = base64.b64encode(output.routing.tobytes()).decode()
            one["routing"] = [data, str(output.routing.dtype), output.routing.shape]
        plain.append(one)
    return plain


def decode_outputs(plain: Collection[Mapping[str, Any]]) -> list[Output]:
    """Return the outputs from the result of `encode_outputs`."""
    outputs = []
    for one in plain:
        output = Output(**{**one, "finish_reason": FinishReason(one["finish_reason"])})
        if one["routing"] is not None:
            data, dtype, shape = one["routing"]
            output.routing = np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
        outputs.append(output)
    return outputs
