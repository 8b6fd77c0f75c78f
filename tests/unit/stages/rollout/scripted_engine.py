"""An engine without a model: what it answers is a function of the seed of the request.

It meets the whole protocol of engines, so that the rollout stage can be tested over many
iterations with lengths, failures and versions that the test knows.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from planish.engines.base import BaseEngine
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef, Output, Request, WeightUpdate
from planish.records.io import read_manifest
from planish.records.refs import parse_pin
from planish.records.rollouts import FinishReason

EOS = 2


def scripted_length(seed: int) -> int:
    """Natural length of a response in tokens, the end token included: 1 to 24, mostly short."""
    return 1 + seed % (6 if seed % 5 else 24)


def scripted_token(seed: int, position: int) -> int:
    """Token at a position; the last one is the end token."""
    return EOS if position + 1 == scripted_length(seed) else 4 + (seed // 7 + 3 * position) % 40


def scripted_logprob(seed: int, position: int) -> float:
    return -0.25 * (1 + (seed + position) % 8)


def fails(seed: int, version: int) -> bool:
    """Some responses fail under some policies, whatever is tried."""
    return (seed // 3 + version) % 11 == 0


class ScriptedEngine(BaseEngine):
    """Grows every response by scripted tokens, one a step."""

    token = staticmethod(scripted_token)
    """Seed and position to a token."""
    step_sizes: tuple[int, ...] = (1,)
    """Tokens that a step gives each response, in turn."""

    def __init__(
        self, *, max_rows: int, device: str, config: EngineConfig, max_model_len: int = 0
    ) -> None:
        super().__init__(max_rows, 64, routing=False)
        self.rows: list[tuple[Request, Output]] = []
        self.counts = self._counts

    def _load(self, model: ModelRef) -> int:
        uri, digest = parse_pin(model.pin)
        return int(read_manifest(uri, sha256=digest).attributes["policy_version"])

    def _check(self, request: Request) -> str:
        return "scripted" if fails(request.sampling.seed, self._version) else ""

    def _free_rows(self) -> int:
        return self._max_rows - len(self.rows)

    def _admit(self, requests: Sequence[Request]) -> list[Output]:
        self.rows += [
            (request, Output(request.request_id, [], [], [], FinishReason.LENGTH))
            for request in requests
        ]
        return []

    def _num_running(self) -> int:
        return len(self.rows)

    def _advance(self) -> list[Output]:
        size = self.step_sizes[self.counts["steps"] % len(self.step_sizes)]
        self.counts["steps"] += 1
        self.counts["row_steps"] += len(self.rows)
        self.counts["most_rows"] = max(self.counts["most_rows"], len(self.rows))
        going, done = [], []
        for request, output in self.rows:
            for _ in range(size):
                if self.grow(request, output):
                    done.append((request, output))
                    break
            else:
                going.append((request, output))
        self.rows = going
        return [output for _, output in done]

    def grow(self, request: Request, output: Output) -> bool:
        """Add a token; return whether it ends the response."""
        seed = request.sampling.seed
        position = len(request.response_prefix) + output.num_tokens
        output.token_ids.append(self.token(seed, position))
        output.logprobs.append(scripted_logprob(seed, position))
        output.versions.append(self._version)
        self.counts["tokens"] += 1
        if output.token_ids[-1] == EOS:
            output.finish_reason = FinishReason.STOP
        return output.token_ids[-1] == EOS or output.num_tokens == request.sampling.max_new_tokens

    def _withdraw(self, request_ids: Collection[str]) -> list[Output]:
        gone = [output for request, output in self.rows if request.request_id in request_ids]
        self.rows = [pair for pair in self.rows if pair[0].request_id not in request_ids]
        return [replace(output, finish_reason=FinishReason.ABORT) for output in gone]

    def _replace_weights(self, source, version: int) -> WeightUpdate:
        return WeightUpdate(version, 0, 0, 0.0)

    def _release(self) -> None:
        self.rows = []
