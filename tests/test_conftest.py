"""The tests' own set-up does what it says."""

import os
import warnings

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "allocate",
    [
        lambda dtype: torch.empty(3, 2, dtype=dtype),
        lambda dtype: torch.empty_like(torch.zeros(3, dtype=dtype)),
        lambda dtype: torch.empty_strided((2, 2), (2, 1), dtype=dtype),
        lambda dtype: torch.zeros(3, dtype=dtype).new_empty(2),
        lambda dtype: torch.empty(2, dtype=dtype, requires_grad=True),
    ],
)
def test_uninitialised_floats_are_nan(allocate, dtype):
    assert allocate(dtype).isnan().all()


def test_uninitialised_integers_are_left_alone():
    assert torch.empty(3, dtype=torch.int32).dtype == torch.int32


def test_a_warning_is_an_error():
    with pytest.raises(UserWarning, match="told"):
        warnings.warn("told", stacklevel=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no interpreter")
def test_without_a_gpu_kernels_run_in_the_interpreter():
    assert os.environ["TRITON_INTERPRET"] == "1"
