"""Set-up that every test shares."""

import pytest
import torch
import torchvision_ops

collect_ignore_glob = ["conftest.py", "*/conftest.py"]  # they hold no doctests, and share a name

torchvision_ops.declare()  # before anything imports torchvision
torch.set_num_threads(1)  # tests run side by side, and training repeats whatever the number of cores


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers, alone or in any order, and leaves global switches as they were."""
    torch.manual_seed(0)
    dtype, fast_path = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()
    yield
    assert torch.get_default_dtype() == dtype
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
