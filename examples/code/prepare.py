"""Write MBPP as rows with a prompt that shows its tests, and the tests as ground truth.

    python examples/code/prepare.py mbpp.jsonl [FOLDER]

A folder holds the Parquet or JSON Lines files of MBPP, where there is no network.
"""

import json
import sys
from pathlib import Path

import datasets

PROMPT = """Write a Python function for the task below. Put it in one block of code.

{text}

It must pass these tests:

{tests}
"""


def main(target, folder="google-research-datasets/mbpp"):
    """Write one row for each task; prints how many."""
    rows = datasets.load_dataset(folder, split="train+validation+test")
    with Path(target).open("w", encoding="utf-8") as file:
        for row in rows:
            tests = "\n".join(row["test_list"])
            prompt = PROMPT.format(text=row["text"], tests=tests)
            answer = f"{row['test_setup_code']}\n{tests}".strip()
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    print(f"{len(rows)} tasks: {target}")


if __name__ == "__main__":
    main(*sys.argv[1:])
