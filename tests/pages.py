"""What servers of ours show: status and text of a page, and the metrics in it."""

import urllib.error
import urllib.request


def get(url: str) -> tuple[int, str]:
    """Return status and text; status 0 for no answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def samples(text: str) -> dict[str, float]:
    """Return sample with its labels -> value of everything that Prometheus would scrape.

    Example:
        >>> samples('# TYPE a gauge\\na{b="c"} 1.0\\n')
        {'a{b="c"}': 1.0}
    """
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
