"""Copies of a GPU's tensors in host memory, while kernels still write to them."""

from __future__ import annotations

import pytest
import torch

from finetrainers.engine.host_copy import host_copy


@pytest.mark.gpu
def test_copies_are_of_the_values_at_the_call() -> None:
    weight = torch.zeros(4096, 4096, device="cuda")
    table = torch.arange(16.0, device="cuda")
    state = {"weight": weight, "turned": weight.t(), "tables": [table, table], "step": torch.tensor(3.0)}
    product = torch.eye(4096, device="cuda")
    for _ in range(50):  # the host is far ahead of the device
        product = product @ product
    weight.add_(product)
    copied = host_copy(state)
    weight.fill_(-1.0)
    table.fill_(-1.0)
    assert torch.equal(copied["weight"], torch.eye(4096))
    assert copied["weight"].is_pinned()
    assert copied["turned"].untyped_storage().data_ptr() == copied["weight"].untyped_storage().data_ptr()
    assert copied["turned"].stride() == (1, 4096)
    assert copied["tables"][0] is copied["tables"][1]
    assert copied["tables"][0].tolist() == list(range(16))
    assert copied["step"].item() == 3.0
