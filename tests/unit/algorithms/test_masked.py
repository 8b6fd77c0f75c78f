import torch

from planish.algorithms.masked import last_column, masked_mean, masked_sum, masked_whiten


def test_nan_and_infinity_outside_the_mask_leave_value_and_gradient_untouched():
    x = torch.tensor([[1.0, float("nan"), 2.0, float("inf")]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1, 0]])
    total = masked_sum(x, mask)
    total.backward()
    assert total.item() == 3.0
    assert x.grad.tolist() == [[1.0, 0.0, 1.0, 0.0]]
    assert masked_mean(x, mask).item() == 1.5


def test_an_empty_mask_has_mean_zero_per_row_and_over_all():
    x = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    mask = torch.tensor([[0, 0], [1, 1]])
    assert masked_mean(x, mask, 1).tolist() == [0.0, 6.0]
    assert masked_mean(x, torch.zeros(2, 2)).item() == 0.0


def test_half_precision_is_summed_in_float32():
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    total = masked_sum(x, torch.ones(1, 4096))
    assert total.dtype == torch.float32
    assert total.item() == 4096.0


def test_whitening_one_entry_gives_zero():
    assert masked_whiten(torch.tensor([[5.0, 1.0]]), torch.tensor([[1, 0]])).tolist() == [[0, 0]]


def test_last_column_steps_over_holes_and_trailing_padding():
    mask = torch.tensor([[0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    assert last_column(mask).tolist() == [3, 0, 0, 4]
