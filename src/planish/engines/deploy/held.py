"""Which policy a rank wants and which it holds, told to the host that answers for its readiness."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TextIO

from planish.records.io import fetch_files
from planish.records.refs import parse_pin


class HeldWeights:
    """Fetches policies that are named by their pins, and tells of them.

    Example:
        >>> import io
        >>> told = io.StringIO()
        >>> held = HeldWeights(told)
        >>> held.want({"folder": "/policy", "pin": "", "version": 3})["folder"]
        '/policy'
        >>> held.hold()
        >>> print(told.getvalue().splitlines()[-1])
        {"wanted": "", "held": "", "version": 3}
    """

    def __init__(self, told: TextIO | None = None) -> None:
        """Hold none.

        Args:
            told: gets a line of JSON at each change; None where nobody asks.
        """
        self._told = told
        self._wanted, self._held, self._next = "", "", 0
        self._version: int | None = None

    def want(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message whose folder, if it names one, is on this machine.

        Args:
            message: settings with `folder` and `version`, and with `pin` where the folder is
                elsewhere; or new `weights` by their address, which a rank fetches itself.

        Raises:
            PlanishError: the policy can not be read here, or is not the pinned one.
        """
        pin = str(message.get("weights") or message.get("pin", ""))
        self._wanted, self._next = pin, int(message["version"])
        self._tell()
        if not pin or "weights" in message:
            return dict(message)
        uri, digest = parse_pin(pin)
        return {**message, "folder": str(fetch_files(uri, sha256=digest, schema="policy/1"))}

    def hold(self) -> None:
        """Take note that the policy wanted last is in use."""
        self._held, self._version = self._wanted, self._next
        self._tell()

    def _tell(self) -> None:
        if self._told is not None:
            state = {"wanted": self._wanted, "held": self._held, "version": self._version}
            self._told.write(json.dumps(state) + "\n")
            self._told.flush()
