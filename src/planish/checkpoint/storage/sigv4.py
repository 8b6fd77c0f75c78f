"""AWS Signature Version 4 of one request whose body is not hashed (`UNSIGNED-PAYLOAD`).

A body is guarded by checksums of its own; hashing it here would cost more than sending it.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote

UNSIGNED = "UNSIGNED-PAYLOAD"


def canonical_query(query: Mapping[str, str]) -> str:
    """Return a query string in the order and the escaping that are signed.

    Example:
        >>> canonical_query({"uploadId": "a/b", "partNumber": "2"})
        'partNumber=2&uploadId=a%2Fb'
    """
    pairs = sorted((quote(name, safe="-_.~"), quote(v, safe="-_.~")) for name, v in query.items())
    return "&".join(f"{name}={value}" for name, value in pairs)


def sign(
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    *,
    access_key: str,
    secret_key: str,
    region: str,
    at: datetime | None = None,
) -> dict[str, str]:
    """Return the headers of a signed request.

    Args:
        method: GET, PUT, ...
        path: escaped, from the first slash.
        query: as `canonical_query` makes it.
        headers: to be sent and signed; must hold `host`; names in lower case.
        access_key: of the user.
        secret_key: of the user.
        region: of the server.
        at: time of signing; None is now.
    """
    moment = (at or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    signed = {**headers, "x-amz-content-sha256": UNSIGNED, "x-amz-date": moment}
    names = sorted(signed)
    lines = "".join(f"{name}:{' '.join(signed[name].split())}\n" for name in names)
    request = "\n".join([method, path, query, lines, ";".join(names), UNSIGNED])
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", moment, scope, digest])
    key = _key(secret_key, moment[:8], region)
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return signed


@functools.lru_cache(maxsize=16)
def _key(secret_key: str, day: str, region: str) -> bytes:
    key = b"AWS4" + secret_key.encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
