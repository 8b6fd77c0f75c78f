"""A step of Qwen2.5-7B in bytes and operations: what fused steps and half operands save."""

import pytest

from tests.benchmarks.bench_roofline import SIZES, WAYS, model_flops, step

# The compiler asks results of other operations for gradients.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

SIZE = next(size for size in SIZES if size.name == "Qwen2.5-7B")


@pytest.fixture(scope="module")
def steps():
    return {name: step(SIZE, WAYS[name]) for name in ("before", "after")}


def total(found, kind, field):
    parts = found["parts"].items()
    return sum(part[field] for name, part in parts if kind == "" or name.endswith(f", {kind}"))


def done(found):
    return sum(part.get("flops", 0) for part in found["parts"].values())


def test_products_are_those_of_the_model_and_none_is_computed_again_but_those_of_the_head(steps):
    """By hand: recomputation adds a third to the layers; the head computes its scores twice."""
    before, after = steps["before"], steps["after"]
    tokens = WAYS["after"].tokens
    assert before["model_flops"] == after["model_flops"]
    layers = 6 * 28 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18_944)
    head = 6 * 152_064 * 3584 * 7 / 8  # an eighth of a row is its prompt
    attention = 6 * 28 * 3584 * 2048
    norms_and_biases = 6 * 28 * (2 * 3584 + 3584 + 2 * 512)
    assert model_flops(SIZE, tokens) / tokens == pytest.approx(
        layers + head + attention + norms_and_biases
    )
    count = 512 * 2048 / 8
    # The backward pass of attention computes its scores again.
    assert done(after) / count == pytest.approx(layers + 4 / 3 * head + 7 / 6 * attention)
    # The result of a layer's last product is not needed again.
    again = 4 / 3 * layers - 2 * 28 * 3584 * 18_944
    assert done(before) / count == pytest.approx(again + 4 / 3 * head + 9 / 6 * attention)


def test_no_product_leaves_the_tensor_cores(steps):
    assert "head, float32 products" in steps["before"]["parts"]
    assert not any("float32" in name for name in steps["after"]["parts"])


def test_fused_steps_move_a_third_of_the_bytes_in_a_sixth_of_the_kernels(steps):
    before, after = steps["before"], steps["after"]
    assert total(after, "steps", "bytes") < total(before, "steps", "bytes") / 3
    # For as many tokens; a micro-batch has half of them.
    assert total(after, "steps", "kernels") < total(before, "steps", "kernels") / 6


def test_the_share_of_the_peak_follows_at_the_stated_rates(steps):
    assert 0.24 < steps["before"]["mfu"] < 0.3
    assert steps["after"]["mfu"] > 0.38
    # Ranks send and receive beside their products, and take less time for it.
    assert steps["after"]["link_seconds"] < steps["after"]["seconds"]
