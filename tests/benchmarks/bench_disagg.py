"""The disaggregated engine, part by part.

`law`: the time of an iteration with paced stages against the law of the ping-pong pipeline.
`replicas`: two vLLM replicas that share an expert rank against one; only where vLLM is installed.
`busy`: how busy an expert rank is with 1, 2 and 4 attention ranks, with vLLM where it is installed.
`m2n`: frames between attention and expert ranks, point to point against a collective.

    python -m tests.benchmarks.bench_disagg [--part law [--ratio 1]] [--part m2n] [--dry]
    .venv-engines/bin/python -m tests.benchmarks.bench_disagg --part replicas --part busy
"""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec

from tests.benchmarks.disagg import busy, law, m2n, replicas

PARTS = ("law", "replicas", "busy", "m2n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts; returns 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="all when absent")
    parser.add_argument("--ratio", choices=law.RATIOS, action="append", help="of `law`")
    parser.add_argument("--iterations", type=int, default=law.ITERATIONS, help="of `law`")
    parser.add_argument("--dry", action="store_true", help="short, on any machine, not written")
    options = parser.parse_args(arguments)
    met = []
    for part in options.part or PARTS:
        if part == "law":
            met.append(
                law.run(dry=options.dry, ratios=options.ratio, iterations=options.iterations)
            )
        elif part in ("busy", "m2n"):
            met.append({"busy": busy, "m2n": m2n}[part].run(dry=options.dry))
        elif options.part or find_spec("vllm"):
            met.append(replicas.run(dry=options.dry))
        else:
            print("replicas: left out, vLLM is not installed here (`make test-engines` does)")
    return 0 if all(met) else 1


if __name__ == "__main__":
    raise SystemExit(main())
