"""Weights by the pinned URI of a policy, which ranks elsewhere can read by themselves."""

from planish.engines.weights import FolderWeights
from planish.records.io import fetch_files
from planish.records.refs import parse_pin


class PinnedWeights(FolderWeights):
    """The files of an export, under the address of its pin."""

    def __init__(self, pin: str) -> None:
        uri, digest = parse_pin(pin)
        super().__init__(fetch_files(uri, sha256=digest, schema="policy/1"))
        self.address = pin
